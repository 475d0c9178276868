"""An assistant's program: a real client of the package `mcp`, and `kale-dist mcp` as its server over standard input and output."""

import contextlib
import os
import re
import sys

import anyio.from_thread
from mcp import Client, StdioServerParameters
from mcp.client.stdio import stdio_client


class Assistant:
    """What an assistant's program does: it calls tools, and reads their text.

    Args:
        portal: Where the client's loop runs.
        client: The client.
        folder: Where the server was started.
    """

    def __init__(self, portal, client, folder):
        self._portal, self._client, self.folder = portal, client, folder

    def tools(self):
        return self._portal.call(self._client.list_tools).tools

    def call(self, tool, **arguments):
        answer = self._portal.call(self._client.call_tool, tool, arguments)
        text = "\n".join(part.text for part in answer.content)
        assert "\x1b" not in text
        assert ("Traceback" in text) <= (tool in ("logs", "explain"))
        return answer.is_error, text

    def ask(self, tool, **arguments):
        """The answer of a tool that does not refuse."""
        is_error, text = self.call(tool, **arguments)
        assert not is_error, text
        return text

    def refusal(self, tool, **arguments):
        is_error, text = self.call(tool, **arguments)
        assert is_error, text
        return text

    def token(self, path, **arguments):
        return re.search("token '(.*)'", self.ask("plan", path=path, **arguments))[1]

    def submit(self, path, **arguments):
        return re.search(r"as (\S+)\. ", self.ask("submit", token=self.token(path, **arguments)))[1]

    def stop(self, ref):
        """Have a job ended; returns how it ended."""
        token = re.search("token '(.*)'", self.ask("stop", ref=ref))[1]
        assert "is being ended" in self.ask("stop", ref=ref, token=token)
        return self.ask("status", ref=ref, wait_s=50)


@contextlib.contextmanager
def serving(folder):
    parameters = StdioServerParameters(
        command=sys.executable, args=["-P", "-m", "kale_dist.cli", "mcp", str(folder)], env=dict(os.environ)
    )
    with (
        anyio.from_thread.start_blocking_portal() as portal,
        portal.wrap_async_context_manager(Client(stdio_client(parameters))) as client,
    ):
        yield Assistant(portal, client, folder)

"""`breakpoint()` in a rank: pdb, whose terminal is the cell or the shell of the person who waits for the job.

What pdb prints goes to the agent as an `Breakpoint`, and the line that is typed comes back as a `Typed`. Each prompt has a name of its
own: a line that was typed at another one, or sent twice, does nothing. `PassOver` comes back where nobody has typed anything.
"""

from __future__ import annotations

import codeop
import multiprocessing
import pdb  # noqa: T100 - this is the debugger
import secrets
import sys
import threading
import types
from typing import Any

from kale_dist.errors import ConfigError
from kale_dist.snapshot import sources
from kale_dist.wire import context
from kale_dist.wire.messages import Breakpoint, PassedOver, PassOver, Typed
from kale_dist.worker.rank.control import Control

MAX_TEXT = 64 << 10
"""Characters that are shown of what one command has printed."""

_lock = threading.RLock()
"""Held at a prompt: threads of a rank that reach breakpoints are debugged one after the other."""

_of_thread = threading.local()
_is_passing = False
"""Whether breakpoints are passed over from now on."""


def stop(frame: types.FrameType, agent: Control, wait_s: float, header: str | None) -> None:
    """Stop at the next line of a frame.

    Args:
        frame: Where `breakpoint()` was called.
        agent: Passes on what is printed and typed.
        wait_s: How long the agent waits for a person; with 0 the breakpoint is passed over at once.
        header: What pdb prints first, as for `pdb.set_trace`.

    Raises:
        ConfigError: This is a process that the rank has started.
    """
    if multiprocessing.parent_process() is not None:
        raise ConfigError(
            "breakpoint",
            "a process that a rank has started, such as a worker of a DataLoader, has no terminal to debug in",
            "Debug it in the rank itself, for a DataLoader with num_workers=0",
        )
    if _is_passing or not wait_s:
        agent.send(PassedOver(where=sources.place_of(frame, frame.f_lineno)))
        return
    if not hasattr(_of_thread, "debugger"):
        _of_thread.debugger = Debugger(agent)
    if header is not None:
        _of_thread.debugger.message(header)
    # From here on each call is traced: nothing may follow.
    _of_thread.debugger.set_trace(frame)


def leave() -> None:
    """The user's function has returned, or raised: steps do not go on in this library."""
    if hasattr(_of_thread, "debugger"):
        _of_thread.debugger.set_continue()


class Debugger(pdb.Pdb):
    """pdb that sees only the user's frames, and those that they call.

    Args:
        agent: Passes on what is printed and typed.
    """

    def __init__(self, agent: Control) -> None:
        self._terminal = _Terminal(agent)
        super().__init__(stdin=self._terminal, stdout=self._terminal, nosigint=True, readrc=False)  # type: ignore[arg-type]
        self.use_rawinput = False
        self.prompt = f"(rank {context.context().rank}) "
        self._first = ""

    def set_trace(self, frame: types.FrameType | None = None, **options: Any) -> None:
        """Stop at the next line of a frame, whose file counts as the user's own even where it is installed."""
        if frame is not None:
            self._first = frame.f_code.co_filename
        super().set_trace(frame, **options)

    def set_stepinstr(self) -> None:
        """Stop at the next line, where `set_trace` of Python 3.13 and later would stop within the breakpoint's own."""
        self.set_step()

    def set_continue(self) -> None:
        """Run on: the rank has left its breakpoint."""
        super().set_continue()
        self._terminal.leave()

    def set_quit(self) -> None:
        """End the rank, and with it the job."""
        super().set_quit()
        self._terminal.leave()

    def stop_here(self, frame: types.FrameType) -> bool:
        """Whether to stop in a frame: the user's, or one that it has called; not in what the training loop does between steps."""
        if not super().stop_here(frame):
            return False
        found: types.FrameType | None = frame
        while found is not None and not sources.is_own(found.f_code.co_filename):
            if self._is_users(found):
                return True
            found = found.f_back
        return False

    def get_stack(self, f: types.FrameType | None, t: types.TracebackType | None) -> tuple[list[Any], int]:
        """The stack from the user's first frame on."""
        stack, index = super().get_stack(f, t)
        files = [frame.f_code.co_filename for frame, _ in stack]
        # The fork server's own frames stand above the rank's.
        own = next((at for at, name in enumerate(files) if sources.is_own(name)), 0)
        first = next((at for at, (frame, _) in enumerate(stack) if at > own and self._is_users(frame)), 0)
        return stack[first:], max(0, index - first)

    def format_stack_entry(self, frame_lineno: tuple[types.FrameType, int], lprefix: str = ": ") -> str:
        """A frame's line, with the cell as the user knows it."""
        name = self.canonic(frame_lineno[0].f_code.co_filename)
        return super().format_stack_entry(frame_lineno, lprefix).replace(name, sources.label_of(name), 1)

    def interaction(self, frame: types.FrameType | None, *given: Any) -> None:
        """Read commands, one thread at a time."""
        with _lock:
            if frame is not None:
                self._terminal.where = sources.place_of(frame, frame.f_lineno)
            super().interaction(frame, *given)

    def default(self, line: str) -> None:
        """Execute a statement; of one that is not complete, read the lines that follow, up to an empty one."""
        text = line.removeprefix("!").lstrip()
        while _is_incomplete(text):
            self.stdout.write("...".ljust(len(self.prompt)))
            more = self.stdin.readline()
            if not more:
                return
            text = f"{text}\n{more.rstrip()}"
        super().default(text)

    def do_EOF(self, _arg: str) -> bool | None:  # noqa: N802 - as the base class calls it
        """No answer is to come: run on."""
        return self.do_continue("")

    def _is_users(self, frame: types.FrameType) -> bool:
        name = frame.f_code.co_filename
        return name == self._first or sources.is_users(name)


class _Terminal:
    """What pdb reads and writes: the other end is a prompt in the notebook or a terminal."""

    encoding = "utf-8"

    def __init__(self, agent: Control) -> None:
        self.where = ""
        """Where the rank is, as the user knows the place."""
        self._agent = agent
        self._text = ""
        self._typed = ""

    def write(self, text: str) -> int:
        self._text += text
        return len(text)

    def flush(self) -> None:
        """Do nothing: all is sent with the prompt."""

    def readline(self) -> str:
        """The next line that is typed; empty if none will be."""
        global _is_passing  # noqa: PLW0603 - a process is one rank
        if _is_passing:
            return ""
        # So that what was printed before is in the log before the prompt.
        sys.stdout.flush()
        sys.stderr.flush()
        prompt = secrets.token_hex(8)
        self._prompt(prompt)
        while (message := self._agent.receive()) is not None:
            if isinstance(message, Typed) and message.prompt == prompt:
                self._typed = message.text
                return f"{self._typed}\n"
            if isinstance(message, PassOver) and message.prompt == prompt:
                break
        _is_passing = True
        return ""

    def leave(self) -> None:
        """The rank has left its breakpoint."""
        if self.where:
            self._prompt("")
            self.where = ""

    def _prompt(self, prompt: str) -> None:
        text, self._text = self._text, ""
        if len(text) > MAX_TEXT:
            body, newline, last = text.rpartition("\n")
            text = f"{body[:MAX_TEXT]} [{len(body):,} characters]{newline}{last}"
        self._agent.send(Breakpoint(prompt=prompt, where=self.where, text=text, typed=self._typed))


def _is_incomplete(text: str) -> bool:
    try:
        return codeop.compile_command(text, "<stdin>", "single") is None
    except (OverflowError, SyntaxError, ValueError):
        return False

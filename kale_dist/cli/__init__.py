"""The command line: manages jobs from any terminal, and runs whole notebooks.

Exit codes: 0; 1 after a failure; 2 for a mistake in the command; 130 after Ctrl-C, 143 after SIGTERM; 141 after a closed pipe. Those
of `launch` are the script's own.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence

from kale_dist import __version__, scripts, wire
from kale_dist.cli import doctor_command, image_commands, job_commands, launch_command, list_commands, run_command
from kale_dist.cli.arguments import Parser
from kale_dist.cli.mcp_command import add_command as add_mcp
from kale_dist.cli.runtime_command import add_command as add_runtime
from kale_dist.errors import ConfigError, KaleDistError

_FAILURE, _USAGE, _READER_LEFT = 1, 2, 141


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        arguments: The words of the command line; None for those of this process.

    Returns:
        The exit code.
    """
    try:
        try:
            words, after = launch_command.split(sys.argv[1:] if arguments is None else arguments)
            parser = _parser()
            options, unknown = parser.parse_known_args(words)
            if unknown:
                launch_command.refuse(options, unknown)
                options.parser.refuse(unknown[0])
            options.arguments = after
            code: int = options.command(options)
        finally:
            sys.stdout.flush()
    except ConfigError as error:
        return _complain(error, _USAGE)
    except KaleDistError as error:
        return _complain(error, _FAILURE)
    except KeyboardInterrupt as error:
        return scripts.BY_SIGNAL + (error.args[0] if error.args else signal.SIGINT)
    except BrokenPipeError:
        # The interpreter flushes stdout at its end and would report the broken pipe.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _READER_LEFT
    return code


def _complain(error: KaleDistError, code: int) -> int:
    print(f"kale-dist: {wire.visible(str(error))}", file=sys.stderr)
    return code


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="kale-dist", description="Manage jobs, here and elsewhere, and execute notebooks.")
    parser.add_argument("--version", action="version", version=f"kale-dist {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    for part in (list_commands, job_commands):
        part.add_commands(commands)
    for single in (doctor_command, launch_command, image_commands, run_command):
        single.add_command(commands)
    add_mcp(commands)
    add_runtime(commands)
    return parser

"""How the commands declare their arguments."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from typing import Any, NoReturn, Protocol

from kale_dist import places, wording
from kale_dist.errors import ConfigError


class Commands(Protocol):
    """What `add_subparsers` returns, for which argparse has no public name."""

    @property
    def add_parser(self) -> Callable[..., argparse.ArgumentParser]:
        """Adds a command."""


def add_parser(
    commands: Commands,
    name: str,
    what: str,
    run: Callable[[argparse.Namespace], int] | None = None,
    more: str = "",
    **settings: Any,
) -> argparse.ArgumentParser:
    """Add a command.

    Args:
        commands: The parser's commands.
        name: The command's name.
        what: What it does, as a clause that begins in lower case.
        run: Runs the command; returns its exit code. None for a command with commands of its own.
        more: A further sentence for the description.
        **settings: Other arguments of argparse's parser.
    """
    description = " ".join(filter(None, (f"{what[:1].upper()}{what[1:]}.", more)))
    made = commands.add_parser(name, help=what, description=description, **settings)
    if run is not None:
        made.set_defaults(command=run, parser=made)
    return made


class Parser(argparse.ArgumentParser):
    """Answers words that no command has with those that were probably meant."""

    def error(self, message: str) -> NoReturn:
        """Print the message, and exit."""
        if found := re.search(r"invalid choice: '(.*)' \(choose from (.*)\)", message):
            message += f". {wording.closest(found[1], re.findall(r'[a-z]+', found[2]))}"
        super().error(message.rstrip())

    def refuse(self, word: str) -> NoReturn:
        """Refuse an argument that the command does not have.

        Raises:
            ConfigError: Always.
        """
        known = re.findall(r"--[\w-]+", self.format_help())
        name, equals, value = word.partition("=")
        is_value = equals and not word.startswith("-") and "--parameters" in known
        near = f"Write it as -p {name} {value}" if is_value else wording.closest(name, known).rstrip()
        raise ConfigError(word, f"{self.prog} has no such argument", near or f"See {self.prog} --help")


def add_place(made: argparse.ArgumentParser, on: str, namespace: str, default: str | None = None) -> None:
    """Add `--on` and `--namespace` to a command.

    Args:
        made: The command's parser.
        on: The help text of `--on`.
        namespace: The help text of `--namespace`.
        default: The default of `--on`.
    """
    made.add_argument("--on", choices=places.NAMES, default=default, help=on)
    made.add_argument("--namespace", metavar="NAME", help=namespace)


def add_pairs(made: Any, *options: str, what: str, **given: Any) -> None:
    """Add an option that takes a name and a value, and may be given several times, to a command or a group of its options."""
    names = ("NAME", "VALUE")
    made.add_argument(*options, nargs=2, action=NameAndValue, default={}, metavar=names, help=what, **given)


class NameAndValue(argparse.Action):
    """Collects pairs of a name and a value; refuses NAME=VALUE, after which the next word would be taken for the value."""

    def __call__(self, _parser: Any, namespace: argparse.Namespace, values: Any, _option: Any = None) -> None:
        """Add a pair to the option's dict."""
        name, value = values
        if "=" in name:
            raise argparse.ArgumentError(
                self, f"{name!r} is not a name. Write it as NAME VALUE, with a space between them"
            )
        setattr(namespace, self.dest, getattr(namespace, self.dest) | {name: value})

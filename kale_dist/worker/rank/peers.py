"""Whose processes the ranks of one machine are connected to: gloo asks nobody who connects, and takes him for a rank."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import pathlib
import socket
import struct
import time
from collections.abc import Collection, Iterator
from typing import NamedTuple

from kale_dist.errors import ContractError
from kale_dist.wire import context

ANSWER_S = 10.0
"""In which another rank accepts a connection; it takes milliseconds."""

_LOOK_EACH_S = 0.02
_LOOPBACK = ("127.", "::1", "::ffff:127.")
_TCP_MD5SIG_EXT, _HAS_PREFIX = 32, 1
_SOCK_DIAG, _SOCK_DIAG_BY_FAMILY, _IS_REQUEST, _IS_ERROR = 4, 20, 1, 2
_ADDRESSES = struct.Struct("!HH16s16s")
Address = tuple[str, int]


class Owner(NamedTuple):
    """The owner of a socket."""

    user: int
    inode: int
    """0 as long as the connection is not accepted."""


def sockets() -> dict[str, int]:
    """The sockets of this process: inodes and descriptors."""
    found = {}
    for path in pathlib.Path("/proc/self/fd").iterdir():
        # The descriptor by which the folder is read is closed by now.
        with contextlib.suppress(OSError):
            before, _, inode = str(path.readlink()).partition("socket:[")
            if not before:
                found[inode.rstrip("]")] = int(path.name)
    return found


def tcp_sockets(before: Collection[str] = ()) -> Iterator[tuple[int, socket.socket]]:
    """Yield the TCP sockets of this process with their descriptors, to look at: they stay their owners'.

    Args:
        before: Inodes of those that are left out.
    """
    for descriptor in [number for inode, number in sockets().items() if inode not in before]:
        # Another thread may just have closed it.
        with contextlib.suppress(OSError):
            one = socket.socket(fileno=descriptor)
            try:
                if one.family in (socket.AF_INET, socket.AF_INET6) and one.type == socket.SOCK_STREAM:
                    yield descriptor, one
            finally:
                one.detach()


def of_python(but: socket.socket | None = None) -> set[int]:
    """The descriptors of sockets that Python code has opened: a tracker's, a data set's. Not `but`, which is one that is looked at."""
    return {one.fileno() for one in gc.get_objects() if isinstance(one, socket.socket) and one is not but}


def check(before: dict[str, int], *, closes: bool) -> None:
    """Refuse new connections to processes of other users of this machine.

    Args:
        before: `sockets()` before the connections were made.
        closes: Whether no further ranks will connect to the ports that were opened meanwhile.

    Raises:
        ContractError: There is one.
    """
    give_up_at = time.monotonic() + ANSWER_S
    try:
        for descriptor, one in tcp_sockets(before):
            try:
                here, there = one.getsockname()[:2], one.getpeername()[:2]
            except OSError:
                listens = one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
                if listens and closes and descriptor not in of_python(but=one):
                    close_to_all(one)
                continue
            # Who connects chooses the address that he seems to come from.
            if here[0] != there[0] and not here[0].startswith(_LOOPBACK):
                continue
            if (own := _owner(one.family, here, there)) is None:
                # It does not even know this end, which may just have been cut.
                _warn("the kernel does not tell")
                continue
            while (other := _owner(one.family, there, here)) and not other.inode and time.monotonic() < give_up_at:
                time.sleep(_LOOK_EACH_S)
            # Where nobody is, nothing is lost. And another thread of the user's code may have connected to something of its own.
            if other and (other.user != own.user or not other.inode) and descriptor not in of_python(but=one):
                raise ContractError(
                    f"A process of another user of this machine (uid {other.user}) has connected to a rank in another rank's place, and got"
                    " nothing from it. Call again, and if this happens again, find out who that is"
                )
    except OSError as error:
        _warn(str(error))


def close_to_all(listener: socket.socket) -> None:
    """Let nobody connect any more, where the kernel can: only packets count that are signed by a key that nobody has (RFC 2385, tcp(7)).

    gloo aborts its rank when its port is flooded, and does not let go of it.
    """
    where = struct.pack("=HH", listener.family, 0).ljust(128, b"\0")
    key = struct.pack("=BBHi80s", _HAS_PREFIX, 0, 16, 0, os.urandom(16))
    with contextlib.suppress(OSError):
        listener.setsockopt(socket.IPPROTO_TCP, _TCP_MD5SIG_EXT, where + key)


def _warn(why: str) -> None:
    if not context.context().rank:
        text = f"The ranks cannot find out whose processes they are connected to ({why}): they would not notice another user's"
        context.log_once(text, warns=True)


def _owner(family: int, here: Address, there: Address) -> Owner | None:
    """Ask the kernel (sock_diag(7)) whose socket is connected from `here` to `there`; None if it knows none.

    Raises:
        OSError: It answers with an error, or not in time.
    """
    packed = [socket.inet_pton(family, address).ljust(16, b"\0") for address, _ in (here, there)]
    wanted = _ADDRESSES.pack(here[1], there[1], *packed) + struct.pack("=Iq", 0, -1)
    asked = struct.pack("=BBBxI", family, socket.IPPROTO_TCP, 0, 0xFFFFFFFF) + wanted
    header = struct.pack("=IHHII", 16 + len(asked), _SOCK_DIAG_BY_FAMILY, _IS_REQUEST, 0, 0)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _SOCK_DIAG) as kernel:
        kernel.settimeout(ANSWER_S)
        kernel.send(header + asked)
        answer = kernel.recv(1 << 12)
    if struct.unpack_from("=H", answer, 4)[0] == _IS_ERROR:
        number = -struct.unpack_from("=i", answer, 16)[0]
        if number == errno.ENOENT:
            return None
        raise OSError(number, os.strerror(number))
    return Owner(*struct.unpack_from("=II", answer, 80))

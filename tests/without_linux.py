"""Takes Linux's own calls away from this process, as they are on a Mac; import it before kale_dist. No Mac was tried.

What stays is what macOS has, too: fcntl's locks, resource limits, sockets with names in folders.
"""

import builtins
import ctypes
import ctypes.util
import io
import os
import pathlib
import select
import selectors
import signal
import socket
import sys
import sysconfig

# These look at the platform when they are first used; for kale_dist this is a Mac.
import torch  # noqa: F401

sysconfig.get_config_vars()

for _module, _names in (
    (os, ("memfd_create", "pidfd_open", "sched_getaffinity", "sched_setaffinity", "eventfd", "splice")),
    (signal, ("SIGRTMAX", "SIGRTMIN", "pidfd_send_signal", "sigtimedwait", "sigwaitinfo")),
    (select, ("epoll",)),
    (socket, ("SO_PEERCRED", "SO_PASSCRED", "AF_NETLINK", "MSG_CMSG_CLOEXEC")),
):
    for _name in _names:
        if hasattr(_module, _name):
            delattr(_module, _name)


selectors.DefaultSelector = selectors.PollSelector


def _refuse(*_arguments, **_options):
    raise OSError("a notebook is never forked, and starts no agent where there is no Linux")


os.fork = _refuse


def _without_proc(real):
    def call(path, *arguments, **options):
        text = os.fspath(path) if isinstance(path, str | os.PathLike) else ""
        if str(text).startswith(("/proc", "/sys", "/dev/shm")):
            raise FileNotFoundError(2, "No such file or directory", path)
        return real(path, *arguments, **options)

    return call


builtins.open = io.open = _without_proc(open)
for _name in ("stat", "listdir", "scandir", "readlink", "open"):
    setattr(os, _name, _without_proc(getattr(os, _name)))
pathlib.Path.open = _without_proc(pathlib.Path.open)


class _Library(ctypes.CDLL):
    def __getattr__(self, name):
        if name in ("prctl", "memfd_create", "epoll_create1"):
            raise AttributeError(name)
        return super().__getattr__(name)


ctypes.CDLL = _Library
sys.platform = "darwin"

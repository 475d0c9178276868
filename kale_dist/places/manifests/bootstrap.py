"""The command that every pod begins with: it unpacks this library's worker side and becomes the pod's agent. Pure."""

from __future__ import annotations

from kale_dist.wire import EXIT_TERMINATED, InputFiles, PodVariable

EXIT_CODE = 78
"""Exit code of a container in which the agent could not be started: the image's Python is too old, or the input cannot
be unpacked. The container's termination message names which."""

# Runs in whatever Python the image has: it has to be valid for all of Python 3, and is not part of the library there. The
# working folder is taken off the path as `-P` would do it, which versions before 3.11 do not know.
BOOTSTRAP = f"""\
import os, signal, sys
# Process 1 of a container does not get a SIGTERM that it has no handler for: a pod that is deleted as it starts would stay
# for its whole grace. The agent has a handler of its own, and one that comes in between waits for it.
signal.signal(signal.SIGTERM, lambda *_: os._exit({EXIT_TERMINATED}))
sys.path[:] = [path for path in sys.path if path]

def stop(text):
    text = "kale_dist: " + text
    sys.stderr.write(text + "\\n")
    try:
        with open("/dev/termination-log", "w") as file:
            file.write(text)
    except OSError:
        pass
    sys.exit({EXIT_CODE})

if sys.version_info < (3, 11):
    version = ".".join(str(part) for part in sys.version_info[:3])
    stop("the image's Python is " + version + " (" + sys.executable + "), and 3.11 or later is needed")
source = os.path.join(os.environ["{PodVariable.INPUT}"], "{InputFiles.RUNTIME}")
target = os.path.join(os.environ["{PodVariable.WORK}"], "runtime")
try:
    import zipfile
    with zipfile.ZipFile(source) as packed:
        packed.extractall(target)
except (ImportError, OSError, ValueError, zipfile.BadZipFile) as error:
    stop("the job's input " + source + " cannot be unpacked into " + target + ": " + str(error))
# By `sys.path`, not by PYTHONPATH, which the user's own subprocesses would inherit.
run = "import os, runpy, signal, sys; signal.signal(signal.SIGTERM, lambda *_: os._exit({EXIT_TERMINATED})); "
run += "signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM]); sys.path.insert(0, " + repr(target) + "); sys.argv[1:] = ['pod']; "
run += "runpy.run_module('kale_dist.worker', run_name='__main__')"
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
os.execv(sys.executable, [sys.executable, "-P", "-c", run])
"""
"""Text for `python3 -c`."""


def command() -> list[str]:
    """A container's command, with the `python3` of the image's PATH."""
    return ["python3", "-c", BOOTSTRAP]

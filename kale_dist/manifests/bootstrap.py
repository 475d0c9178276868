"""The command that every pod begins with: it unpacks this library's worker side and becomes the pod's agent. Pure."""

from __future__ import annotations

from kale_dist.pod_order import InputFiles, PodVariable

EXIT_CODE = 78
"""Exit code of a container in which the agent could not be started: the image's Python is too old, or the input cannot
be unpacked. The container's termination message says which."""

# Runs in whatever Python the image has: it has to be valid for all of Python 3, and is not part of the library there.
BOOTSTRAP = f"""\
import os, sys

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
path = os.environ.get("PYTHONPATH")
os.environ["PYTHONPATH"] = target + os.pathsep + path if path else target
os.execv(sys.executable, [sys.executable, "-P", "-m", "kale_dist.runtime", "pod"])
"""
"""Text for `python3 -c`."""


def command(python: str) -> list[str]:
    """A container's command.

    Args:
        python: The interpreter, found on the image's PATH, or an absolute path.
    """
    return [python, "-c", BOOTSTRAP]

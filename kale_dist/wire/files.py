"""The files in a job's folder."""

from __future__ import annotations

import pathlib
import re


class JobFiles:
    """Names of the files in a job's folder.

    Args:
        folder: The job's folder, or the folder in which a head keeps a job's files.
    """

    def __init__(self, folder: str | pathlib.Path) -> None:
        self.folder = pathlib.Path(folder)

    @property
    def record(self) -> pathlib.Path:
        """JSON written by the notebook when it submits: `records.Record`."""
        return self.folder / "record.json"

    @property
    def arguments(self) -> pathlib.Path:
        """JSON written by the notebook: plain arguments of a training, and the classes of its objects, by name."""
        return self.folder / "arguments.json"

    @property
    def key(self) -> pathlib.Path:
        """The job's 32 secret bytes; mode 0600."""
        return self.folder / "key"

    @property
    def life(self) -> pathlib.Path:
        """JSON written by the notebook that follows the job: `records.Life`."""
        return self.folder / "life.json"

    @property
    def cancelled(self) -> pathlib.Path:
        """There if the job's user has cancelled it on this machine; names the user."""
        return self.folder / "cancelled"

    @property
    def log(self) -> pathlib.Path:
        """Records of all ranks' lines, in the order in which the head got them."""
        return self.folder / "log"

    @property
    def older_log(self) -> pathlib.Path:
        """What the log had before `log`, of which only the newest part is kept where it is long."""
        return self.folder / "log.1"

    @property
    def events(self) -> pathlib.Path:
        """Events as JSON lines, all kinds but progress and usage; an event's number is that of its line, from 0."""
        return self.folder / "events"

    @property
    def progress(self) -> pathlib.Path:
        """A JSON object: `last_name` of an event to the event, for kinds of which the last one counts. Replaced by rename."""
        return self.folder / "progress.json"

    @property
    def modules(self) -> pathlib.Path:
        """The notebook's local modules, laid out for `sys.path`."""
        return self.folder / "modules"

    @property
    def checkpoint(self) -> pathlib.Path:
        """The last checkpoint of rank 0. Replaced by rename."""
        return self.folder / "checkpoint"

    @property
    def older_checkpoint(self) -> pathlib.Path:
        """The checkpoint before the last, where the disk has room for both."""
        return self.folder / "checkpoint.1"

    def outcome(self, attempt: int, rank: int) -> pathlib.Path:
        """The signed outcome of one rank."""
        return self.folder / f"outcome-{attempt}-{rank}"


def umask() -> int:
    """This process's umask, read without setting it: other threads may be making files."""
    status = pathlib.Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    found = re.search(r"^Umask:\s*([0-7]+)$", status, re.MULTILINE)
    return int(found[1], 8) if found else 0o022

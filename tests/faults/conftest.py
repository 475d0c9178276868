"""What a fault of the table is played on: jobs that are followed to their end, small disks, other notebooks."""

import contextlib
import itertools
import os
import pathlib
import signal
import subprocess
import sys
import textwrap
import time

import pytest

pytest.register_assert_rewrite("on_this_machine", "in_containers", "in_pods", "of_the_cluster")

TESTS = pathlib.Path(__file__).parents[1]


def is_alive(pid):
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False


class Scene:
    """One fault's jobs and what they stand on. Each wait is one of the fault's bound.

    Args:
        bound_s: Within how many seconds the outcome has to be there.
        folder: An empty folder.
        request: Of the test.
    """

    def __init__(self, bound_s, folder, request):
        self.bound_s = bound_s
        self.folder = folder
        self.part = request.getfixturevalue
        """Gives a fixture by its name."""
        self.undone = contextlib.ExitStack()
        self.patch = self.undone.enter_context(pytest.MonkeyPatch.context())
        self._jobs = []
        self._stopped = []
        self._places = set()
        self._pids = set()

    # -- jobs --------------------------------------------------------------------------------------------------------

    def launch(self, function, *arguments, ready=0, **options):
        """A job, once as many lines say that ranks are ready as asked for."""
        import kale_dist as kd

        job = self.follow(kd.launch(function, *arguments, **{"number_of_processes": 2, **options}))
        if ready:
            self.until(lambda: [one.text for one in job.logs()].count("ready") >= ready, job)
        self._keep_pids(job)
        return job

    def follow(self, job):
        """Count a job among those that have to end, whole and without a trace."""
        self._jobs.append(job)
        self._places.add(job.ref.partition(":")[0])
        return job

    def until(self, condition, job=None):
        """Wait until something is so, and give it."""
        deadline = time.monotonic() + self.bound_s
        while not (found := condition()):
            told = job and (job.status, [str(line) for line in job.logs()][-20:])
            assert time.monotonic() < deadline, f"not within {self.bound_s} s: {told}"
            time.sleep(0.1)
        return found

    def end_of(self, job):
        """Its final status."""
        self._keep_pids(job)
        return job.wait(self.bound_s)

    def fails(self, job, cause, *words):
        """It fails for a cause, in a sentence that names these words; gives the sentence."""
        status = self.end_of(job)
        told = (status, [str(line) for line in job.logs()][-20:])
        assert (status.state.value, getattr(status.cause, "value", "")) == ("failed", cause), told
        assert all(word in status.reason for word in words), told
        return status.reason

    def succeeds(self, job, *results):
        """It succeeds, and its ranks return these."""
        status = self.end_of(job)
        assert status.state.value == "succeeded", (status, [str(line) for line in job.logs()][-20:])
        assert not results or job.results(self.bound_s) == list(results)

    def check(self):
        """Of each job: it has ended, no line is lost, its ranks are gone, and nothing is left when it is deleted."""
        from kale_dist.job.handle import inside

        while self._jobs:
            job = self._jobs[-1]
            assert job.done(), job.status
            # Lines that the notebook itself adds have no number; each run begins with 0.
            numbers = [line.sequence for line in job.logs() if line.sequence is not None]
            assert all(number in (0, before + 1) for before, number in itertools.pairwise([-1, *numbers])), numbers
            self._keep_pids(job)
            folder = inside(job).files.folder
            job.delete()
            assert not folder.exists()
            self._jobs.pop()
        self.until(lambda: not any(map(is_alive, self._pids)))

    def close(self):
        from kale_dist import places

        for pid, helper in self._stopped:
            self.go_on(pid)
            if helper.poll() is None:
                os.killpg(helper.pid, signal.SIGKILL)
            helper.wait()
        for job in self._jobs:
            with contextlib.suppress(Exception):
                job.delete()
        for name in self._places - {"local"}:
            places.get(name).close()
        self.undone.close()

    def _keep_pids(self, job):
        if job.ref.startswith("local:"):
            self._pids |= {one.pid for one in job.status.replicas if one.pid}

    # -- what breaks -------------------------------------------------------------------------------------------------

    def stop(self, pid, for_s=60):
        """Stop a process for some seconds, or until `go_on`; gives what continues it, also if the tests are killed."""
        os.kill(pid, signal.SIGSTOP)
        helper = subprocess.Popen(["sh", "-c", f"sleep {for_s}; kill -CONT {pid}"], start_new_session=True)
        self._stopped.append((pid, helper))
        return helper

    @staticmethod
    def go_on(pid):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)

    def small_disk(self, size_mib):
        """A disk of its own; where that needs a right that this user lacks, the test is skipped."""
        disk = self.folder / "disk"
        disk.mkdir()
        mount = ["mount", "-t", "tmpfs", "-o", f"size={size_mib}m", "tmpfs", str(disk)]
        if subprocess.run(mount, capture_output=True, check=False).returncode:
            pytest.skip("only root can mount a small disk")
        self.undone.callback(subprocess.run, ["umount", "--lazy", str(disk)], check=False)
        return disk

    def notebook(self, code, *before, **environment):
        """Start another notebook, a script that has `kd` and the functions of ranks; its first argument is `folder`.

        Args:
            code: Of the script.
            before: Words before the interpreter's on the command line.
            environment: More variables.
        """
        paths = [str(TESTS), str(TESTS / "faults")]
        head = f"import os, pathlib, signal, sys, time\nsys.path[:0] = {paths}\nimport kale_dist as kd\nfrom fault_work import *\n"
        script = self.folder / f"notebook-{time.monotonic_ns()}.py"
        script.write_text(head + f"folder = {str(self.folder)!r}\n" + textwrap.dedent(code))
        process = subprocess.Popen(
            [*before, sys.executable, str(script)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env=os.environ | environment,
        )  # fmt: skip
        self.undone.callback(process.communicate)
        self.undone.callback(process.kill)
        return process

    def said_by(self, process, code=0):
        """What a notebook has printed when it has ended, with this exit code."""
        out, errors = process.communicate(timeout=self.bound_s)
        assert process.returncode == code, out + errors
        return out


@pytest.fixture
def scene(fault, tmp_path, request):
    made = Scene(fault.bound_s, tmp_path, request)
    yield made
    made.close()

"""Ranks of launched functions that are about to be ended: how long they get, and the step at which all of them save."""

import pathlib
import re
import signal
import sys
import threading
import time

import pytest

import kale_dist as kd
from kale_dist.worker.rank import joint_saving

LONG_S = 600


def loops(folder, naps_s):
    """Exchanges nothing: only `leaving` brings ranks together, each of which is elsewhere."""
    here = kd.context()
    print("begins", here.attempt, flush=True)
    for step in range(100_000):
        time.sleep(naps_s[here.rank % len(naps_s)])
        if step == 20:
            print("far enough", flush=True)
        if kd.leaving():
            time.sleep(0.3)
            pathlib.Path(folder, f"{here.attempt}-{here.rank}").write_text(f"{step}")
            if here.attempt:
                return step
    return -1


def saves_when_told(folder, after_s):
    """Needs so long in its handler of SIGTERM."""

    def handle(*_):
        time.sleep(after_s)
        pathlib.Path(folder, f"{kd.context().rank}").write_text("saved")
        raise SystemExit(1)

    signal.signal(signal.SIGTERM, handle)
    print("ready", flush=True)
    time.sleep(LONG_S)


def written(folder):
    return {path.name: path.read_text() for path in folder.iterdir()}


@pytest.mark.parametrize("ranks", [2, pytest.param(8, marks=pytest.mark.nightly)])
def test_all_ranks_leave_at_the_same_step(jobs, tmp_path, ranks):
    job = jobs.run(loops, str(tmp_path), (0.01, 0.03, 0.02), ranks=ranks, threads=1)
    job.until(lambda: job.log_text().count("far enough") == ranks)
    jobs.client.cancel(job.order.job, grace_s=60, save=True)
    assert job.wait()["state"] == "cancelled"
    found = written(tmp_path)
    assert sorted(found) == [f"0-{rank}" for rank in range(ranks)]
    assert len(set(found.values())) == 1


@pytest.mark.nightly
def test_a_pod_that_leaves_has_all_ranks_save_and_the_next_attempt_knows_it(make, tmp_path):
    folder = tmp_path / "saved"
    folder.mkdir()
    job = make(loops, str(folder), (0.01, 0.03), ranks=2, max_restarts=3, used_restarts=2).put_input().start_all()
    job.until(lambda: job.text().count("far enough") == 2)
    job.pods[1].process.send_signal(signal.SIGTERM)
    job.until(lambda: len(written(folder)) == 2)
    first = written(folder)
    assert sorted(first) == ["2-0", "2-1"]
    assert len(set(first.values())) == 1
    job.start(1)
    job.until(lambda: job.text().count("begins 3") == 2)
    assert re.findall(r"begins (\d)", job.text()) == ["2", "2", "3", "3"]


@pytest.mark.nightly
def test_a_handler_gets_the_grace_of_the_call_and_no_more(jobs, tmp_path):
    (tmp_path / "enough").mkdir()
    (tmp_path / "less").mkdir()
    enough = jobs.run(saves_when_told, str(tmp_path / "enough"), 3, grace_s=60)
    less = jobs.run(saves_when_told, str(tmp_path / "less"), 200, timeout_s=1, grace_s=2)
    enough.until(lambda: enough.log_text().count("ready") == 2)
    jobs.client.cancel(enough.order.job, grace_s=enough.order.policy.grace_s, save=True)
    assert enough.wait()["state"] == "cancelled"
    assert written(tmp_path / "enough") == {"0": "saved", "1": "saved"}
    assert less.wait(60)["cause"] == "timeout"
    assert written(tmp_path / "less") == {}


@pytest.mark.nightly
def test_timeout_s_leaves_a_handler_its_time(jobs, tmp_path):
    job = jobs.run(saves_when_told, str(tmp_path), 3, timeout_s=4, grace_s=60)
    assert job.wait()["cause"] == "timeout"
    assert written(tmp_path) == {"0": "saved", "1": "saved"}


def test_a_second_cancel_does_not_wait_for_a_save(jobs, tmp_path):
    job = jobs.run(saves_when_told, str(tmp_path), 200, ranks=1)
    job.until(lambda: "ready" in job.log_text())
    began = time.monotonic()
    for _ in range(2):
        jobs.client.cancel(job.order.job, grace_s=LONG_S, save=True)
    assert job.wait(60)["state"] == "cancelled"
    assert time.monotonic() - began < 30


def trains_in_one_rank(world_size):
    if kd.context().rank == 1:
        saving = joint_saving.SaveAtOneStep.of(world_size)
        print("here", saving is not None, flush=True)
    else:
        print("here", flush=True)
    time.sleep(LONG_S)


def trains_and_goes_on():
    joint_saving.SaveAtOneStep.of(kd.context().world_size)
    joint_saving.end()
    print("here", flush=True)
    time.sleep(LONG_S)


@pytest.mark.nightly
@pytest.mark.parametrize("call", [(trains_in_one_rank, 2), (trains_and_goes_on,)])
def test_nobody_waits_for_who_does_not_train(jobs, call):
    """A trainer that has been made on some of the ranks, and one that is through."""
    job = jobs.run(*call, ranks=3)
    job.until(lambda: job.log_text().count("here") == 3)
    began = time.monotonic()
    jobs.client.cancel(job.order.job, grace_s=200, save=True)
    assert job.wait(100)["state"] == "cancelled"
    assert time.monotonic() - began < 60
    assert "True" not in job.log_text()


def test_a_rank_that_never_saves_ends_with_a_line_in_the_log(jobs):
    def never():
        kd.leaving()
        print("ready", flush=True)
        time.sleep(LONG_S)

    job = jobs.run(never)
    job.until(lambda: job.log_text().count("ready") == 2)
    jobs.client.cancel(job.order.job, grace_s=1, save=True)
    assert job.wait(60)["state"] == "cancelled"
    assert "The ranks have not saved in time after they were asked to" in job.log_text()


def begins_late(folder):
    here = kd.context()
    if here.rank == 0:
        print("prepares", flush=True)
        time.sleep(6)
    loops(folder, (0.02,))


@pytest.mark.nightly
def test_a_loop_that_begins_after_the_request_saves_with_the_others(jobs, tmp_path):
    job = jobs.run(begins_late, str(tmp_path), ranks=2, threads=1)
    job.until(lambda: "prepares" in job.log_text() and "begins" in job.log_text())
    time.sleep(1)
    jobs.client.cancel(job.order.job, grace_s=60, save=True)
    assert job.wait()["state"] == "cancelled"
    assert len(written(tmp_path)) == 2
    assert len(set(written(tmp_path).values())) == 1


def takes_other_numbers_of_steps():
    counts = [sum(not kd.leaving() for _ in range(100 * (1 + kd.context().rank))) for _ in range(2)]
    return counts[0] + counts[1]


def test_ranks_that_take_more_steps_than_rank_0_wait_for_nobody(jobs):
    job = jobs.run(takes_other_numbers_of_steps, ranks=2)
    assert job.wait(60)["state"] == "succeeded", job.log_text()
    assert [job.outcome(rank).value for rank in (0, 1)] == [200, 400]


def begins_when_rank_0_has_ended():
    if kd.context().rank == 0:
        return 0
    time.sleep(2)
    return sum(not kd.leaving() for _ in range(10))


@pytest.mark.nightly
def test_a_loop_that_rank_0_never_had_waits_for_nobody(jobs):
    job = jobs.run(begins_when_rank_0_has_ended, ranks=2)
    assert job.wait(60)["state"] == "succeeded", job.log_text()
    assert job.outcome(1).value == 10


def goes_on_after_a_training(folder):
    inner = joint_saving.SaveAtOneStep.of(kd.context().world_size)
    assert not inner.is_due()
    inner.end()
    loops(folder, (0.02,))


def trains_within_a_loop(folder):
    """As rounds of active learning do."""
    kd.leaving()
    goes_on_after_a_training(folder)


@pytest.mark.nightly
@pytest.mark.parametrize("function", [goes_on_after_a_training, trains_within_a_loop])
def test_a_training_that_ends_ends_no_other_ones_saves(jobs, tmp_path, function):
    job = jobs.run(function, str(tmp_path), ranks=2, threads=1)
    job.until(lambda: job.log_text().count("far enough") == 2)
    jobs.client.cancel(job.order.job, grace_s=60, save=True)
    assert job.wait()["state"] == "cancelled"
    assert len(written(tmp_path)) == 2


def two_save(folder):
    """A trainer and a loop of the user's in the same steps."""
    here, trainer = kd.context(), joint_saving.SaveAtOneStep.of(kd.context().world_size)
    for step in range(100_000):
        time.sleep(0.02)
        if step == 5:
            print("begins", flush=True)
        for name, is_due in (("trainer", trainer.is_due()), ("loop", kd.leaving())):
            if is_due:
                pathlib.Path(folder, f"{name}-{here.rank}").write_text(f"{step}")
        trainer.saved()


@pytest.mark.nightly
def test_each_of_two_that_save_hears_it(jobs, tmp_path):
    job = jobs.run(two_save, str(tmp_path), ranks=2, threads=1)
    job.until(lambda: job.log_text().count("begins") == 2)
    jobs.client.cancel(job.order.job, grace_s=60, save=True)
    assert job.wait()["state"] == "cancelled"
    found = written(tmp_path)
    assert sorted(found) == ["loop-0", "loop-1", "trainer-0", "trainer-1"]
    assert found["loop-0"] == found["loop-1"]


def leaves_by_an_exit_code(folder):
    for step in range(100_000):
        time.sleep(0.02)
        if step == 20:
            print("far enough", flush=True)
        if kd.leaving():
            time.sleep(kd.context().rank)
            pathlib.Path(folder, f"{kd.context().rank}").write_text("saved")
            sys.exit(143)


@pytest.mark.nightly
def test_a_rank_that_has_saved_may_end_by_an_exit_code(jobs, tmp_path):
    job = jobs.run(leaves_by_an_exit_code, str(tmp_path), ranks=2, threads=1)
    job.until(lambda: job.log_text().count("far enough") == 2)
    jobs.client.cancel(job.order.job, grace_s=60, save=True)
    assert job.wait()["state"] == "cancelled"
    assert len(written(tmp_path)) == 2


def one_saves_and_one_handles(folder):
    if kd.context().rank == 0:
        saves_when_told(folder, 8)
    saving = joint_saving.SaveAtOneStep.of(1)
    print("ready", flush=True)
    while True:
        time.sleep(0.02)
        if saving.is_due():
            saving.saved()


@pytest.mark.nightly
def test_a_rank_that_does_not_save_keeps_its_grace_beside_one_that_does(jobs, tmp_path):
    job = jobs.run(one_saves_and_one_handles, str(tmp_path), ranks=2, threads=1)
    job.until(lambda: job.log_text().count("ready") == 2)
    jobs.client.cancel(job.order.job, grace_s=60, save=True)
    assert job.wait()["state"] == "cancelled"
    assert written(tmp_path) == {"0": "saved"}


def becomes_slower(folder):
    for step in range(100_000):
        time.sleep(0.001 if step < 3000 else 0.05)
        if step == 3000:
            print("is slow", flush=True)
        if kd.leaving():
            pathlib.Path(folder, f"{kd.context().rank}").write_text(f"{step}")


@pytest.mark.nightly
def test_steps_that_have_become_much_slower_do_not_miss_the_grace(jobs, tmp_path):
    job = jobs.run(becomes_slower, str(tmp_path), ranks=2, threads=1)
    job.until(lambda: job.log_text().count("is slow") == 2)
    jobs.client.cancel(job.order.job, grace_s=25, save=True)
    assert job.wait()["state"] == "cancelled"
    assert len(set(written(tmp_path).values())) == 1
    assert len(written(tmp_path)) == 2


@pytest.mark.nightly
def test_live_ranks_save_before_a_cancel_ends_them(tmp_path, monkeypatch):
    monkeypatch.setattr("__main__.loops", loops, raising=False)
    live = kd.live(2, threads=1)
    live.wait_until_ready()
    canceller = threading.Timer(5, live.cancel)
    canceller.start()
    with pytest.raises(kd.KaleDistError):
        live.run(f"loops({str(tmp_path)!r}, (0.02,))")
    canceller.join()
    assert sorted(written(tmp_path)) == ["0-0", "0-1"]
    assert len(set(written(tmp_path).values())) == 1
    live.delete()


def test_leaving_is_false_where_nobody_asks():
    assert kd.leaving() is False

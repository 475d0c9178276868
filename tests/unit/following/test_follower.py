"""Following a job whose ranks are elsewhere, with a scripted place and a clock of its own."""

import contextlib
import dataclasses
import functools
import io
import json
import time

import pytest
import torch
from scripted_place import (
    KEY,
    LOST,
    FastClock,
    ScriptedHead,
    ScriptedPlace,
    ended_part,
    lost_head,
    running_part,
    spec_of,
)

from kale_dist import wire
from kale_dist.errors import BackendError
from kale_dist.job import records
from kale_dist.job.backend import JobRef, Part, Trouble
from kale_dist.job.spec.place_settings import PENDING_TIMEOUT_S
from kale_dist.places.following import copy, follower, head_client
from kale_dist.places.following import followed_backend as followed
from kale_dist.places.following.followed_backend import FollowedBackend
from kale_dist.places.following.follower import Follower
from kale_dist.wire import FailureCause, RankStateName, StateName, Verdict
from kale_dist.wire.messages import Interrupt, Restart
from kale_dist.worker.training import checkpoint
from kale_dist.worker.training.contents import Checkpoint


@pytest.fixture
def clock():
    return FastClock()


@pytest.fixture
def place():
    return ScriptedPlace()


@pytest.fixture
def backend(place, clock, monkeypatch):
    monkeypatch.setattr(followed, "Follower", lambda **given: Follower(**given, clock=clock))
    monkeypatch.setattr(head_client, "_PAUSES_S", (0.002, 0.01))
    backend = FollowedBackend(place)
    yield backend
    backend.close()
    for head in [head for run in place.runs.values() for head in run.heads]:
        head.end()
    for thread in place.threads:
        thread.join(5)


@pytest.fixture
def submit(backend, place):
    def start(**given):
        ref = backend.submit(spec_of(**given), KEY)
        # The first status waits longer than others.
        backend.status(ref)
        return ref, place.head()

    return start


def wait_for(condition, timeout_s=10.0):
    deadline = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.005)
    return found


def wait_for_end(backend, ref):
    return wait_for(lambda: (status := backend.status(ref)).is_final and status)


def texts(backend, ref, **which):
    return [line.text for line in backend.logs(ref, **which)]


def test_a_job_that_ends_well(backend, submit):
    ref, head = submit()
    head.run()
    head.lines(0, "hello")
    head.lines(1, "world")
    head.event("metrics", rank=0, values=[["loss", 0.5]], source="report")
    head.succeed()
    status = wait_for_end(backend, ref)
    assert status.state is StateName.SUCCEEDED
    assert [str(line) for line in backend.logs(ref)] == ["[0] hello", "[1] world"]
    assert [row.values for row in status.metrics] == [(("loss", 0.5),)]
    files = records.files(ref.record_name)
    assert (records.life(files).object, records.life(files).first_attempt) == (ref.name, 0)
    assert files.outcome(0, 1).read_bytes() == b"result of 1"
    wait_for(lambda: head.acks)


def test_lines_are_here_while_the_job_runs(backend, submit):
    ref, head = submit()
    head.run()
    head.lines(0, "one")
    follow = backend.logs(ref, follow=True)
    assert next(follow).text == "one"
    head.lines(0, "two")
    assert next(follow).text == "two"
    head.succeed()
    assert list(follow) == []


def test_the_status_says_while_the_ranks_wait_for_the_heads_disk(backend, submit):
    ref, head = submit()
    head.run()
    head.event("disk", problem="The job's folder cannot be written")
    wait_for(lambda: backend.status(ref).reason == "The job's folder cannot be written")
    assert backend.status(ref).state is StateName.RUNNING
    head.event("disk", problem="")
    wait_for(lambda: backend.status(ref).reason == "")
    head.succeed()
    assert wait_for_end(backend, ref).reason == ""


def test_the_end_is_shown_when_the_results_are_here(backend, submit):
    ref, head = submit()
    head.run()
    head.verdict(StateName.SUCCEEDED)
    wait_for(lambda: "could not be fetched" in backend.status(ref).reason)
    head.files |= {"outcome-0-0": b"0", "outcome-0-1": b"1"}
    assert wait_for_end(backend, ref).state is StateName.SUCCEEDED


def test_results_that_are_lost_are_named(backend, submit):
    ref, head = submit()
    head.run()
    head.verdict(StateName.SUCCEEDED)
    wait_for(lambda: "could not be fetched" in backend.status(ref).reason)
    head.end(0)
    assert wait_for_end(backend, ref).state is StateName.SUCCEEDED
    assert "outcome-0-0, outcome-0-1" in texts(backend, ref)[-1]


FAULTS = ["cut_files", "refuse"]
"""What keeps files at a head that runs, while its stream goes on: see `ScriptedHead`."""


def end_badly(head, state, fault):
    """A training with a checkpoint fails or is cancelled, and from then on no file comes from its head."""
    head.run()
    head.event("checkpoint", epoch=4, step=40, path="checkpoint", bytes=4)
    head.files |= {"checkpoint": b"the weights of epoch 4", "outcome-0-1": b"the exception of rank 1"}
    getattr(head, fault)()
    failed = {} if state is StateName.CANCELLED else {"failed_rank": 1, "cause": FailureCause.ERROR}
    head.verdict(state, "It ended", **failed)


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("state", [StateName.FAILED, StateName.CANCELLED])
def test_what_a_job_that_ended_badly_has_reached_is_waited_for(backend, submit, state, fault):
    ref, head = submit()
    end_badly(head, state, fault)
    wait_for(lambda: "checkpoint could not be fetched yet" in backend.status(ref).reason)
    assert (backend.status(ref).is_final, head.acks) == (False, 0)
    head.mend()
    assert wait_for_end(backend, ref).state is state
    folder = records.files(ref.record_name).folder
    assert (folder / "checkpoint").read_bytes() == b"the weights of epoch 4"
    assert (folder / "outcome-0-1").exists() is (state is StateName.FAILED)
    wait_for(lambda: head.acks)


def test_what_could_not_be_fetched_is_named_not_acknowledged_and_asked_for_once_more(backend, submit):
    ref, head = submit(collect_wait_s=20.0)
    end_badly(head, StateName.CANCELLED, "refuse")
    status = wait_for_end(backend, ref)
    assert "checkpoint" in texts(backend, ref)[-1]
    assert (status.is_checkpoint_here, head.acks) == (False, 0)
    with pytest.raises(BackendError, match="No connection"):
        backend.fetch(ref, "checkpoint")
    head.mend()
    backend.fetch(ref, "checkpoint")
    assert records.files(ref.record_name).checkpoint.read_bytes() == b"the weights of epoch 4"
    assert backend.status(ref).is_checkpoint_here


def test_what_a_head_does_not_have_is_not_waited_for(backend, submit):
    ref, head = submit()
    head.run()
    head.event("checkpoint", epoch=4, step=40, path="checkpoint", bytes=4)
    head.verdict(StateName.FAILED, "It ended", FailureCause.ERROR, failed_rank=1)
    assert wait_for_end(backend, ref).state is StateName.FAILED
    wait_for(lambda: head.acks)


def test_a_connection_that_is_cut_is_opened_again_at_the_next_line(backend, submit):
    ref, head = submit()
    head.run()
    head.lines(0, "one", "two")
    wait_for(lambda: texts(backend, ref) == ["one", "two"])
    head.cut()
    head.lines(0, "three")
    head.mend()
    wait_for(lambda: texts(backend, ref) == ["one", "two", "three"])
    assert head.streams > 1


def test_a_notebook_that_slept_for_an_hour_goes_on_where_it_was(backend, submit, clock, place):
    ref, head = submit()
    head.run()
    head.lines(0, "before")
    wait_for(lambda: texts(backend, ref) == ["before"])
    # The lid is closed: connections die without a word, and the clock jumps.
    head.cut()
    clock.sleep(3600)
    head.lines(1, *(f"line {number}" for number in range(1000)))
    place.runs[1].others = [running_part()]
    head.mend()
    head.succeed()
    assert wait_for_end(backend, ref).state is StateName.SUCCEEDED
    assert len(texts(backend, ref)) == 1001


@pytest.mark.parametrize("state", [None, StateName.SUCCEEDED, StateName.FAILED])
def test_a_new_process_answers_with_what_the_head_has_by_now(backend, submit, place, state):
    ref, head = submit()
    head.run()
    backend.close()
    head.lines(0, *(f"line {number}" for number in range(20_000)))
    head.event("metrics", rank=0, values=[["loss", 0.25]], source="train", epoch=7)
    head.event("checkpoint", epoch=7, step=70, path="checkpoint", bytes=4)
    head.files["checkpoint"] = b"epoch 7"
    if state is StateName.SUCCEEDED:
        head.succeed()
    elif state is StateName.FAILED:
        head.verdict(state, "It ended", FailureCause.ERROR)
    status = backend.status(ref)
    assert (status.state, status.checkpoint_epoch) == (state or StateName.RUNNING, 7)
    assert len(texts(backend, ref)) == 20_000


def test_a_new_process_says_that_the_head_has_not_answered(backend, submit, place, monkeypatch):
    monkeypatch.setattr(follower, "FIRST_LOOK_S", 0.3)
    ref, head = submit()
    head.run()
    wait_for(lambda: backend.status(ref).state is StateName.RUNNING)
    backend.close()
    head.refuse()
    assert "has not answered yet" in backend.status(ref).reason


def test_two_notebooks_one_follows_and_the_other_takes_over(backend, submit, place, clock):
    ref, head = submit()
    head.run()
    head.lines(0, "one")
    wait_for(lambda: texts(backend, ref) == ["one"])
    told = dict.fromkeys(("on_lines", "on_change"), lambda: None)
    other = Follower(place=place, record=records.read(ref.record_name), key=KEY, clock=clock, **told)
    backend.close()
    head.lines(0, "two")
    wait_for(lambda: texts_in_folder(ref) == ["one", "two"])
    head.succeed()
    wait_for(lambda: not other.is_alive)
    assert backend.status(ref).state is StateName.SUCCEEDED


def texts_in_folder(ref):
    from kale_dist.job.reader import LogReader

    return [line.text for line in LogReader(records.files(ref.record_name)).read()]


def test_without_a_connection_the_log_says_which_lines_are_missing(backend, submit, place):
    place.forbids_connections = True
    ref, head = submit(processes=1)
    head.run()
    head.lines(0, "one", "two")
    head.lines(0, *(["flood"] * 500), on_stdout=False)
    head.lines(0, "three")
    head.stdout += b"".join(wire.encode_outcome(0, 0, b"small result"))
    head.verdict(StateName.SUCCEEDED)
    wait_for(lambda: "three" in texts(backend, ref))
    head.end()
    assert wait_for_end(backend, ref).state is StateName.SUCCEEDED
    found = texts(backend, ref)
    assert found[:2] == ["one", "two"]
    assert found[3:] == ["three"]
    assert "500 lines are missing here (number 2 to 501), because there is no connection to the head" in found[2]
    assert records.files(ref.record_name).outcome(0, 0).read_bytes() == b"small result"


def test_what_was_not_copied_before_the_end_comes_from_stdout(backend, submit):
    ref, head = submit(processes=1)
    head.run()
    head.lines(0, "one")
    wait_for(lambda: texts(backend, ref) == ["one"])
    head.cut()
    head.lines(0, "two")
    head.stdout += b"Fatal Python error: Aborted\n"
    head.end(134)
    status = wait_for_end(backend, ref)
    assert status.state is StateName.FAILED
    assert status.reason == "pod-0 ended with exit code 134 before it could say why"
    assert texts(backend, ref)[:3] == ["one", "two", "pod 0: Fatal Python error: Aborted"]


def test_a_kept_folder_fills_what_stdout_lacks(backend, submit, place):
    ref, head = submit(processes=1)
    head.run()
    head.lines(0, "one")
    wait_for(lambda: texts(backend, ref) == ["one"])
    head.cut()
    head.lines(0, "two", "three", on_stdout=False)
    head.succeed(1)
    place.kept[1, "log"] = b"".join(block for kind, *_, block in head.blocks if kind == "line")
    place.kept[1, "events"] = b"".join(block for kind, *_, block in head.blocks if kind == "event")
    place.kept[1, "outcome-0-0"] = b"result"
    head.end()
    assert wait_for_end(backend, ref).state is StateName.SUCCEEDED
    assert texts(backend, ref) == ["one", "two", "three"]


# -- how it ended -----------------------------------------------------------------------------------------------------


def test_without_a_verdict_the_termination_message_counts(backend, submit):
    ref, head = submit()
    head.run()
    head.end(1, message='{"state": "failed", "cause": "error", "reason": "ValueError: boom", "failed_rank": 1}')
    status = wait_for_end(backend, ref)
    assert (status.state, status.reason, status.failed_rank) == (StateName.FAILED, "ValueError: boom", 1)
    assert status.cause is FailureCause.ERROR
    assert [replica.state for replica in status.replicas] == [RankStateName.STOPPED, RankStateName.FAILED]


def test_the_object_is_believed_last(backend, submit, place):
    ref, head = submit()
    head.run()
    place.runs[1].finished = "failed"
    head.lines(0, "the head lives on")
    wait_for(lambda: texts(backend, ref))
    assert not backend.status(ref).is_final
    head.succeed()
    assert wait_for_end(backend, ref).state is StateName.SUCCEEDED


def test_out_of_memory_of_another_pod_explains_the_end(backend, submit, place):
    ref, head = submit(max_restarts=3)
    head.run()
    trouble = Trouble(sentence="pod-1 used up its 2 GiB", remedy="Raise resources.memory_gib.")
    place.runs[1].others = [ended_part(exit_code=137, lost="out of memory", trouble=trouble)]
    head.verdict(StateName.FAILED, "Rank 1 was lost", FailureCause.LOST)
    status = wait_for_end(backend, ref)
    assert status.reason == "pod-1 used up its 2 GiB. Raise resources.memory_gib. Rank 1 was lost"
    assert list(place.runs) == [1]


def test_the_rank_that_failed_is_the_first_that_the_attempt_gave_to_the_pod(backend, submit, place):
    ref, head = submit(processes=4, per_pod=2)
    head.event("attempt", members=[
        {"agent": 0, "first_rank": 0, "processes": 1}, {"agent": 1, "first_rank": 1, "processes": 1},
    ])  # fmt: skip
    head.run()
    trouble = Trouble(sentence="pod-1 used up its 2 GiB")
    place.runs[1].others = [ended_part(exit_code=137, lost="out of memory", trouble=trouble)]
    head.verdict(StateName.FAILED, "A rank was lost", FailureCause.LOST)
    status = wait_for_end(backend, ref)
    assert (status.failed_rank, len(status.replicas)) == (1, 2)


def test_a_job_that_can_never_start_ends(backend, submit, place):
    ref, head = submit()
    head.state = "waiting"
    place.runs[1].trouble = Trouble(sentence="There is no image torch:9", remedy="Check its name.")
    status = wait_for_end(backend, ref)
    assert (status.state, status.cause) == (StateName.FAILED, FailureCause.NOT_STARTED)
    assert status.reason == "There is no image torch:9. Check its name."
    assert place.killed


def test_a_trouble_that_heals_is_shown_and_waited_for(backend, submit, place, clock):
    ref, head = submit()
    head.state = "waiting"
    place.runs[1].trouble = Trouble(sentence="No node has 8 GPUs", heals=True)
    wait_for(lambda: backend.status(ref).reason == "No node has 8 GPUs")
    clock.sleep(10_000)
    time.sleep(0.1)
    assert not backend.status(ref).is_final


ABSENT = Trouble(sentence="There is no image torch:9", remedy="Push it.", heals=True, needs_action=True)


def test_a_trouble_of_anothers_pod_controls_no_terminal(backend, submit, place):
    ref, head = submit()
    head.state = "waiting"
    place.runs[1].trouble = Trouble(sentence="No node\x1b]0;title\x07\x1b[2J has room\u202e", heals=True)
    wait_for(lambda: "No node has room" in backend.status(ref).reason)
    assert backend.status(ref).reason.isprintable()


def test_a_job_that_waits_for_a_person_says_so_and_one_that_waits_for_room_does_not(backend, submit, place):
    ref, head = submit()
    head.state = "waiting"
    for trouble in (ABSENT, Trouble(sentence="No node is free", heals=True), ABSENT):
        place.runs[1].trouble = trouble
        wait_for(lambda: trouble.sentence in backend.status(ref).reason)  # noqa: B023 - it is called at once
        assert backend.status(ref).needs_action is trouble.needs_action


@pytest.mark.parametrize(
    ("given", "waits_s"), [({}, 300), ({"pending_timeout_s": 60}, 60), ({"pending_timeout_s": 900}, 900)]
)
def test_what_only_a_person_can_mend_ends_the_job_in_time(backend, submit, place, clock, given, waits_s):
    clock.sleep(time.time() - clock.time())
    began, clock.times_faster = clock.time(), 1000
    ref, head = submit(**{"pending_timeout_s": PENDING_TIMEOUT_S, **given})
    head.state = "waiting"
    place.runs[1].trouble = ABSENT
    status = wait_for_end(backend, ref)
    assert status.state is StateName.FAILED
    assert ABSENT.sentence in status.reason
    assert waits_s - 2 <= clock.time() - began < waits_s + 200
    assert place.killed


def test_without_a_limit_a_job_waits_for_a_person_for_ever(backend, submit, place, clock):
    clock.times_faster = 1000
    ref, head = submit()
    head.state = "waiting"
    place.runs[1].trouble = ABSENT
    until = clock.time() + 1000
    wait_for(lambda: clock.time() > until)
    assert not backend.status(ref).is_final


def test_a_break_begins_the_five_minutes_again(backend, submit, place, clock):
    clock.times_faster = 1000
    ref, head = submit(pending_timeout_s=PENDING_TIMEOUT_S)
    head.state = "waiting"
    for _ in range(4):
        for trouble in (ABSENT, None):
            place.runs[1].trouble = trouble
            until = clock.time() + 100
            wait_for(lambda: clock.time() > until)  # noqa: B023 - it is called at once
    assert not backend.status(ref).is_final


def test_a_job_that_waits_too_long_for_its_pods_ends(backend, submit, place, clock):
    clock.sleep(time.time() - clock.time())
    ref, head = submit(pending_timeout_s=600.0)
    head.state = "waiting"
    place.runs[1].trouble = Trouble(sentence="No node has 8 GPUs", heals=True)
    wait_for(lambda: backend.status(ref).reason == "No node has 8 GPUs")
    clock.sleep(601)
    status = wait_for_end(backend, ref)
    assert (status.state, status.cause) == (StateName.FAILED, FailureCause.TIMEOUT)
    assert status.reason == "The job has not started within its pending_timeout_s of 600 s. No node has 8 GPUs"
    assert place.killed


def test_an_object_that_failed_before_its_head_ran_is_over_and_its_pods_are_ended(backend, submit, place):
    ref, head = submit()
    head.state = "waiting"
    place.runs[1].finished = "failed"
    place.runs[1].trouble = ABSENT
    backend.close()
    status = backend.status(ref)
    assert (status.state, status.reason) == (StateName.FAILED, str(ABSENT))
    assert place.killed


@pytest.fixture
def forgotten(backend, submit, clock):
    """A job that waits past its `pending_timeout_s`, and that no process follows."""
    clock.sleep(time.time() - clock.time())
    ref, head = submit(pending_timeout_s=600.0)
    head.state = "waiting"
    backend.close()
    record = records.read(ref.record_name)
    records.write(dataclasses.replace(record, created=record.created - 601))
    return ref


def test_the_first_look_at_a_job_that_has_waited_too_long_ends_it(backend, place, forgotten):
    status = backend.status(forgotten)
    assert status.state is StateName.FAILED
    assert "pending_timeout_s of 600 s" in status.reason
    assert place.killed


def test_the_next_submission_ends_jobs_that_have_waited_too_long_and_says_so(forgotten, submit, place, capsys):
    place.taken.clear()
    submit()
    assert f"{forgotten} failed: The job has not started within its pending_timeout_s" in capsys.readouterr().err


def test_a_job_of_another_user_is_left_to_wait(backend, place, forgotten, submit):
    records.files(forgotten.record_name).key.unlink()
    place.taken.clear()
    submit()
    assert not place.killed


def test_a_pod_that_ended_before_it_reached_the_head_ends_the_job(backend, submit, place):
    ref, head = submit()
    head.event("state", state=StateName.STARTING, reason="", cause=None)
    place.runs[1].others = [ended_part(exit_code=78, trouble=Trouble(sentence="The image's Python is 3.8"))]
    status = wait_for_end(backend, ref)
    assert (status.cause, status.reason) == (FailureCause.NOT_STARTED, "The image's Python is 3.8")
    assert set(place.killed) == {(1, 0.0)}


def test_a_place_that_does_not_answer_ends_nothing(backend, submit, place):
    ref, head = submit()
    head.run()
    head.lines(0, "one")
    wait_for(lambda: texts(backend, ref))
    place.is_down = True
    wait_for(lambda: "The cluster does not answer." in backend.status(ref).reason)
    place.is_down = False
    head.succeed()
    assert wait_for_end(backend, ref).state is StateName.SUCCEEDED


def test_what_lags_ends_nothing(backend, submit, place):
    ref, head = submit()
    head.run()
    head.lines(0, "one")
    wait_for(lambda: texts(backend, ref))
    place.fresh = False
    place.runs[1].heads.append(head)
    heads, place.runs[1].heads = place.runs[1].heads, []
    time.sleep(0.1)
    assert not backend.status(ref).is_final
    place.runs[1].heads = heads
    place.fresh = True
    head.succeed()
    assert wait_for_end(backend, ref).state is StateName.SUCCEEDED


def test_what_another_pod_printed_last_is_kept(backend, submit, place):
    ref, head = submit()
    head.run()
    place.kept["words", 1] = b"\nkale_dist: the image has no torch\n"
    place.runs[1].others = [ended_part(exit_code=78, trouble=Trouble(sentence="pod-1 could not start"))]
    wait_for_end(backend, ref)
    assert texts(backend, ref)[0] == "pod 1: kale_dist: the image has no torch"


# -- ending it --------------------------------------------------------------------------------------------------------


def test_cancel_asks_the_head(backend, submit, place):
    ref, head = submit()
    head.run()
    wait_for(lambda: backend.status(ref).state is StateName.RUNNING)
    backend.cancel(ref)
    assert head.cancelled.is_set()
    head.verdict(StateName.CANCELLED, "The job was cancelled", FailureCause.USER)
    assert wait_for_end(backend, ref).state is StateName.CANCELLED
    assert not place.killed


def waiting_part(number=1):
    return Part(number=number, name=f"pod-{number}", uid=f"uid-{number}", state="waiting")


def test_a_pod_that_waits_when_the_job_is_cancelled_is_ended_behind_the_head(backend, submit, place):
    ref, head = submit()
    place.runs[1].others = [waiting_part()]
    backend.cancel(ref)
    head.verdict(StateName.CANCELLED, "The job was cancelled", FailureCause.USER)
    status = wait_for_end(backend, ref)
    assert (place.left_to_head, place.killed) == ([1], [])
    wait_for(lambda: head.acks)
    assert [note for note in status.notes if "pod-1" in note], status.notes


def test_the_pods_of_a_job_are_ended_before_it_counts_as_ended(backend, submit, place):
    place.refusal = BackendError("The cluster is being upgraded.", retryable=True)
    ref, head = submit()
    place.runs[1].others = [waiting_part()]
    head.verdict(StateName.FAILED, "no such column", FailureCause.ERROR)
    time.sleep(0.05)
    assert not backend.status(ref).is_final
    place.refusal = None
    assert wait_for_end(backend, ref).state is StateName.FAILED
    assert place.left_to_head == [1]


def test_pods_that_may_not_be_ended_are_in_the_status(backend, submit, place):
    place.refusal = BackendError("You may not patch jobs.")
    ref, head = submit()
    place.runs[1].others = [waiting_part()]
    head.verdict(StateName.FAILED, "no such column", FailureCause.ERROR)
    status = wait_for_end(backend, ref)
    assert status.reason == "no such column"
    assert [note for note in status.notes if "You may not patch jobs." in note], status.notes


def test_a_master_that_waits_when_another_pod_has_failed_is_not_left_to_itself(backend, submit, place):
    ref, head = submit()
    head.state = "waiting"
    place.runs[1].others = [ended_part(exit_code=78)]
    assert wait_for_end(backend, ref).state is StateName.FAILED
    assert not place.left_to_head
    assert (1, 0.0) in place.killed


def test_a_job_whose_pods_have_all_ended_is_left_as_it_is(backend, submit, place):
    ref, head = submit()
    head.run()
    place.runs[1].others = [ended_part(exit_code=0)]
    head.verdict(StateName.FAILED, "no such column", FailureCause.ERROR)
    assert wait_for_end(backend, ref).state is StateName.FAILED
    assert (place.left_to_head, place.killed) == ([], [])


def test_a_job_that_is_cancelled_while_it_is_renewed_leaves_no_pod_of_the_first_object(backend, submit, place):
    ref, head = submit(max_restarts=1)
    head.run()
    wait_for(lambda: backend.status(ref).state is StateName.RUNNING)

    def refuse(*_, **__):
        raise BackendError("The cluster is being upgraded.", retryable=True)

    place.start = place.remove = refuse
    lost_head(head)
    wait_for(lambda: not records.life(records.files(ref.record_name)).is_started)
    backend.cancel(ref)
    assert wait_for_end(backend, ref).state is StateName.CANCELLED
    assert (1, 0.0) in place.killed


def test_cancel_kills_where_the_head_may_not_be_asked(backend, submit, place):
    ref, head = submit(max_restarts=3)
    head.run()
    wait_for(lambda: backend.status(ref).state is StateName.RUNNING)
    place.forbids_connections = True
    backend.cancel(ref, grace_s=2.0)
    status = wait_for_end(backend, ref)
    assert (status.state, status.cause) == (StateName.CANCELLED, FailureCause.USER)
    assert status.reason.startswith("The job was cancelled by ")
    assert place.killed == [(1, 2.0)]


@pytest.mark.parametrize("is_mended", [True, False])
def test_a_head_that_cannot_be_reached_is_told_to_end_as_soon_as_it_can(backend, submit, place, is_mended):
    ref, head = submit()
    head.run()
    wait_for(lambda: backend.status(ref).state is StateName.RUNNING)
    head.refuse()
    place.is_down = is_mended
    backend.cancel(ref, grace_s=2.0)
    assert not place.killed
    if is_mended:
        head.mend()
        place.is_down = False
        assert head.cancelled.wait(5)
        assert not place.killed
    else:
        wait_for(lambda: "as soon as its first pod can be reached" in backend.status(ref).reason)
        assert wait_for_end(backend, ref).state is StateName.CANCELLED
        assert place.killed == [(1, 0.0)]


@pytest.mark.parametrize(("save", "grace_s"), [(True, 90.0), (False, 5.0)])
def test_a_cancel_gives_ranks_the_grace_of_the_call_if_they_may_save(backend, submit, place, save, grace_s):
    ref, head = submit(grace_s=90.0)
    head.run()
    wait_for(lambda: backend.status(ref).state is StateName.RUNNING)
    place.forbids_connections = True
    backend.cancel(ref, save=save)
    wait_for_end(backend, ref)
    assert place.killed == [(1, grace_s)]


def test_a_cancelled_job_that_does_not_end_is_killed(backend, submit, place):
    ref, head = submit()
    head.run()
    wait_for(lambda: backend.status(ref).state is StateName.RUNNING)
    backend.cancel(ref)
    assert wait_for_end(backend, ref).state is StateName.CANCELLED
    assert place.killed == [(1, 0.0)]


def test_an_object_that_was_deleted_is_not_started_again(backend, submit, place):
    ref, head = submit(max_restarts=3)
    head.run()
    wait_for(lambda: backend.status(ref).state is StateName.RUNNING)
    head.cut()
    place.runs[1].gone = True
    status = wait_for_end(backend, ref)
    assert (status.state, status.reason) == (
        StateName.CANCELLED,
        "The job was deleted while it ran, and its last lines are lost",
    )
    assert list(place.runs) == [1]


def test_pods_that_outlive_their_object_are_ended_by_their_head(backend, submit, place):
    """`kubectl delete --cascade=orphan` leaves them running, and nothing at the place ends them any more."""
    ref, head = submit(max_restarts=3)
    head.run()
    wait_for(lambda: backend.status(ref).state is StateName.RUNNING)
    place.runs[1].orphaned = True
    place.runs[1].trouble = Trouble(sentence="The object was deleted", cause=FailureCause.USER)
    status = wait_for_end(backend, ref)
    assert (status.state, status.reason) == (StateName.CANCELLED, "The object was deleted")
    assert head.cancelled.is_set()
    assert list(place.runs) == [1]


def test_a_job_that_was_cancelled_from_elsewhere_is_not_started_again(backend, submit, place):
    ref, head = submit(max_restarts=3)
    head.run()
    wait_for(lambda: backend.status(ref).state is StateName.RUNNING)
    place.runs[1].trouble = Trouble(sentence="The job was cancelled by ada", heals=True, cause=FailureCause.USER)
    # It cannot know who sent it SIGTERM.
    head.verdict(StateName.CANCELLED, "The head was told to end", FailureCause.SUSPENDED)
    lost_head(head, "deleted")
    status = wait_for_end(backend, ref)
    assert (status.state, status.reason) == (StateName.CANCELLED, "The job was cancelled by ada")
    assert list(place.runs) == [1]


def test_pods_of_a_cancelled_job_may_take_long_to_be_deleted(backend, submit, place, clock):
    ref, head = submit(max_restarts=3)
    head.run()
    wait_for(lambda: backend.status(ref).state is StateName.RUNNING)
    place.runs[1].trouble = Trouble(sentence="The job was cancelled by ada", heals=True, cause=FailureCause.USER)
    place.runs[1].others = [
        ended_part(exit_code=143, lost="deleted", trouble=Trouble(sentence="pod-1 was deleted while it ran")),
        Part(number=2, name="pod-2", uid="c", state="waiting"),
    ]
    clock.sleep(200)
    time.sleep(0.5)
    assert not backend.status(ref).is_final
    lost_head(head, "deleted")
    assert wait_for_end(backend, ref).state is StateName.CANCELLED
    assert list(place.runs) == [1]


def test_a_job_that_another_process_deletes_is_not_started_again(backend, submit, place):
    ref, head = submit(max_restarts=3)
    head.run()
    wait_for(lambda: backend.status(ref).state is StateName.RUNNING)

    def remove(handle):
        # Its pods end one after the other, which looks like a loss.
        lost_head(head, "deleted")
        assert wait_for_end(backend, ref).state is StateName.CANCELLED

    place.remove = remove
    FollowedBackend(place).delete(ref)
    assert list(place.runs) == [1]


def test_delete_removes_every_trace(backend, submit, place):
    ref, head = submit()
    head.run()
    backend.delete(ref)
    assert place.removed == [1]
    assert not records.exists(ref.record_name)
    assert ref not in backend.list()


# -- renewal -----------------------------------------------------------------------------------------------------------


def test_a_job_that_has_lost_its_head_is_renewed_from_the_last_checkpoint(backend, submit, place):
    ref, head = submit(max_restarts=2)
    head.run()
    head.lines(0, "one")
    head.event("checkpoint", epoch=3, step=30, path="checkpoint", bytes=4)
    place.kept[1, "checkpoint"] = stored_checkpoint(3)
    wait_for(lambda: backend.status(ref).checkpoint_epoch == 3)
    lost_head(head)
    second = wait_for(lambda: 2 in place.runs and place.head(2))
    assert place.runs[2].checkpoint == stored_checkpoint(3)
    assert place.runs[2].used_restarts == 1
    assert place.removed == [1]
    second.run()
    second.lines(0, "two")
    wait_for(lambda: backend.status(ref).state is StateName.RUNNING)
    second.succeed()
    status = wait_for_end(backend, ref)
    assert (status.state, status.attempt) == (StateName.SUCCEEDED, 1)
    lines = list(backend.logs(ref))
    assert [line.text for line in lines] == [
        "one",
        "pod-0 was evicted. The job is renewed, from the last checkpoint",
        "two",
    ]
    assert [line.sequence for line in lines] == [0, None, 1]
    assert [line.attempt for line in lines] == [0, 0, 1]
    files = records.files(ref.record_name)
    life = records.life(files)
    assert (life.object, life.first_attempt, life.used_restarts) == (f"{ref.name}-2", 1, 1)
    assert files.outcome(1, 0).read_bytes() == b"result of 0"


def test_a_job_is_renewed_after_a_pod_that_its_head_has_lost(backend, submit, place):
    ref, head = submit(max_restarts=1)
    head.run()
    place.runs[1].others = [ended_part(exit_code=137, lost="node lost")]
    head.files["checkpoint"] = b"from the living head"
    head.verdict(StateName.FAILED, "The pod of rank 1 was lost", FailureCause.LOST)
    wait_for(lambda: 2 in place.runs)
    assert place.runs[2].checkpoint == b"from the living head"
    place.head(2).succeed()
    assert wait_for_end(backend, ref).state is StateName.SUCCEEDED
    assert "The node of pod-1 was lost. The job is renewed, from" in texts(backend, ref)[0]


def lose_a_pod(head, run, epoch=4):
    """A pod is lost that no controller makes again, while the head lives and has a checkpoint."""
    head.run()
    head.event("checkpoint", epoch=epoch, step=40, path="checkpoint", bytes=4)
    head.files["checkpoint"] = stored_checkpoint(epoch)
    run.others = [ended_part(exit_code=137, lost="deleted")]
    head.verdict(StateName.FAILED, "The pod of rank 1 was lost", LOST)


@functools.cache
def stored_checkpoint(epoch):
    with io.BytesIO() as file:
        torch.save(checkpoint.collect(Checkpoint(epoch=epoch, model={"weight": torch.zeros(3)})), file)
        return file.getvalue()


@pytest.mark.parametrize("fault", FAULTS)
def test_a_renewal_waits_for_the_checkpoint_of_a_head_that_lives(backend, submit, place, fault):
    ref, head = submit(max_restarts=1)
    getattr(head, fault)()
    lose_a_pod(head, place.runs[1])
    wait_for(lambda: "checkpoint could not be fetched yet" in backend.status(ref).reason)
    assert (list(place.runs), place.removed) == ([1], [])
    head.mend()
    wait_for(lambda: 2 in place.runs)
    assert place.runs[2].checkpoint == stored_checkpoint(4)
    place.head(2).succeed()
    status = wait_for_end(backend, ref)
    assert (status.state, status.warnings) == (StateName.SUCCEEDED, ())


@pytest.mark.parametrize(("earlier", "origin"), [(2, "from epoch 2"), (None, "from the beginning")])
def test_a_renewal_that_has_to_go_on_with_less_warns_and_names_both_epochs(backend, submit, place, earlier, origin):
    ref, head = submit(max_restarts=1, collect_wait_s=20.0)
    if earlier is not None:
        records.files(ref.record_name).checkpoint.write_bytes(stored_checkpoint(earlier))
    head.refuse()
    lose_a_pod(head, place.runs[1])
    wait_for(lambda: 2 in place.runs)
    place.head(2).succeed()
    (warning,) = wait_for_end(backend, ref).warnings
    assert origin in warning
    assert "of epoch 4 could not be fetched" in warning


def test_a_job_whose_pods_are_all_lost_is_renewed_whatever_the_new_head_waits_for(backend, submit, place):
    ref, head = submit(max_restarts=2)
    head.run()
    wait_for(lambda: backend.status(ref).state is StateName.RUNNING)
    run = place.runs[1]
    run.replaced = [ended_part(number, 137, lost="deleted") for number in (0, 1)]
    head.state, run.others = "waiting", []
    run.trouble = Trouble(sentence="Pod pod-0 is being prepared on node-a", heals=True)
    run.finished = "failed"
    wait_for(lambda: 2 in place.runs)
    place.head(2).succeed()
    assert wait_for_end(backend, ref).state is StateName.SUCCEEDED
    assert "pod-0 was deleted. The job is renewed" in texts(backend, ref)[0]


def test_a_head_that_was_terminated_is_explained_by_its_place(backend, submit, place):
    ref, head = submit()
    head.run()
    head.verdict(StateName.CANCELLED, "The head was told to end", FailureCause.SUSPENDED)
    time.sleep(0.05)
    assert not backend.status(ref).is_final
    head.end(143, lost="evicted", trouble=Trouble(sentence="pod-0 was ended because its node was drained"))
    status = wait_for_end(backend, ref)
    assert (status.state, status.reason) == (StateName.FAILED, "pod-0 was ended because its node was drained")


@pytest.mark.parametrize(
    ("part", "is_given_up"),
    [
        ({"exit_code": 137, "lost": "evicted"}, False),
        ({"exit_code": 144}, False),
        ({"exit_code": 70}, True),
        ({"exit_code": 1}, True),
    ],
)
def test_a_pod_that_is_made_again_is_left_to_the_head(backend, submit, place, clock, part, is_given_up):
    ref, head = submit(max_restarts=1)
    head.run()
    wait_for(lambda: backend.status(ref).state is StateName.RUNNING)
    place.runs[1].replaces = True
    place.runs[1].others = [ended_part(**part)]
    # As long as the follower waits for a head that may not know: the clock runs a hundred times faster.
    time.sleep(1)
    assert backend.status(ref).is_final == is_given_up
    if is_given_up:
        return
    place.runs[1].trouble = trouble = Trouble(sentence="pod-1 was deleted", remedy="Submit the job again")
    place.runs[1].others = [ended_part(exit_code=143, lost="deleted", trouble=trouble)]
    wait_for(lambda: backend.status(ref).reason == "pod-1 was deleted")
    assert not backend.status(ref).needs_action
    place.runs[1].trouble, head.attempt = None, 1
    head.event("state", state=StateName.STARTING, reason="Waits for a pod: pod-1. Starting again", cause=None)
    place.runs[1].others = [
        Part(number=1, name="pod-1", uid="b", state="waiting", trouble=Trouble(sentence="No node has room"))
    ]
    wait_for(lambda: backend.status(ref).reason == "Waits for a pod: pod-1. Starting again. No node has room")
    clock.sleep(1000)
    time.sleep(0.3)
    assert not backend.status(ref).is_final
    head.run()
    place.runs[1].others = []
    head.succeed()
    assert wait_for_end(backend, ref).state is StateName.SUCCEEDED
    assert list(place.runs) == [1]


def test_a_pod_that_did_not_come_again_is_explained_and_the_job_is_renewed(backend, submit, place):
    ref, head = submit(max_restarts=1)
    head.run()
    place.runs[1].replaces = True
    place.runs[1].others = [
        Part(number=1, name="pod-1", uid="b", state="waiting", trouble=Trouble(sentence="No node has room"))
    ]
    place.runs[1].replaced = [ended_part(exit_code=137, lost="evicted")]
    head.verdict(StateName.FAILED, "Pod pod-1 was not there again", FailureCause.LOST)
    wait_for(lambda: 2 in place.runs)
    place.head(2).succeed()
    assert wait_for_end(backend, ref).state is StateName.SUCCEEDED
    assert "pod-1 was evicted. No node has room. The job is renewed" in texts(backend, ref)[0]


def test_without_restarts_a_lost_pod_ends_the_job(backend, submit, place):
    ref, head = submit()
    head.run()
    place.runs[1].others = [ended_part(exit_code=137, lost="evicted")]
    head.verdict(StateName.FAILED, "The pod of rank 1 was lost", FailureCause.LOST)
    status = wait_for_end(backend, ref)
    assert (status.state, status.reason) == (StateName.FAILED, "pod-1 was evicted")
    assert list(place.runs) == [1]
    assert place.left_to_head == [1]


def test_restarts_in_the_head_count_too(backend, submit, place):
    ref, head = submit(max_restarts=1)
    head.run()
    head.attempt = 1
    head.run()
    head.lines(0, "second attempt")
    wait_for(lambda: texts(backend, ref))
    lost_head(head)
    assert wait_for_end(backend, ref).state is StateName.FAILED
    assert list(place.runs) == [1]


def test_a_name_that_is_taken_means_that_another_follower_was_first(backend, submit, place):
    ref, head = submit(max_restarts=1)
    head.run()
    wait_for(lambda: backend.status(ref).state is StateName.RUNNING)
    place.runs[2] = type(place.runs[1])([ScriptedHead()])
    place.taken.add(2)
    theirs = place.head(2)
    lost_head(head)
    theirs.run()
    theirs.lines(1, "begun by the other")
    theirs.succeed()
    assert wait_for_end(backend, ref).state is StateName.SUCCEEDED
    assert texts(backend, ref)[-1] == "begun by the other"
    # Of this object, not of the first one: by its UID an object is told from another of the same name.
    assert records.life(records.files(ref.record_name)).place == (("where", "there"),)


def test_a_name_that_is_taken_by_another_job_is_left_alone(backend, submit, place):
    ref, head = submit(max_restarts=1)
    head.run()
    wait_for(lambda: backend.status(ref).state is StateName.RUNNING)
    # The newest object that bears this job's name is still its first one.
    place.taken.add(2)
    place.remove = lambda handle: None
    lost_head(head)
    status = wait_for_end(backend, ref)
    assert (status.state, status.cause) == (StateName.FAILED, FailureCause.NOT_STARTED)
    assert status.reason == f"The job could not be renewed: The name {ref.name}-2 is taken by something else"


def test_a_follower_that_was_killed_while_it_renews_is_gone_on_from(backend, submit, place, clock):
    ref, head = submit(max_restarts=1)
    head.run()
    wait_for(lambda: backend.status(ref).state is StateName.RUNNING)

    def refuse(*_, **__):
        raise BackendError("The cluster is being upgraded.", retryable=True)

    place.start, start = refuse, place.start
    lost_head(head)
    wait_for(lambda: not records.life(records.files(ref.record_name)).is_started)
    backend.close()
    place.start = start
    wait_for(lambda: backend.status(ref) and 2 in place.runs)
    place.head(2).succeed()
    assert wait_for_end(backend, ref).state is StateName.SUCCEEDED


def renewing(ref):
    """Write down what a process leaves that is killed while it renews a job, before it knows of the next object."""
    record = records.read(ref.record_name)
    files = records.files(ref.record_name)
    records.write_life(files, records.Life(number=2, is_started=False, used_restarts=1, first_attempt=1))
    return record


def test_a_job_that_could_not_be_renewed_stays_so(backend, submit, place, monkeypatch):
    ref, head = submit(max_restarts=1)
    head.run()
    refused = BackendError("You may not create pods")
    monkeypatch.setattr(place, "start", lambda *_: (_ for _ in ()).throw(refused))
    lost_head(head)
    assert "could not be renewed: You may not create pods" in wait_for_end(backend, ref).reason
    monkeypatch.undo()
    # Whoever fetches something of it makes a follower.
    with contextlib.suppress(BackendError):
        backend.fetch(ref, "checkpoint")
    time.sleep(0.2)
    assert 2 not in place.runs
    assert backend.status(ref).state is StateName.FAILED


@pytest.mark.parametrize("way", ["delete", "cancel"])
def test_the_object_of_a_renewal_that_was_killed_does_not_stay(backend, submit, place, way):
    ref, head = submit(max_restarts=1)
    head.run()
    wait_for(lambda: backend.status(ref).state is StateName.RUNNING)
    backend.close()
    record = renewing(ref)
    place.start(record.spec, KEY, records.life(records.files(ref.record_name)))
    records.mark_cancelled(records.files(ref.record_name))
    if way == "delete":
        backend.delete(ref)
        assert not place.runs
    else:
        assert wait_for_end(backend, ref).state is StateName.CANCELLED
        assert place.killed[-1] == (2, 0.0)


def test_a_cancel_of_a_job_that_is_being_renewed_needs_no_answer_of_the_place(backend, submit, place, monkeypatch):
    ref, head = submit(max_restarts=1)
    head.run()
    down = BackendError("The cluster does not answer.", retryable=True)
    monkeypatch.setattr(place, "remove", lambda *_: (_ for _ in ()).throw(down))
    lost_head(head)
    wait_for(lambda: not records.life(records.files(ref.record_name)).is_started)
    place.is_down, place.refusal = True, down
    with contextlib.suppress(BackendError):
        backend.cancel(ref)
    assert wait_for_end(backend, ref).state is StateName.CANCELLED


def test_a_new_head_does_not_hide_that_the_disk_is_full(backend, submit, place, monkeypatch):
    ref, head = submit(max_restarts=1)
    head.run()
    head.lines(0, "before")
    wait_for(lambda: texts(backend, ref) == ["before"])
    full = {"is": True}
    write = copy._write_all

    def full_disk(file, data):
        if full["is"]:
            raise OSError(28, "No space left on device")
        write(file, data)

    monkeypatch.setattr(copy, "_write_all", full_disk)
    head.lines(0, "lost for a while")
    place.runs[1].heads.append(resumed := ScriptedHead())
    place.runs[1].returns_head = True
    head.end(137, lost="evicted")
    wait_for(lambda: "No space left" in backend.status(ref).reason)
    full["is"] = False
    resumed.run()
    resumed.succeed()
    assert wait_for_end(backend, ref).state is StateName.SUCCEEDED


def test_a_message_to_the_ranks_names_the_attempt_as_their_head_counts_it(backend, submit, place):
    ref, head = submit(max_restarts=1)
    head.run()
    lost_head(head)
    second = wait_for(lambda: 2 in place.runs and place.head(2))
    second.run()
    wait_for(lambda: (status := backend.status(ref)).attempt == 1 and status.state is StateName.RUNNING)
    backend.send(ref, -1, Interrupt(number=3, attempt=1))
    backend.send(ref, -1, Restart(attempt=1))
    assert second.told == [Interrupt(number=3, attempt=0), Restart(attempt=0)]


def test_a_suspended_job_resumes_with_its_next_head_at_no_cost(backend, submit, place):
    ref, head = submit(max_restarts=0)
    head.run()
    head.lines(0, "one")
    wait_for(lambda: texts(backend, ref))
    place.runs[1].suspended = "Suspended: its queue has no room"
    head.verdict(StateName.CANCELLED, "The head was told to end", FailureCause.SUSPENDED)
    head.end(143, lost="deleted")
    place.runs[1].heads = []
    wait_for(lambda: backend.status(ref).reason == "Suspended: its queue has no room")
    assert backend.status(ref).state is StateName.PENDING
    place.runs[1].suspended = ""
    time.sleep(0.05)
    assert not backend.status(ref).is_final
    resumed = ScriptedHead()
    place.runs[1].heads = [resumed]
    resumed.run()
    resumed.lines(0, "two")
    resumed.succeed()
    status = wait_for_end(backend, ref)
    assert (status.state, status.attempt) == (StateName.SUCCEEDED, 1)
    assert texts(backend, ref)[-1] == "two"
    assert place.removed == []


@pytest.mark.parametrize("max_restarts", [0, 1])
def test_a_head_that_the_operator_made_again_goes_on_or_ends_the_job(backend, submit, place, max_restarts):
    ref, head = submit(max_restarts=max_restarts)
    head.run()
    wait_for(lambda: backend.status(ref).state is StateName.RUNNING)
    again = ScriptedHead()
    head.end(137, lost="deleted")
    place.runs[1].heads = [again]
    again.run()
    again.succeed()
    status = wait_for_end(backend, ref)
    if max_restarts:
        assert status.state is StateName.SUCCEEDED
    else:
        assert "was lost and made again, and max_restarts allows no further restart" in status.reason
        assert place.killed


@pytest.mark.parametrize("has_left", [True, False])
def test_a_head_that_comes_back_is_waited_for_and_counts_for_itself(backend, submit, place, clock, has_left):
    ref, head = submit(max_restarts=1)
    place.runs[1].returns_head = True
    for number in range(3):
        head.run()
        head.lines(0, f"life {number}")
        wait_for(lambda number=number: texts(backend, ref)[-1:] == [f"life {number}"])
        if has_left:
            head.verdict(StateName.CANCELLED, "The head was told to end", FailureCause.SUSPENDED)
        head.end(143 if has_left else 137, lost="evicted" if has_left else "killed")
        clock.sleep(1000)
        time.sleep(0.2)
        assert not backend.status(ref).is_final
        head = ScriptedHead()
        place.runs[1].heads = [head]
    head.succeed()
    assert wait_for_end(backend, ref).state is StateName.SUCCEEDED
    assert list(place.runs) == [1]
    assert not place.removed


@pytest.mark.parametrize("is_heard", [True, False])
def test_a_head_that_comes_back_has_the_last_word_when_no_restart_is_left(backend, submit, place, is_heard):
    ref, head = submit(max_restarts=3)
    place.runs[1].returns_head = True
    reason = "max_restarts allows no more"
    verdict = Verdict(StateName.FAILED, FailureCause.AGENT_DIED, reason)
    if is_heard:
        head.verdict(StateName.FAILED, reason, FailureCause.AGENT_DIED)
    head.end(1, message=json.dumps(wire.encode(verdict.last_state)))
    status = wait_for_end(backend, ref)
    assert (status.state, status.cause, status.reason) == (StateName.FAILED, FailureCause.AGENT_DIED, reason)
    assert list(place.runs) == [1]


def test_a_head_that_would_come_back_is_not_waited_for_when_the_job_is_cancelled(backend, submit, place):
    ref, head = submit(max_restarts=1)
    head.run()
    place.runs[1].returns_head = True
    wait_for(lambda: backend.status(ref).state is StateName.RUNNING)
    head.end(137, lost="killed")
    backend.cancel(ref)
    assert wait_for_end(backend, ref).state is StateName.CANCELLED


@pytest.mark.parametrize("has_given_up", [True, False])
def test_another_object_takes_over_where_pods_do_not_come_again_or_the_object_has_failed(
    backend, submit, place, has_given_up
):
    ref, head = submit(max_restarts=1)
    head.run()
    place.runs[1].returns_head = True
    if has_given_up:
        head.verdict(StateName.FAILED, "Pod pod-1 was not there again", FailureCause.LOST)
    else:
        place.runs[1].finished = "failed"
    head.end(1 if has_given_up else 137, lost="" if has_given_up else "killed")
    wait_for(lambda: 2 in place.runs)
    place.head(2).succeed()
    assert wait_for_end(backend, ref).state is StateName.SUCCEEDED


def test_jobs_of_other_backends_are_not_found(backend):
    from kale_dist.errors import JobNotFoundError

    with pytest.raises(JobNotFoundError, match="not a job of the scripted backend"):
        backend.status(JobRef("docker", "x"))

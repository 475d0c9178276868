"""Gossip: who meets whom, what is sent, and whether ranks come together."""

import pytest
from strategy_jobs import assert_close_to_ddp, assert_fails, assert_resumes, digits, leave_early, trained

from kale_dist.strategies import Gossip
from kale_dist.worker.parallel.gossip_averaging import partners_of, rounds_of

pytestmark = pytest.mark.filterwarnings("ignore:.*processes share:UserWarning")
MODEL_BYTES = 4 * (64 * 64 + 64 + 64 * 10 + 10)


@pytest.mark.parametrize("graph", ["ring", "exponential"])
@pytest.mark.parametrize("world", [2, 3, 4, 5, 8, 9])
def test_each_rank_hears_of_every_other_and_the_mean_is_kept(graph, world):
    values = [[float(rank == source) for source in range(world)] for rank in range(world)]
    rounds = rounds_of(graph, world)
    for _ in range(world):
        for distances in rounds:
            assert len(set(distances)) == len(distances)
            share = 1 / (len(distances) + 1)
            values = [
                [sum(values[(rank - d) % world][source] for d in (0, *distances)) * share for source in range(world)]
                for rank in range(world)
            ]
            assert all(sum(row[source] for row in values) == pytest.approx(1) for source in range(world))
    assert all(number > 0 for row in values for number in row)


@pytest.mark.parametrize("graph", ["ring", "exponential"])
@pytest.mark.parametrize("world", [2, 4, 6, 8, 16])
def test_asynchronous_ranks_meet_only_those_that_answer(graph, world):
    for rank in range(world):
        partners = partners_of(graph, rank, world)
        assert partners
        assert all((partner - rank) % 2 for partner in partners)
        assert all(rank in partners_of(graph, partner, world) for partner in partners)


@pytest.mark.nightly
def test_gossip_in_pairs_comes_together_and_counts_what_it_sends():
    strategies = {"all": Gossip(), "changed": Gossip(send="changed"), "async": Gossip(mode="async")}
    found = digits(strategies, 2, epochs=2)
    steps, averages = 2 * 44, 2 * 2 * MODEL_BYTES
    assert found["all"][1]["bytes_sent"] == steps * 2 * MODEL_BYTES + averages
    # A tenth of the 4,810 numbers, each with a position.
    assert found["changed"][1]["bytes_sent"] == steps * 2 * 481 * 8 + averages
    assert found["async"][1]["bytes_sent"] == steps * 2 * MODEL_BYTES + averages
    assert found["all"][1]["consensus_distance"] < 1e-4
    assert all(accuracy > 0.7 for accuracy, _ in found.values())


@pytest.mark.nightly
def test_ranks_that_take_different_steps_are_told():
    assert_fails(Gossip(), 2, leave_early, "have not made the same number of optimizer steps")


@pytest.mark.nightly
@pytest.mark.parametrize("strategy", [Gossip(graph="exponential"), Gossip(send="changed")], ids=repr)
def test_a_lost_rank_resumes_with_its_own_optimizer(strategy):
    assert_resumes(strategy, 3, lost=2)


@pytest.mark.nightly
def test_digits_reach_the_accuracy_of_ddp():
    strategies = {
        "ring": Gossip(),
        "exponential": Gossip(graph="exponential"),
        "changed": Gossip(send="changed"),
        "async": Gossip(mode="async", graph="exponential"),
    }
    found = assert_close_to_ddp(strategies, 4)
    assert found["changed"][1]["bytes_sent"] < 0.25 * found["ring"][1]["bytes_sent"]


@pytest.mark.nightly
def test_ranks_come_closer_as_the_learning_rate_falls():
    *_, metrics = trained(Gossip(), 4)
    distances = [row["consensus_distance"] for row in metrics if row["source"] == "train"]
    assert len(distances) == 4
    assert 0 < distances[-1] < distances[0] / 2

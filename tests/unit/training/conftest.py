"""Real ranks for the tests of training, kept for all tests of a run."""

import cloudpickle
import pytest
from rank_pool import Hang, Ranks

_pools = {}


@pytest.fixture
def ranks(request):
    """`ranks(n, function, *args)` runs a function in n ranks and gives the list of what they return.

    With `keep=False` nobody uses these ranks afterwards: for what cannot be taken back.
    """
    cloudpickle.register_pickle_by_value(request.module)

    def run(world, function, *args, keep=True):
        # A worker that a DataLoader forks has been seen not to answer, rarely, in ranks that had served many tests; why
        # is not known. A second try in fresh ranks tells that from a hang of the code that is tested.
        for is_last in (False, True):
            if world not in _pools:
                _pools[world] = Ranks(world)
            try:
                answers = _pools[world].run(function, *args)
            except Hang:
                _pools.pop(world).close()
                if is_last:
                    pytest.fail("the ranks hang")
                continue
            except BaseException:
                _pools.pop(world).close()
                raise
            if not keep:
                _pools.pop(world).close()
            return answers
        return None

    yield run
    cloudpickle.unregister_pickle_by_value(request.module)


@pytest.fixture(scope="session", autouse=True)
def _close_ranks():
    yield
    while _pools:
        _pools.popitem()[1].close()

"""For tests of the notebook's side, without a cluster or an engine."""

import pytest


@pytest.fixture(scope="module")
def own_state(tmp_path_factory):
    """A state of the module's own, whose jobs are deleted at its end."""
    import kale_dist

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield
        for job in kale_dist.jobs():
            job.delete()

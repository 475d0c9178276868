"""With each other cloudpickle that users may have, ranks show the lines of cells: tests of other files, in notebooks with that version."""

import importlib.metadata

import notebook_parts
import pytest
import test_debugger_in_kernel
import test_tracebacks

VERSIONS = [one for one in notebook_parts.CLOUDPICKLES if one != importlib.metadata.version("cloudpickle")]
pytestmark = [pytest.mark.nightly, pytest.mark.parametrize("kernel", VERSIONS, indirect=True, scope="module")]

step = test_debugger_in_kernel.step


@pytest.fixture
def notebook(kernel):
    kernel.good(test_tracebacks.SETUP)
    return kernel


def test_ranks_have_the_notebooks_version(kernel, request):
    version = request.node.callspec.params["kernel"]
    kernel.good("def version():\n    import cloudpickle\n    return cloudpickle.__version__")
    assert kernel.good("print(version(), kd.launch(version, number_of_processes=1).result())") == f"{version} {version}"


test_error = test_tracebacks.test_a_ranks_error_has_the_lines_of_its_cell
test_same_name = test_tracebacks.test_of_two_cells_that_define_the_same_name_each_has_its_own_lines
test_box = test_tracebacks.test_the_box_of_a_failure_names_cell_and_line
test_sources = test_tracebacks.test_a_rank_reads_the_sources_of_cells
test_made_in_a_rank = test_tracebacks.test_what_a_rank_has_made_has_the_lines_of_its_cell_in_the_notebook
test_breakpoint = test_debugger_in_kernel.test_the_prompt_opens_in_the_cell_that_waits_and_shows_the_cells_lines

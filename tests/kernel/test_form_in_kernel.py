"""The launcher form in a real kernel: what a page would be sent, and what it can ask for."""

import pytest

pytestmark = pytest.mark.newest

NOTEBOOK = """
from torch.utils.data import DataLoader, TensorDataset
loader = DataLoader(TensorDataset(torch.randn(64, 4), torch.randn(64, 1)), batch_size=8)
net = torch.nn.Linear(4, 1)
loss = torch.nn.MSELoss()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
"""


@pytest.fixture(scope="module", autouse=True)
def said(kernel):
    """What the form sends besides its state is kept in the kernel."""
    kernel.good(
        "from kale_dist.calls.form import LauncherForm\n"
        "said = []\n"
        "class Spoken(LauncherForm):\n"
        "    def send(self, content, buffers=None): said.append(content['said'])\n"
        "    def ask(self, what): self._receive(self, {'ask': what}, [])"
    )


def test_a_form_is_shown_checked_and_run(kernel):
    kernel.good("form = Spoken(globals()); form")
    assert "lacks a model, a DataLoader and an optimizer" in kernel.good("print(form.problem['text'])")
    kernel.good(NOTEBOOK)
    kernel.good("form.ask('look')")
    assert kernel.good("print(form.problem, form.choice['model'], form.choice['train_data_loader'])") == "{} net loader"
    kernel.good("form.choice = {**form.choice, 'epochs': '0'}")
    assert kernel.good("print(form.problem['field'])") == "epochs"
    kernel.good("form.choice = {**form.choice, 'epochs': '2', 'number_of_processes': '1'}")
    assert "net, loader, loss, optimizer,\n    epochs=2" in kernel.good("print(form.code)")
    kernel.good("words = {'beta': 0.5}; form.ask('look')")
    assert kernel.good("print(form.choice['train_args'] == '', 'train_args' in form.code)") == "True False"
    kernel.good("form.choice = {**form.choice, 'train_args': 'words'}")
    assert kernel.good("print('    train_args=words,' in form.code, form.problem)") == "True {}"
    kernel.good("form.ask('run')")
    assert kernel.good("print(said[-1])").startswith("Started as `job`: local://train-linear-")
    assert kernel.good("print(job.wait().state.value, job.model is net, bool(form.job_view))") == "succeeded True True"


def test_the_magic_without_a_cell_shows_it(kernel):
    kernel.good("%load_ext kale_dist")
    reply = kernel("%distribute")
    assert "application/vnd.jupyter.widget-view+json" in reply.shown[-1], reply.traceback
    assert "job = kd.distribute(\n    net, loader, loss, optimizer," in reply.shown[-1]["text/plain"]


def test_its_first_message_has_the_whole_form(kernel):
    sent, opened = kernel.send("other = LauncherForm({}); other"), []
    while not (opened and opened[-1]["msg_type"] == "execute_result"):
        message = kernel.client.get_iopub_msg(timeout=60)
        if message["parent_header"].get("msg_id") == sent:
            opened.append(message)
    (state,) = [
        one["content"]["data"]["state"]
        for one in opened
        if one["msg_type"] == "comm_open" and "problem" in one["content"]["data"]["state"]
    ]
    assert "lacks a model, a DataLoader and an optimizer" in state["problem"]["text"]
    assert state["fields"]
    assert state["code"].startswith("job = kd.distribute(")

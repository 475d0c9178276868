"""The form's list of a real cluster's claims: seen, chosen with a click or a key, and left out again."""

import importlib.util
import json
import pathlib
import urllib.parse

import from_network
import pytest
from on_cluster import run_kubectl
from playwright.sync_api import expect

pytestmark = pytest.mark.nightly

if importlib.util.find_spec("kubernetes") is None:
    pytest.skip("kubernetes is not installed", allow_module_level=True)

LONG = "a-claim-with-a-name-that-is-rather-long-for-a-button-of-a-narrow-window"
CLAIMS = ["digits", LONG, "results"]
NAMES = """
import torch
from torch.utils.data import DataLoader, TensorDataset

loader = DataLoader(TensorDataset(torch.randn(8, 4), torch.randn(8, 1)), batch_size=8)
net, criterion = torch.nn.Linear(4, 1), torch.nn.MSELoss()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
"""


@pytest.fixture(scope="module")
def cluster(kubeconfig, server):
    """The cluster's address, in the network of JupyterLab as well."""
    import yaml

    described = yaml.safe_load(pathlib.Path(kubeconfig).read_text())
    address = urllib.parse.urlsplit(described["clusters"][0]["cluster"]["server"])
    with from_network.reach(server, address.hostname, address.port):
        yield


@pytest.fixture(scope="module")
def with_claims(make_namespace):
    """A namespace with claims."""
    namespace = make_namespace()
    spec = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}}
    made = [
        {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": name}, "spec": spec}
        for name in CLAIMS
    ]
    run_kubectl(
        "-n", namespace, "apply", "-f", "-", text=json.dumps({"apiVersion": "v1", "kind": "List", "items": made})
    )
    return namespace


@pytest.fixture(scope="module")
def notebook(open_notebook, cluster):
    made = open_notebook("claims.ipynb")
    made.value(f"import os\nimport kale_dist as kd\n{NAMES}")
    yield made
    assert not made.errors


@pytest.fixture
def show(notebook):
    """Shows a form that is set to the cluster; variables of the kernel can be set before."""

    def make(**variables):
        notebook.command("notebook:clear-all-cell-outputs")
        notebook.value(f"os.environ.update({variables})")
        form = notebook.run("kd.form()").get_by_role("form", name="Distributed training")
        expect(listed(form)).to_be_hidden()
        form.get_by_label("Where").select_option("kubernetes")
        form.get_by_label("Image").fill("team/torch:2")
        form.scroll_into_view_if_needed()
        return form

    return make


def listed(form):
    return form.get_by_role("group", name="Claims of the cluster")


def test_claims_are_listed_chosen_and_left_out(notebook, show, with_claims):
    form = show(KALE_DIST_NAMESPACE=with_claims)
    expect(listed(form).get_by_role("button")).to_have_text(sorted(CLAIMS))
    digits, results = (listed(form).get_by_role("button", name=name) for name in ("digits", "results"))
    volumes, call = form.get_by_label("Volumes"), form.get_by_label("The call")
    expect(digits).to_have_attribute("aria-pressed", "false")
    expect(form.get_by_label("Processes")).to_have_attribute("placeholder", "two")
    digits.click()
    expect(volumes).to_have_value("/data=digits")
    expect(digits).to_have_attribute("aria-pressed", "true")
    expect(call).to_contain_text("volumes={'/data': 'digits'}")
    volumes.fill("/input=digits")
    results.focus()
    notebook.page.keyboard.press("Space")
    expect(volumes).to_have_value("/input=digits, /data=results")
    expect(call).to_contain_text("volumes={'/input': 'digits', '/data': 'results'}")
    digits.click()
    expect(digits).to_have_attribute("aria-pressed", "false")
    expect(call).to_contain_text("volumes={'/data': 'results'}")
    for theme, width in (("JupyterLab Light", 1000), ("JupyterLab Dark", 480)):
        notebook.dress(theme, width)
        form.scroll_into_view_if_needed()
        assert notebook.fits(form)
        assert notebook.accessibility_problems(".kd-form") == ""
        notebook.photograph(f"claims-{theme.split()[1].lower()}-{width}", form)
    form.get_by_label("Where").select_option("docker")
    expect(listed(form)).to_be_hidden()


def test_a_claim_that_is_made_meanwhile_is_found(notebook, show, make_namespace):
    namespace = make_namespace()
    form = show(KALE_DIST_NAMESPACE=namespace)
    expect(listed(form)).to_contain_text("The namespace has none")
    spec = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}}
    claim = {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": "fresh"}, "spec": spec}
    run_kubectl("-n", namespace, "apply", "-f", "-", text=json.dumps(claim))
    form.get_by_role("button", name="Refresh").click()
    expect(listed(form).get_by_role("button")).to_have_text(["fresh"])
    expect(listed(form)).not_to_contain_text("none")


def test_a_cluster_that_cannot_be_asked_is_said(notebook, show):
    form = show(KALE_DIST_KUBECONFIG="/absent/kubeconfig")
    notebook.dress("JupyterLab Light", 1000)
    expect(listed(form)).to_contain_text("/absent/kubeconfig")
    expect(listed(form).get_by_role("button")).to_have_count(0)
    notebook.photograph("claims-no-cluster", form)

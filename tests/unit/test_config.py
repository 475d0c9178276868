"""Settings from the file and the environment, and what is said of those that are wrong."""

import pathlib

import pytest

import kale_dist as kd
from kale_dist import config


@pytest.fixture
def file(tmp_path):
    folder = tmp_path / "kale-dist"
    folder.mkdir()
    return folder / "config.toml"


def load(tmp_path, **environment):
    return config.load({"XDG_CONFIG_HOME": str(tmp_path), **environment})


def test_without_file_and_variables_nothing_is_set(tmp_path):
    assert load(tmp_path) == config.Config()


def test_the_file_is_read(tmp_path, file):
    file.write_text('image = "r.example.com/a/b:1"\nnamespace = "team-a"\nimage_pull_secrets = ["one", "two"]\n')
    found = load(tmp_path)
    assert (found.image, found.namespace) == ("r.example.com/a/b:1", "team-a")
    assert found.image_pull_secrets == ("one", "two")
    assert dict(found.origins)["image"] == str(file)


def test_the_environment_beats_the_file(tmp_path, file):
    file.write_text('image = "from/file:1"\nstore = "s3://bucket/folder"\n')
    found = load(tmp_path, KALE_DIST_IMAGE="from/variable:2", KALE_DIST_IMAGE_PULL_SECRETS="a, b")
    assert (found.image, found.store, found.image_pull_secrets) == ("from/variable:2", "s3://bucket/folder", ("a", "b"))
    assert dict(found.origins)["image"] == "KALE_DIST_IMAGE"


@pytest.mark.parametrize(
    "place", ["localhost", "localhost:5000", "r.example.com/a/b-c", "http://10.0.0.1:5000", "[::1]:5000/x"]
)
def test_registries_are_named_with_a_path_or_without(tmp_path, place):
    assert load(tmp_path, KALE_DIST_REGISTRY=place, KALE_DIST_REGISTRY_PULL=place).registry == place


def test_places_are_tables_of_the_file_or_json_in_the_environment(tmp_path, file, refusal):
    file.write_text(
        'on = "kubernetes"\n[kubernetes]\nresources = {cpu = 2, memory = "4Gi"}\nvolumes = {"/data" = "sets"}\n'
    )
    found = load(tmp_path)
    expected = kd.Kubernetes(resources={"cpu": 2, "memory": "4Gi"}, volumes={"/data": "sets"})
    assert (found.on, found.kubernetes, found.place("kubernetes"), found.docker) == (
        "kubernetes", expected, expected, kd.Docker()
    )  # fmt: skip
    assert load(tmp_path, KALE_DIST_KUBERNETES='{"queue": "gpus"}').kubernetes == kd.Kubernetes(queue="gpus")
    assert refusal(lambda: load(tmp_path, KALE_DIST_DOCKER="x")).argument == "KALE_DIST_DOCKER"


def test_commands_without_a_call_know_the_namespace_of_the_table(tmp_path, file):
    file.write_text('[kubernetes]\nnamespace = "team-a"\ncontext = "lab"\n')
    found = load(tmp_path, KALE_DIST_CONTEXT="other")
    assert (found.namespace, found.context) == ("team-a", "lab")
    assert dict(found.origins)["namespace"] == str(file)
    assert config.load(found.as_environment() | {"XDG_CONFIG_HOME": str(tmp_path / "none")}) == found


def test_what_is_set_goes_to_another_process_by_its_environment(tmp_path, file):
    file.write_text('on = "kubernetes"\nimage_pull_secrets = ["a", "b"]\n[kubernetes]\nvolumes = {"/data" = "sets"}\n')
    found = load(tmp_path)
    variables = found.as_environment()
    assert sorted(variables) == ["KALE_DIST_IMAGE_PULL_SECRETS", "KALE_DIST_KUBERNETES", "KALE_DIST_ON"]
    file.unlink()
    assert load(tmp_path, **variables) == found


def test_an_empty_variable_sets_nothing(tmp_path, file):
    file.write_text('namespace = "team-a"\n')
    assert load(tmp_path, KALE_DIST_NAMESPACE="").namespace == "team-a"


def test_another_file_can_be_named(tmp_path):
    other = tmp_path / "other.toml"
    other.write_text('queue = "gpus"\n')
    assert load(tmp_path, KALE_DIST_CONFIG=str(other)).queue == "gpus"


def test_a_named_file_has_to_be_there(tmp_path, refusal):
    refusal(lambda: load(tmp_path, KALE_DIST_CONFIG=str(tmp_path / "gone.toml")))


@pytest.mark.parametrize(
    "content",
    [
        b'imgae = "x"',
        b'[kubernetes]\nimages = "x"',
        b'kubernetes = "x"',
        b'[pods]\nimage = "x"',
        b'on = "cluster"',
        b'a = "1"\nimage = x',
        b'image = "\xff"',
        b"image = 3",
        b'namespace = "Team A"',
        b'image = "Not An Image"',
        b'store = "bucket"',
        b"image_pull_secrets = [1]",
        b'image_pull_secrets = ["A B"]',
        b'registry = "https://r.example.com"',
        b'registry = "r.example.com/team:1"',
        b'registry_pull = "team"',
        'service_account = "Träger"'.encode(),
        b'context = "a\\nb"',
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(tmp_path, file, content, refusal):
    file.write_bytes(content)
    refusal(lambda: load(tmp_path))


@pytest.mark.parametrize("value", ["Team A", "a" * 64, "team_a", "-team", "ü"])
def test_a_wrong_variable_is_named(tmp_path, value, refusal):
    assert refusal(lambda: load(tmp_path, KALE_DIST_NAMESPACE=value)).argument == "KALE_DIST_NAMESPACE"


@pytest.mark.parametrize(
    "value",
    ["webdav://me:hunter2@host/a", "WEBDAV://me:hunter2@host/a", "file:///data", "pvc://a/../b", "results", "s3://"],
)
def test_a_configured_store_is_checked_as_the_argument_is(tmp_path, value, refusal):
    error = refusal(lambda: load(tmp_path, KALE_DIST_STORE=value))
    assert error.argument == "KALE_DIST_STORE"
    assert "hunter2" not in str(error)


def test_a_folder_in_the_place_of_the_file_is_named(tmp_path, file, refusal):
    file.mkdir()
    refusal(lambda: load(tmp_path))


def test_the_page_names_all_settings():
    page = (pathlib.Path(__file__).parents[2] / "docs" / "configuration.md").read_text()
    table = "".join(line.split("|")[1] for line in page.splitlines() if line.startswith("|"))
    assert {key for key in config.KEYS if f"`{key}`" not in table} == set()


def test_how_long_ended_jobs_stay_is_configured_for_all_calls(tmp_path, file):
    file.write_text("[kubernetes]\nttl_s = 3600\n")
    assert load(tmp_path).kubernetes.ttl_s == 3600
    assert load(tmp_path, KALE_DIST_KUBERNETES='{"ttl_s": null}').kubernetes.ttl_s is None
    assert kd.Kubernetes().ttl_s == 604_800

import base64
import json
import pathlib

import pytest
from registries import PASSWORD, USER

from kale_dist.errors import ImageError
from kale_dist.image import auth
from kale_dist.image.auth import Credentials
from kale_dist.image.registry import Registry


def entry(username, password):
    return {"auth": base64.b64encode(f"{username}:{password}".encode()).decode()}


def secret(auths):
    return json.dumps({"auths": auths})


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A user who has logged in nowhere."""
    for name in ("DOCKER_CONFIG", "REGISTRY_AUTH_FILE", "XDG_RUNTIME_DIR", "XDG_CONFIG_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def write(path, config):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(config if isinstance(config, str) else json.dumps(config))


@pytest.fixture
def helper(tmp_path, monkeypatch):
    """A function that installs a credential helper: a program that notes what it is asked, and answers."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")

    def install(name, answer, code=0):
        program = folder / f"docker-credential-{name}"
        text = answer if isinstance(answer, str) else json.dumps(answer)
        (folder / f"{name}.answer").write_text(text)
        program.write_text(
            f"#!/bin/sh\n(echo $1; cat; echo) >> {folder}/{name}.asked\ncat {folder}/{name}.answer\nexit {code}\n"
        )
        program.chmod(0o755)
        return folder / f"{name}.asked"

    return install


def test_who_has_logged_in_nowhere_has_none(home):
    assert auth.find_credentials("quay.io") is None
    assert auth.find_credentials("quay.io", pull_secret_jsons=("", "{}", '{"auths": {}}')) is None


def test_what_docker_login_wrote_opens_the_registry(home, password_registry):
    write(home / ".docker" / "config.json", {"auths": {password_registry: entry(USER, PASSWORD)}})
    with Registry(password_registry, credentials=auth.find_credentials(password_registry)) as registry:
        assert registry.head("a", "1") == ""
    text = secret({password_registry: {"username": USER, "password": PASSWORD}})
    (home / ".docker" / "config.json").unlink()
    with Registry(
        password_registry, credentials=auth.find_credentials(password_registry, pull_secret_jsons=(text,))
    ) as registry:
        assert registry.head("a", "1") == ""


@pytest.mark.parametrize("key", ["https://index.docker.io/v1/", "index.docker.io", "docker.io", "registry-1.docker.io"])
def test_docker_hub_is_found_under_each_of_its_names(home, key):
    write(home / ".docker" / "config.json", {"auths": {key: entry("u", "p")}})
    assert auth.find_credentials("docker.io") == Credentials(username="u", password="p")


@pytest.mark.parametrize(
    ("written", "found"),
    [
        (entry("u", "p:with:colons"), Credentials(username="u", password="p:with:colons")),
        (entry("u", "pä\0\0"), Credentials(username="u", password="pä")),
        ({"username": "u", "password": "p"}, Credentials(username="u", password="p")),
        (entry("<token>", "") | {"identitytoken": "t"}, Credentials(token="t")),
        ({"registrytoken": "b"}, Credentials(bearer="b")),
        ({"username": "u"}, None),
        ({}, None),
        ("text", None),
        (None, None),
    ],
)
def test_every_kind_of_entry_is_read(home, written, found):
    write(home / ".docker" / "config.json", {"auths": {"https://quay.io/v2/": written}})
    assert auth.find_credentials("quay.io") == found


def test_secrets_are_not_shown():
    assert "hidden" not in repr(Credentials(username="u", password="hidden", token="hidden", bearer="hidden"))


def test_the_places_are_asked_in_order(home, monkeypatch):
    runtime = home / "run"
    text = secret({"quay.io": entry("pull", "p")})
    assert (
        auth.find_credentials("quay.io", pull_secret_jsons=(secret({"other.io": entry("x", "x")}), text)).username
        == "pull"
    )
    write(home / ".config" / "containers" / "auth.json", {"auths": {"quay.io": entry("podman-home", "p")}})
    assert auth.find_credentials("quay.io", pull_secret_jsons=(text,)).username == "podman-home"
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    write(runtime / "containers" / "auth.json", {"auths": {"quay.io": entry("podman", "p")}})
    assert auth.find_credentials("quay.io").username == "podman"
    monkeypatch.setenv("REGISTRY_AUTH_FILE", str(home / "named.json"))
    write(home / "named.json", {"auths": {"quay.io": entry("named", "p")}})
    assert auth.find_credentials("quay.io").username == "named"
    write(home / ".docker" / "config.json", {"auths": {"quay.io": entry("docker", "p")}})
    assert auth.find_credentials("quay.io").username == "docker"
    monkeypatch.setenv("DOCKER_CONFIG", str(home / "elsewhere"))
    write(home / "elsewhere" / "config.json", {"auths": {"quay.io": entry("variable", "p")}})
    assert auth.find_credentials("quay.io").username == "variable"


def test_an_entry_for_a_part_of_a_registry_is_for_that_part(home):
    auths = {"quay.io": entry("all", "p"), "quay.io/team": entry("team", "p"), "quay.io/team/one": entry("one", "p")}
    write(home / ".config" / "containers" / "auth.json", {"auths": auths})
    found = {
        name: auth.find_credentials("quay.io", repository=name).username
        for name in ("", "teams/x", "team/x", "team/one", "team/one/x")
    }
    assert found == {"": "all", "teams/x": "all", "team/x": "team", "team/one": "one", "team/one/x": "one"}


@pytest.mark.parametrize(
    ("pattern", "host", "fits"),
    [
        ("*.example.com", "registry.example.com", True),
        ("*.example.com", "a.b.example.com", False),
        ("*.example.com", "example.com", False),
        ("*", "quay.io", False),
        ("*.azurecr.io", "evil.azurecr.io.attacker.net", False),
        ("quay.io:5000", "quay.io", False),
    ],
)
def test_entries_may_be_for_a_pattern(home, pattern, host, fits):
    auths = {pattern: entry("u", "p")}
    assert (auth.find_credentials(host, pull_secret_jsons=(secret(auths),)) is not None) is fits
    write(home / ".docker" / "config.json", {"auths": auths})
    assert (auth.find_credentials(host) is not None) is fits


def test_a_pull_secret_of_the_old_kind_is_read(home):
    assert (
        auth.find_credentials("quay.io", pull_secret_jsons=(json.dumps({"quay.io": entry("u", "p")}),)).username == "u"
    )


def test_a_helper_is_asked_for_the_registry_it_is_named_for(home, helper):
    asked = helper("one", {"ServerURL": "quay.io", "Username": "u", "Secret": "p"})
    helper("all", {"Username": "<token>", "Secret": "t"})
    write(home / ".docker" / "config.json", {"credsStore": "all", "credHelpers": {"quay.io": "one"}})
    assert auth.find_credentials("quay.io") == Credentials(username="u", password="p")
    assert asked.read_text() == "get\nquay.io\n"
    assert auth.find_credentials("docker.io") == Credentials(token="t")
    assert (asked.parent / "all.asked").read_text() == "get\nhttps://index.docker.io/v1/\n"


def test_a_store_that_has_nothing_or_is_not_installed_does_not_stop_anonymous_use(home, helper):
    write(home / ".docker" / "config.json", {"credsStore": "desktop"})
    assert auth.find_credentials("quay.io") is None
    helper("desktop", "credentials not found in native keychain\n", code=1)
    assert auth.find_credentials("quay.io") is None
    write(home / ".docker" / "config.json", {"credsStore": "desktop", "auths": {"quay.io": {}}})
    assert auth.find_credentials("quay.io") is None


@pytest.mark.parametrize(
    ("config", "pattern"),
    [
        (
            {"credHelpers": {"quay.io": "absent"}},
            "docker-credential-absent, which .*config.json names for quay.io, is not installed",
        ),
        ({"credsStore": "absent", "auths": {"quay.io": {}}}, "is not installed"),
        ({"credHelpers": {"quay.io": "../../bin/evil"}}, "is not installed"),
        ({"credHelpers": {"quay.io": "locked"}}, "failed: the keychain is locked. Log in again"),
        ({"credHelpers": {"quay.io": "chatty"}}, "gave no JSON"),
        ({"auths": {"quay.io": {"auth": "%%%hidden"}}}, "entry for quay.io in .*config.json is damaged"),
        ("{hidden", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[]", "not an object"),
    ],
)
def test_what_cannot_be_used_is_named_without_its_secrets(home, helper, config, pattern):
    helper("locked", "the keychain is locked", code=1)
    helper("chatty", "hidden")
    write(home / ".docker" / "config.json", config)
    with pytest.raises(ImageError, match=pattern) as caught:
        auth.find_credentials("quay.io")
    assert "hidden" not in str(caught.value)


def test_a_pull_secret_does_not_start_programs_and_is_named_by_its_place_where_it_is_damaged(home, helper):
    asked = helper("evil", {"Username": "u", "Secret": "p"})
    text = json.dumps({"auths": {}, "credsStore": "evil", "credHelpers": {"quay.io": "evil"}})
    assert auth.find_credentials("quay.io", pull_secret_jsons=(text,)) is None
    assert not pathlib.Path(asked).exists()
    with pytest.raises(ImageError, match="pull secret 2 of 2 are not JSON"):
        auth.find_credentials("quay.io", pull_secret_jsons=("{}", "{"))

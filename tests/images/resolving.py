"""Recipes resolved in a part of a registry, for tests."""

import json
import os
import urllib.error
import urllib.request
import uuid

import bases

from kale_dist.image import manifest as manifests
from kale_dist.image.registry import Registry
from kale_dist.image.resolve import resolve
from kale_dist.job.spec.recipe import Recipe

DIGEST = r"sha256:[0-9a-f]{64}"
MODE = Recipe(environment={"MODE": "x"})


def use_own_folders(folder, monkeypatch):
    """Nothing that this user has kept or configured counts."""
    for name in ("cache", "state", "config"):
        monkeypatch.setenv(f"XDG_{name.upper()}_HOME", str(folder / name))
    monkeypatch.setenv("DOCKER_CONFIG", os.environ.get("DOCKER_CONFIG", str(folder / "docker")))


class Place:
    """A part of a registry with a base in it, and what was said while images were resolved for it."""

    def __init__(self, host):
        self.host, self.team = host, f"resolve-{uuid.uuid4().hex[:8]}"
        self.registry, self.repository = f"{host}/{self.team}", f"{self.team}/kale-dist"
        self.base = f"{self.registry}/base:1"
        self.said = []
        self.asked = []

    def ask(self, image):
        """Answer as a container of the base would."""
        self.asked.append(image)
        return bases.answer()

    def resolve(self, recipe, **options):
        self.said = []
        given = {"base": self.base, "registry": self.registry, "python": "3.11", "ask": self.ask} | options
        return resolve(recipe, log=self.said.append, **given)

    def tags(self):
        """What the registry lists; nothing while the repository is not there."""
        try:
            with urllib.request.urlopen(f"http://{self.host}/v2/{self.repository}/tags/list") as answer:
                return tuple(sorted(json.load(answer)["tags"] or ()))
        except urllib.error.HTTPError:
            return ()


def with_base(host):
    """A place with a base in it."""
    made = Place(host)
    with Registry(host) as registry:
        bases.push(registry, f"{made.team}/base", "1")
    return made


def raw_manifest(place, tag):
    """A manifest's bytes and media type."""
    request = urllib.request.Request(f"http://{place.host}/v2/{place.repository}/manifests/{tag}")
    request.add_header("Accept", ", ".join(manifests.MANIFESTS))
    with urllib.request.urlopen(request, timeout=10) as answer:
        return answer.read(), answer.headers["Content-Type"]

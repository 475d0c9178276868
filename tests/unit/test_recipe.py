"""What an image is made of: one value, one name."""

import copy
import dataclasses
import json
import pathlib
import pickle

import pytest

import kale_dist as kd
from kale_dist.job.spec.recipe import ImageFile, Recipe
from kale_dist.wire import decode, encode_json

BASE = "sha256:" + "a" * 64
FILE = ImageFile(path="/opt/x", digest="b" * 64)
FULL = Recipe(
    base="registry.example.com/base:1", platform="linux/arm64", packages=("einops==0.8", "torch>=2"), apt=("git",),
    files=(FILE,), environment=(("A", "é"),), index_urls=("https://x.example.com/simple",), allow_torch_change=True,
)  # fmt: skip

GOLDEN = [
    (Recipe(), "kd-7a30ab064d4a243efada"),
    (Recipe(packages=("einops==0.8",)), "kd-ea2a5036cf748cbe45c2"),
    (FULL, "kd-345af0cfd7d1bce54805"),
]
"""Tags that are out there: a change of them makes every image of every user anew, and has to be meant."""


@pytest.mark.parametrize(("recipe", "tag"), GOLDEN)
def test_tags_stay_what_they_are(recipe, tag):
    assert recipe.tag(BASE, "3.11") == tag
    assert recipe.digest(BASE, "3.11").startswith(tag.removeprefix("kd-"))


CHANGES = [
    {"packages": ("einops==0.9",)}, {"apt": ()}, {"files": ()}, {"environment": ()}, {"index_urls": ()},
    {"allow_torch_change": False}, {"platform": "linux/amd64"},
    {"files": (dataclasses.replace(FILE, executable=True),)}, {"files": (dataclasses.replace(FILE, digest="c" * 64),)},
]  # fmt: skip


def test_whatever_makes_another_image_makes_another_tag():
    recipes = [FULL, *(dataclasses.replace(FULL, **change) for change in CHANGES)]
    tags = [recipe.tag(BASE, "3.11") for recipe in recipes]
    tags += [FULL.tag("sha256:" + "0" * 64, "3.11"), FULL.tag(BASE, "3.12")]
    assert len(set(tags)) == len(tags)


@pytest.mark.parametrize(
    "change",
    [
        {"rebuild": True}, {"base": "another/name:2"},
        {"files": (dataclasses.replace(FILE, source="/home/me/x"),)},
    ],
)  # fmt: skip
def test_what_makes_no_other_image_makes_no_other_tag(change):
    assert dataclasses.replace(FULL, **change).tag(BASE, "3.11") == FULL.tag(BASE, "3.11")


def test_it_is_written_as_one_thinks_of_it():
    recipe = kd.Recipe(
        packages=["einops"],
        files={"/opt/x.txt": pathlib.Path("x.txt")},
        environment={"A": "1"},
        index_urls=iter(["https://x.example.com/simple"]),
    )
    assert recipe.packages == ("einops",)
    assert recipe.files == (ImageFile(path="/opt/x.txt", source="x.txt"),)
    assert recipe.environment == (("A", "1"),)
    assert recipe.index_urls == ("https://x.example.com/simple",)


@pytest.mark.parametrize("recipe", [Recipe(), FULL])
def test_it_survives_copies_pickle_and_json(recipe):
    assert decode(Recipe, json.loads(encode_json(recipe))) == recipe
    assert pickle.loads(pickle.dumps(recipe)) == recipe
    assert copy.deepcopy(recipe) == recipe
    assert len({recipe, dataclasses.replace(recipe)}) == 1


@pytest.mark.parametrize(
    ("arguments", "argument"),
    [
        ({"packages": "einops"}, "packages"),
        ({"packages": [3]}, "packages"),
        ({"packages": {"einops": "0.8"}}, "packages"),
        ({"apt": None}, "apt"),
        ({"index_urls": b"x"}, "index_urls"),
        ({"files": "x.txt"}, "files"),
        ({"files": {"/opt/x.txt": b"bytes"}}, "files"),
        ({"files": 3}, "files"),
        ({"environment": "A=1"}, "environment"),
        ({"environment": {"A": 1}}, "environment"),
        ({"environment": [("A", "1", "2")]}, "environment"),
        ({"base": None}, "base"),
        ({"rebuild": "no"}, "rebuild"),
        ({"allow_torch_change": 1}, "allow_torch_change"),
    ],
)  # fmt: skip
def test_what_is_of_another_type_is_named(arguments, argument, refusal):
    error = refusal(lambda: Recipe(**arguments))
    assert error.argument == argument


def test_it_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        FULL.base = "x"

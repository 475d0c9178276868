import pytest

from kale_dist.errors import ConfigError
from kale_dist.image.reference import Reference

DIGEST = f"sha256:{'a1' * 32}"


@pytest.mark.parametrize(
    ("text", "registry", "repository", "tag", "digest"),
    [
        ("python", "docker.io", "library/python", "", ""),
        ("python:3.11-slim", "docker.io", "library/python", "3.11-slim", ""),
        ("index.docker.io/python", "docker.io", "library/python", "", ""),
        ("docker.io/pytorch/pytorch:2", "docker.io", "pytorch/pytorch", "2", ""),
        ("team/train", "docker.io", "team/train", "", ""),
        ("localhost/train", "localhost", "train", "", ""),
        ("localhost:5000/team/train:1", "localhost:5000", "team/train", "1", ""),
        ("127.0.0.1:5000/train", "127.0.0.1:5000", "train", "", ""),
        ("[::1]:5000/train:1", "[::1]:5000", "train", "1", ""),
        ("[fd00::5]/a/b", "[fd00::5]", "a/b", "", ""),
        (f"quay.io/a/b/c@{DIGEST}", "quay.io", "a/b/c", "", DIGEST),
        (f"quay.io/a:1@{DIGEST}", "quay.io", "a", "1", DIGEST),
        (f"docker-pullable://ghcr.io/a/b@{DIGEST}", "ghcr.io", "a/b", "", DIGEST),
        ("a/b__c/d--e.f:_x", "docker.io", "a/b__c/d--e.f", "_x", ""),
    ],
)
def test_a_reference_is_read_as_docker_reads_it(text, registry, repository, tag, digest):
    found = Reference.parse(text)
    assert (found.registry, found.repository, found.tag, found.digest) == (registry, repository, tag, digest)
    assert Reference.parse(str(found)) == found


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "it is empty"),
        ("Team/train", "has upper-case letters"),
        ("quay.io/Team/train", "has upper-case letters"),
        ("a" * 300, "more than 255"),
        (f"{'a' * 100_000}!", "more than 255"),
        ("bild/größe", "not the path"),
        ("ａ/b", "not the path"),  # noqa: RUF001 - a letter that only looks like one
        ("team/../etc", "not the path"),
        ("../etc/passwd", "not the host"),
        ("team//train", "not the path"),
        ("/train", "not the path"),
        ("team/train/", "not the path"),
        ("team/train\n", "not the path"),
        (" python", "not the path"),
        ("a b", "not the path"),
        ("team/-train", "not the path"),
        ("a..b/train", "not the host"),
        ("localhost:99999/train", "not the host"),
        ("localhost:0/train", "not the host"),
        ("[::1/train", "not the host"),
        ("https://quay.io/a", "is a URL"),
        ("python:", "ends where a tag should follow"),
        ("python@", "ends where a digest should follow"),
        ("python:3.11:2", "not a tag"),
        ("python:" + "x" * 129, "not a tag"),
        ("python:1?x=2", "not a tag"),
        ("python@sha256:123", "not a digest"),
        (f"python@{DIGEST.upper()}", "not a digest"),
        (f"python@{DIGEST}@{DIGEST}", "not a digest"),
        (f"python@md5:{'0' * 32}", "not a digest"),
        (None, "a NoneType is not a reference"),
        (b"python", "a bytes is not a reference"),
    ],
)
def test_what_is_no_reference_is_refused_with_the_part_that_is_wrong(text, problem):
    with pytest.raises(ConfigError, match=problem) as caught:
        Reference.parse(text)
    assert len(str(caught.value)) < 400
    assert caught.value.argument == "image"


def test_what_the_registry_is_asked_for_and_what_a_job_pins():
    plain = Reference.parse("localhost:5000/train")
    assert (plain.target, plain.name) == ("latest", "localhost:5000/train")
    tagged = plain.with_tag("1")
    assert (str(tagged), tagged.target) == ("localhost:5000/train:1", "1")
    pinned = tagged.with_digest(DIGEST)
    assert (str(pinned), pinned.target) == (f"localhost:5000/train@{DIGEST}", DIGEST)
    with pytest.raises(ConfigError, match="not a digest"):
        plain.with_digest("latest")
    with pytest.raises(ConfigError, match="not a tag"):
        plain.with_tag("a/b")

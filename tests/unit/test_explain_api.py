"""Sentences for what API servers answer, by the words they use."""

import json
import pathlib

import pytest

kubernetes = pytest.importorskip("kubernetes")

from kubernetes.client import ApiException  # noqa: E402

from kale_dist.errors import BackendError, BackendUnavailableError, JobExistsError, JobNotFoundError  # noqa: E402
from kale_dist.places.kubernetes import roles  # noqa: E402
from kale_dist.places.kubernetes.explain import api  # noqa: E402
from kale_dist.places.kubernetes.explain.api import Doing  # noqa: E402
from kale_dist.places.manifests import KINDS  # noqa: E402

JOB = Doing(verb="create", resource="pytorchjobs", namespace="team", name="train")


def refusal(code, message, reason="", causes=(), headers=None):
    error = ApiException(status=code, reason="as HTTP has it")
    details = {"causes": [{"field": field, "message": text} for field, text in causes]}
    error.body = json.dumps({"kind": "Status", "message": message, "reason": reason, "code": code, "details": details})
    error.headers = headers or {}
    return error


@pytest.mark.parametrize(
    ("error", "kind", "retryable"),
    [
        (refusal(401, "Unauthorized", "Unauthorized"), BackendUnavailableError, False),
        (refusal(403, 'pods "x" is forbidden: exceeded quota: q, requested: count/pytorchjobs.kubeflow.org=1, used: '
                 'count/pytorchjobs.kubeflow.org=2, limited: count/pytorchjobs.kubeflow.org=2', "Forbidden"), BackendError, True),
        (refusal(403, 'pods "x" is forbidden: failed quota: q: must specify limits.cpu for: pytorch', "Forbidden"), BackendError, False),
        (refusal(403, 'pods "x" is forbidden: violates PodSecurity "restricted:latest": hostPath volumes (volume "v")'), BackendError, False),
        (refusal(403, "unable to create new content in namespace team because it is being terminated", "Forbidden"), BackendError, False),
        (refusal(403, 'pytorchjobs.kubeflow.org is forbidden: User "ada" cannot create resource "pytorchjobs" in API '
                 'group "kubeflow.org" in the namespace "team"', "Forbidden"), BackendError, False),
        (refusal(403, 'x is forbidden: User "system:anonymous" cannot create resource "x"', "Forbidden"), BackendUnavailableError, False),
        (refusal(400, 'admission webhook "w.example.com" denied the request: owner label is missing'), BackendError, True),
        (refusal(500, 'Internal error occurred: failed calling webhook "w.example.com": Post "https://w": no endpoints',
                 "InternalError"), BackendError, True),
        (refusal(422, "ValidatingAdmissionPolicy 'p' with binding 'b' denied request: no team label", "Invalid"), BackendError, True),
        (refusal(404, "404 page not found"), BackendUnavailableError, False),
        (refusal(404, 'namespaces "team" not found', "NotFound"), BackendError, False),
        (refusal(404, 'pytorchjobs.kubeflow.org "train" not found', "NotFound"), JobNotFoundError, False),
        (refusal(409, 'pytorchjobs.kubeflow.org "train" already exists', "AlreadyExists"), JobExistsError, False),
        (refusal(409, "the object has been modified", "Conflict"), BackendError, True),
        (refusal(413, "Request entity too large: limit is 3145728"), BackendError, False),
        (refusal(500, "etcdserver: request is too large"), BackendError, False),
        (refusal(422, "it is invalid", "Invalid", causes=[("spec.x", "must be 1")]), BackendError, False),
        (refusal(429, "slow down", "TooManyRequests", headers={"Retry-After": "7"}), BackendError, True),
        (refusal(503, "the server is currently unable"), BackendError, True),
        (refusal(418, "teapot"), BackendError, False),
    ],
)  # fmt: skip
def test_each_answer_has_a_sentence_and_a_remedy(error, kind, retryable, kept_words):
    found = api.explain(error, JOB)
    assert type(found) is kind
    assert found.retryable is retryable
    kept_words(str(found))


@pytest.mark.parametrize(
    "body", [b"<html>502 Bad Gateway</html>", b"", b"\xff\xfe", b"[1]", b'{"kind":"Status"}', b"null"]
)
def test_a_body_that_is_no_status_is_borne(body):
    error = ApiException(status=502, reason="Bad Gateway")
    error.body = body
    assert api.explain(error, JOB).retryable


def test_long_answers_are_cut():
    assert len(str(api.explain(refusal(500, "x" * 100_000), JOB))) < 1000


def test_what_was_explained_stays_so():
    error = BackendError("said")
    assert api.explain(error, JOB) is error


@pytest.mark.parametrize(
    ("identity", "subject"),
    [
        ("ada", '- {apiGroup: rbac.authorization.k8s.io, kind: User, name: "ada"}'),
        ('a"b\\c', '- {apiGroup: rbac.authorization.k8s.io, kind: User, name: "a\\"b\\\\c"}'),
        ("system:serviceaccount:team:bot", '- {kind: ServiceAccount, name: "bot", namespace: "team"}'),
        ("oidc:x#y: z", 'name: "oidc:x#y: z"'),
    ],
)
def test_the_role_is_bound_to_whoever_asked(identity, subject):
    yaml = pytest.importorskip("yaml")
    text = roles.role_yaml("team", identity, roles.rights(KINDS["pytorch"]))
    assert subject in text
    role, binding = yaml.safe_load_all(text)
    assert role["kind"] == "Role"
    assert role["metadata"]["namespace"] == binding["metadata"]["namespace"] == "team"
    assert {"apiGroups": [""], "resources": ["pods/log"], "verbs": ["get"]} in role["rules"]
    assert binding["subjects"][0]["name"] in identity


def test_the_page_has_the_role_and_what_is_lost():
    page = (pathlib.Path(__file__).parents[2] / "docs" / "rbac.md").read_text()
    rights = roles.rights(KINDS["pytorch"])
    assert roles.role_yaml("team-a", "system:serviceaccount:team-a:notebook", rights) in page
    table = page.partition("## What each permission is for")[2]
    assert {right.resource for right in rights if f"`{right.resource}`" not in table} == set()

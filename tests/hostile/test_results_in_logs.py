"""Whoever may read the logs of a namespace (the built-in role view) finds results there only where the plan says so."""

from __future__ import annotations

import dataclasses

import pytest

import kale_dist as kd
from kale_dist.places.kubernetes import roles, submit
from kale_dist.places.manifests import KINDS
from kale_dist.wire import Source


def nothing():
    pass


@pytest.mark.parametrize("prints", [False, True])
def test_results_are_printed_only_where_the_plan_says_who_reads_them(prints, monkeypatch, tmp_path):
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    plan = kd.render(nothing, number_of_processes=1, on=kd.Kubernetes(image="registry/team/torch:1"))
    spec = dataclasses.replace(plan.spec, prints_results=prints)
    assert submit.order(spec, Source.INPUT).outcomes_on_stdout is prints
    rendered = submit.render(spec)
    assert "the built-in role view may" in rendered
    assert ("if no notebook is connected at the job's end" in rendered) is not prints


def test_with_a_store_no_result_is_printed(monkeypatch, tmp_path):
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    on = kd.Kubernetes(image="registry/team/torch:1", store="pvc://results")
    spec = kd.render(nothing, number_of_processes=1, on=on).spec
    assert not submit.order(spec, Source.INPUT).ends_unfollowed
    assert "the built-in role view may" not in submit.render(spec)


def test_the_rights_that_keep_results_out_of_the_log_are_asked_for():
    (right,) = [right for right in roles.rights(KINDS["pytorch"]) if right.resource == "pods/portforward"]
    assert {f"{verb} {right.resource}" for verb in right.verbs} == roles.CONNECT
    assert "the built-in role view" in right.without

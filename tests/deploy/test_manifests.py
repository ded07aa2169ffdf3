"""Manifests under deploy/ are as the published schemas want them; what is not, is seen."""

import copy
from pathlib import Path

import pytest
from crd import custom_problems, documents, is_custom, own_problems

DEPLOY = Path(__file__).parents[2] / "deploy"
MANIFESTS = sorted(
    path for path in DEPLOY.glob("*.yaml") if "kind:" in path.read_text(encoding="utf-8")
)
CUSTOM = [each for path in MANIFESTS for each in documents(path) if is_custom(each)]


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_kubernetes_own_kinds_keep_to_their_schemas(path, tmp_path):
    assert own_problems(documents(path), tmp_path) == ""


@pytest.mark.parametrize("document", CUSTOM, ids=lambda document: document["kind"])
def test_custom_resources_keep_to_theirs(document):
    assert custom_problems(document) == []
    for wrong in ({"replica": 2}, {"selector": None}):
        broken = copy.deepcopy(document)
        broken["spec"] |= wrong
        assert custom_problems(broken), wrong


def test_a_field_that_kubernetes_does_not_know_is_seen(tmp_path):
    broken = documents(DEPLOY / "llm-d.yaml")
    broken[1]["spec"]["template"]["spec"]["containers"][0]["readynessProbe"] = {}
    assert "readynessProbe" in own_problems(broken, tmp_path)

"""Manifests under deploy/ are as the published schemas want them; what is not, is seen."""

import copy
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from crd import custom_problems, documents, is_custom, own_problems

DEPLOY = Path(__file__).parents[2] / "deploy"
KUBERNETES = DEPLOY / "kubernetes"
FILES = [*DEPLOY.glob("*.yaml"), *KUBERNETES.rglob("*.yaml")]
KUSTOMIZATIONS = sorted(path for path in FILES if path.name == "kustomization.yaml")
MANIFESTS = sorted(
    path for path in set(FILES) - set(KUSTOMIZATIONS) if "kind:" in path.read_text(encoding="utf-8")
)
KUBECTL = shutil.which("kubectl")
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


def test_kustomizations_name_files_that_there_are_and_leave_none_out():
    named = set()
    for path in KUSTOMIZATIONS:
        text = yaml.safe_load(path.read_text())
        for name in (*text["resources"], *text.get("components", ())):
            found = (path.parent / name).resolve()
            assert found.exists(), f"{path}: {name}"
            named.add(found)
    example = KUBERNETES / "example"
    folders = {path.parent for path in KUSTOMIZATIONS} - {example}
    manifests = {path for path in MANIFESTS if KUBERNETES in path.parents}
    assert named == {path.resolve() for path in folders | manifests}


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> list[dict]:
    """What `kubectl apply -k` would send for the example: base, both components, its patches."""
    if KUBECTL is None:
        pytest.skip("needs kubectl, which has kustomize")
    command = [KUBECTL, "kustomize", str(KUBERNETES / "example")]
    run = subprocess.run(command, check=True, capture_output=True, text=True)
    path = tmp_path_factory.mktemp("built") / "all.yaml"
    path.write_text(run.stdout)
    return documents(path)


def test_the_example_is_what_the_schemas_want(built, tmp_path):
    kinds = ["Deployment", "PodDisruptionBudget", "PodMonitor", "ScaledObject", "Service"]
    assert sorted(document["kind"] for document in built) == kinds
    assert own_problems(built, tmp_path) == ""
    for document in built:
        assert document["metadata"]["namespace"] == "inference"
        assert not is_custom(document) or custom_problems(document) == []


def test_the_example_changes_what_it_says(built):
    (deployment,) = (each for each in built if each["kind"] == "Deployment")
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    assert container["image"] == "registry.example/shiftjax:0.1.0"
    assert container["resources"] == {"limits": {"nvidia.com/gpu": 8}}
    assert container["args"][0] == "serve" and container["args"][-1] == "--quantization=fp8"
    assert {"startupProbe", "readinessProbe", "livenessProbe"} <= container.keys()
    assert "replicas" not in deployment["spec"]  # which would undo what KEDA has set

"""Manifests against published schemas, as strictly as `kubectl apply --validate=strict`.

Kubernetes' own kinds go through the package kubernetes-validate, which has their schemas, in an
environment of its own (`make .venv/.routers`). Custom resources go through `schemas/KIND.yaml`
here, written down from the CRD that each names; a property with `x-pod-template: true` there holds
a pod template, which is checked as one. A field that a schema does not name is a fault everywhere.
"""

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
import yaml

HERE = Path(__file__).parent
VALIDATE = HERE.parents[1] / ".venv/routers/bin/kubernetes-validate"


def documents(path: Path) -> list[dict[str, Any]]:
    """The documents of a manifest."""
    return [each for each in yaml.safe_load_all(path.read_text()) if each is not None]


def is_custom(document: dict[str, Any]) -> bool:
    """Whether its schema is here; any other is taken for one of Kubernetes' own."""
    return _schema(document["kind"]) is not None


def custom_problems(document: dict[str, Any]) -> list[str]:
    """What is wrong with a custom resource, but for its pod templates."""
    validator = jsonschema_rs.validator_for(_closed(_schema(document["kind"])))
    return [f"{error.instance_path}: {error.message}" for error in validator.iter_errors(document)]


def own_problems(documents: list[dict[str, Any]], tmp_path: Path) -> str:
    """What is wrong with Kubernetes' own kinds, and the pod templates of the others; "": nothing.

    Skips the test where the schemas are not installed.
    """
    if not VALIDATE.exists():
        pytest.skip("needs kubernetes-validate: make .venv/.routers")
    own = [part for document in documents for part in _own_parts(document)]
    (tmp_path / "own.yaml").write_text(yaml.safe_dump_all(own))
    command = [str(VALIDATE), "--strict", "--quiet", "--no-warn", str(tmp_path / "own.yaml")]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    return run.stdout + run.stderr if run.returncode else ""


def _schema(kind: str) -> dict[str, Any] | None:
    path = HERE / f"schemas/{kind.lower()}.yaml"
    return yaml.safe_load(path.read_text()) if path.exists() else None


def _closed(schema: Any) -> Any:
    """With no room for fields that it does not name."""
    if isinstance(schema, list):
        return [_closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {name: _closed(value) for name, value in schema.items()}
    if isinstance(schema.get("properties"), dict):
        closed.setdefault("additionalProperties", False)
    return closed


def _own_parts(document: dict[str, Any]) -> list[dict[str, Any]]:
    schema = _schema(document["kind"])
    return [document] if schema is None else list(_pod_templates(schema, document))


def _pod_templates(schema: dict[str, Any], value: Any) -> Iterator[dict[str, Any]]:
    if schema.get("x-pod-template"):
        template = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "of-it"}}
        yield template | {"template": value}
    elif isinstance(value, dict):
        for name, inner in schema.get("properties", {}).items():
            if name in value:
                yield from _pod_templates(inner, value[name])

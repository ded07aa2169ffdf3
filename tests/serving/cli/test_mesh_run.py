"""`shiftjax mesh run` on virtual devices: tokens and bytes agree; a file that errs is refused."""

import json

import pytest

from serving.cli.main import main
from serving.cli.mesh_run import rows_agree


def test_rows_agree_only_if_tokens_and_bytes_do():
    row = {"same_tokens": True, "bytes": 5, "predicted_bytes": 5}
    assert rows_agree([row])
    assert not rows_agree([row, row | {"bytes": 6}])
    assert not rows_agree([row, row | {"same_tokens": False}])


def test_meshes_are_measured_and_agree(capsys, tmp_path):
    path = tmp_path / "experiments.yaml"
    path.write_text(
        "title: t\nmeasured: {model: 'random:tiny', meshes: [[2, 1], [1, 2]], tokens: 4}\n"
    )
    assert main(["mesh", "run", str(path), "--out", str(tmp_path / "out")]) == 0
    lines = (tmp_path / "out" / "measured.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    assert [(row["sp"], row["mode"]) for row in rows] == [(2, "base"), (2, "shift"), (1, "shift")]
    assert rows_agree(rows)
    assert "<table>" in (tmp_path / "out" / "report.html").read_text()


@pytest.mark.parametrize(
    ("text", "fragment"),
    [
        ("- 1", "must map title, measured, modelled"),
        ("titel: x", "unknown option 'titel'; did you mean title?"),
        ("measured: {mesh: 1}", "did you mean meshes?"),
        ("modelled: [{machine: h200x8, model: tiny, trace: {kind: x}}]", "kind of trace"),
        ("modelled: [{machine: h200x8, model: tiny, trace: {kind: poisson}}]", "trace:"),
        ("a: [", "cannot be read"),
        ("measured: {meshes: [[4]]}", "meshes must be a list of [SP, TP], got [[4]]"),
        ("measured: {tokens: 0}", "tokens must be 1 to 64, got 0"),
        ("modelled: [{machine: h200x8}]", "model is missing"),
        ("modelled: [{machine: h200x8, model: tiny, trace: {}, rates: [-1]}]", "above 0, got [-1]"),
        ("modelled: [{machine: h200x8, model: tiny, trace: {}, compare: dp}]", "must be a list"),
        ("modelled: [{machine: h200x8, model: tiny, trace: {}, max_num_seqs: 0}]", "at least 1"),
        ("modelled: [{machine: h200x8, model: tiny, trace: {}}]", "must map file or kind"),
        ("modelled: [{machine: h200x8, model: tiny, trace: 5}]", "must map file or kind"),
        ("modelled: 5", "modelled must be a list, got 5"),
    ],
)
def test_a_wrong_file_is_refused(capsys, tmp_path, text, fragment):
    path = tmp_path / "experiments.yaml"
    path.write_text(text)
    assert main(["mesh", "run", str(path), "--out", str(tmp_path)]) == 2
    assert fragment in capsys.readouterr().err

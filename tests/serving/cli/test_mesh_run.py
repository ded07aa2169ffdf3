"""`shiftjax mesh run` on virtual devices: tokens and bytes agree; a file that errs is refused."""

import json
from pathlib import Path

import pytest

from serving.bench.deployments import agree
from serving.cli.main import main

SMALL = "model: 'random:tiny', max_model_len: 64, max_num_seqs: 4, max_num_batched_tokens: 32"
SMALL += ", token_buckets: [32], num_blocks: 64, cache_dir: none"


def rows_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_rows_agree_only_if_tokens_and_bytes_do():
    row = {"same_tokens": True, "same_bytes": True, "failed": 0}
    assert agree([row])
    for wrong in ({"same_bytes": False}, {"same_tokens": False}, {"failed": 1}):
        assert not agree([row, row | wrong])


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> Path:
    """Deployments of several kinds, which take few devices, so that they compile soon."""
    out = tmp_path_factory.mktemp("mesh")
    own = "stages: {pp: 2, sp: 1, tp: 1}, codes: {sp: 2, tp: 1, quantization: fp8}"
    own += ", fleet: {fleet: true, tp: 1, devices: 2}"
    path = out / "experiments.yaml"
    path.write_text(f"title: t\nmeasured: {{{SMALL}, tokens: 6, deployments: {{{own}}}}}\n")
    assert main(["mesh", "run", str(path), "--out", str(out)]) == 0
    return out


@pytest.mark.thorough
def test_deployments_agree_in_tokens_with_those_of_their_formats(results):
    rows = {row["name"]: row for row in rows_of(results / "measured.jsonl")}
    references = {name: row["tokens_as"] for name, row in rows.items()}
    assert references == {"stages": "stages", "codes": "codes", "fleet": "stages"}
    assert rows["fleet"]["mesh"].startswith("fleet of 2 units")
    for row in rows.values():
        assert row["same_tokens"] and row["tokens_per_second"] > 0
        assert row["predicted_tokens_per_second"] > 0 and row["not_predicted"] == ""
        assert 0 < row["predicted_ttft_p50_seconds"] < row["predicted_completion_p50_seconds"]


@pytest.mark.thorough
def test_compiled_steps_move_what_was_predicted(results):
    rows = rows_of(results / "programs.jsonl")
    assert all(row["bytes"] == row["predicted_bytes"] for row in rows)
    steps = {(row["name"], row["sp"], row["tp"], row["layers"], row["mode"]) for row in rows}
    assert {("fleet", 2, 1, "0-1", mode) for mode in ("base", "shift")} <= steps
    assert {("stages", 1, 1, layers, "shift") for layers in ("0-0", "1-1")} <= steps
    assert all(row["bytes"] > 0 for row in rows if row["sp"] * row["tp"] > 1)


@pytest.mark.thorough
def test_measured_and_predicted_are_drawn_side_by_side(results):
    page = (results / "report.html").read_text()
    assert page.count("<table>") == 2 and "<h2>measured and predicted" in page
    assert (results / "measured-and-predicted.svg").read_text().count("predicted") > 0
    assert "is in no step, and is not compared" in page


def test_a_trace_comes_when_it_says_and_what_cannot_be_served_fails(tmp_path):
    trace = tmp_path / "trace.jsonl"
    lengths = [(0.0, 10), (0.3, 10), (0.3, 1000)]  # the last is longer than any may be
    lines = [{"arrival_seconds": at, "prompt_tokens": n, "output_tokens": 2} for at, n in lengths]
    trace.write_text("\n".join(map(json.dumps, lines)))
    path = tmp_path / "experiments.yaml"
    path.write_text(
        f"measured: {{{SMALL}, trace: {{file: '{trace}'}}, deployments: {{a: {{sp: 1, tp: 1}}}}}}"
    )
    assert main(["mesh", "run", str(path), "--out", str(tmp_path)]) == 1
    (row,) = rows_of(tmp_path / "measured.jsonl")
    assert row["failed"] == 1 and row["same_tokens"] and row["same_bytes"]
    assert row["tokens_per_second"] < 24 / 0.3 < row["predicted_tokens_per_second"] * 1.2


@pytest.mark.parametrize(
    ("text", "fragment"),
    [
        ("- 1", "must map title, measured, modelled"),
        ("titel: x", "unknown option 'titel'; did you mean title?"),
        ("measured: {tokns: 1}", "did you mean tokens?"),
        ("measured: {meshes: [[4, 2]]}", "unknown option 'meshes'"),
        ("measured: {deployments: {a: {ps: 1}}}", "measured: a: unknown option 'ps'"),
        ("measured: {deployments: {a: {sp: 0}}}", "measured: a: sp: must be at least 1"),
        ("measured: {deployments: {a: 4}}", "must map names to settings of LLM"),
        ("measured: {prompts: [[-1]]}", "must be a list of texts or token ids"),
        ("measured: {prompts: [[256]]}", "token 256 is none of the 256 of tiny"),
        ("measured: {prompts: [Hello]}", "has no tokenizer: give token ids"),
        ("measured: {trace: {kind: x}, tokens: 4}", "tokens: a trace says it: drop one"),
        ("modelled: [{machine: h200x8, model: tiny, trace: {kind: x}}]", "kind of trace"),
        ("modelled: [{machine: h200x8, model: tiny, trace: {kind: poisson}}]", "trace:"),
        ("a: [", "cannot be read"),
        ("measured: {tokens: 0}", "tokens must be a whole number of at least 1, got 0"),
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

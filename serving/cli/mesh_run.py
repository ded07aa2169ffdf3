"""`shiftjax mesh run`: a file of experiments, measured on devices here and modelled elsewhere.

    title: Llama-70B under bursts
    measured:                       # on the devices of this machine; on CPU virtual ones
      model: random:tiny
      meshes: [[4, 2], [2, 4]]      # SP, TP
      tokens: 16                    # greedy tokens of each of the prompts
      dtype: float32
    modelled:
      - {machine: h200x8, model: llama-70b, dtype: fp8, engine: vllm,
         compare: [dp, tp, shift], rates: [0.5, 1],
         trace: {kind: poisson, rate: 4, seconds: 60, prompt_tokens: 4096, output_tokens: 250}}

Measured: the same prompts through every mesh and mode must give the same tokens; collective bytes
and memory come from the compiled programs, beside what the cost model says they are; times of a
decode and a prefill step beside the predicted ones. Everything lands in one folder: JSONL, CSV
and report.html.
"""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from serving.bench.compiled import collective_bytes
from serving.bench.steps import (
    Case,
    build_for_all_modes,
    device_kind,
    generate,
    measure,
    plan_of,
)
from shiftjax.config import EngineConfig
from shiftjax.control.engine import Engine
from shiftjax.control.policy import FixedPolicy, work_of
from shiftjax.costs.collectives import step_collectives
from shiftjax.costs.machine_files import load_engine, load_machine, machine_of
from shiftjax.options import ConfigError, shown, unknown_name
from shiftjax.parallel.grid import Mode
from shiftjax.settings import make_virtual_devices
from shiftjax.sim.experiments import (
    as_text,
    choose_deployments,
    sweep,
    target_from,
    trace_from,
    write_rows,
)
from shiftjax.sim.report import Report

if TYPE_CHECKING:
    from shiftjax.build import Built

MAX_LENGTH = 128
PROMPTS = ([5, 6, 7, 8] * 6, [9] * 17, [11, 12, 13] * 11, [4])
MEASURED = {"model": "random:tiny", "meshes": [[4, 2]], "tokens": 16, "dtype": "float32"}
BUDGETS = ("max_num_seqs", "max_num_batched_tokens", "block_size")
NEEDED = ("machine", "model", "trace")
MODELLED = (*NEEDED, "dtype", "kv_cache_dtype", "engine", "compare", "rates", *BUDGETS)


def run_file(arguments: argparse.Namespace, config: EngineConfig, sampling: SamplingParams) -> int:
    """Run all experiments of a file; exit code 1 if tokens or bytes disagree somewhere."""
    path, out = arguments.file, arguments.out
    options = _read(path)
    report, agree = Report(str(options.get("title", path.stem))), True
    if "measured" in options:
        rows, agree = _measured(_checked(options["measured"], MEASURED, "measured"))
        print(as_text(rows))
        write_rows(out, "measured", rows)
        report.table("measured on this machine", rows)
    modelled = options.get("modelled", [])
    if not isinstance(modelled, list):
        raise ConfigError([f"{path}: modelled must be a list, got {shown(modelled)}"])
    for number, experiment in enumerate(modelled, 1):
        _modelled(
            _checked_model(experiment, f"modelled {number}"), f"modelled-{number}", out, report
        )
    out.mkdir(parents=True, exist_ok=True)
    report.save(out / "report.html")
    print(f"wrote {out / 'report.html'}")
    return 0 if agree else 1


def _read(path: Path) -> dict[str, Any]:
    try:
        options = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError([f"{path}: cannot be read: {error}"]) from None
    known = ("title", "measured", "modelled")
    if not isinstance(options, dict) or not options:
        raise ConfigError([f"{path}: must map {', '.join(known)}"])
    return _checked(options, dict.fromkeys(known), str(path))


def _checked(options: Any, known: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The options over their defaults; unknown ones are refused."""
    if not isinstance(options, dict):
        raise ConfigError([f"{where}: must map names to values"])
    wrong = [f"{where}: {unknown_name(str(n), known)}" for n in options if n not in known]
    if wrong:
        raise ConfigError(wrong)
    return {n: v for n, v in known.items() if v is not None} | options


def _checked_model(experiment: Any, where: str) -> dict[str, Any]:
    """A modelled experiment with its defaults. Raises ConfigError with everything wrong."""
    options = {"compare": ["dp", "tp", "shift"], "rates": [1.0]}
    options |= _checked(experiment, dict.fromkeys(MODELLED), where)
    wrong = [f"{where}: {name} is missing" for name in NEEDED if name not in options]
    for name in ("compare", "rates"):
        if not isinstance(options[name], list) or not options[name]:
            wrong.append(f"{where}: {name} must be a list, got {shown(options[name])}")
    if isinstance(options["rates"], list):
        bad = [rate for rate in options["rates"] if not _is_number(rate) or rate <= 0]
        wrong += [f"{where}: rates must be above 0, got {shown(rate)}" for rate in bad]
    bad = [n for n in BUDGETS if n in options and (type(options[n]) is not int or options[n] < 1)]
    wrong += [f"{where}: {name} must be a whole number of at least 1" for name in bad]
    if wrong:
        raise ConfigError(wrong)
    return options


def _checked_meshes(options: Mapping[str, Any]) -> list[tuple[int, int]]:
    meshes, tokens = options["meshes"], options["tokens"]
    wrong = []
    if not isinstance(meshes, list) or not meshes or not all(map(_is_mesh, meshes)):
        wrong.append(f"measured: meshes must be a list of [SP, TP], got {str(meshes)[:80]}")
    if type(tokens) is not int or not 1 <= tokens <= MAX_LENGTH // 2:
        wrong.append(f"measured: tokens must be 1 to {MAX_LENGTH // 2}, got {shown(tokens)}")
    if wrong:
        raise ConfigError(wrong)
    return [(sp, tp) for sp, tp in meshes]


def _is_mesh(mesh: Any) -> bool:
    sizes = mesh if isinstance(mesh, list) else []
    return len(sizes) == 2 and all(type(size) is int and size > 0 for size in sizes)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


# ------------------------------------------------------------------ modelled


def _modelled(experiment: Mapping[str, Any], name: str, out: Path, report: Report) -> None:
    target = target_from(experiment)
    budgets = {name: experiment[name] for name in BUDGETS if name in experiment}
    deployments = choose_deployments(target, experiment["compare"], **budgets)
    points = sweep(trace_from(experiment["trace"]), target, deployments, experiment["rates"])
    write_rows(out, name, [point.row() for point in points])
    heading = f"{target.model.name} on {target.machine.name}, {target.engine.name}"
    report.sweep(heading, points, ("ttft",))


# ------------------------------------------------------------------ measured


def _measured(options: Mapping[str, Any]) -> tuple[list[dict[str, Any]], bool]:
    """(a row per mesh and mode, whether all of them agree)."""
    meshes = _checked_meshes(options)
    make_virtual_devices(EngineConfig.from_options(devices=max(sp * tp for sp, tp in meshes)))
    rows: list[dict[str, Any]] = []
    first: list[list[int]] | None = None
    for sp, tp in meshes:
        built = _build(options, sp, tp)
        for mode in built.deployment.layout.modes:
            tokens = _generate(built.engine, mode, options["tokens"])
            first = first or tokens
            rows.append(_row(built, sp, tp, mode) | {"same_tokens": tokens == first})
    return rows, rows_agree(rows)


def rows_agree(rows: Sequence[Mapping[str, Any]]) -> bool:
    """Whether every mesh and mode gave the same tokens and moved the predicted bytes."""
    return all(row["same_tokens"] and row["bytes"] == row["predicted_bytes"] for row in rows)


def _build(options: Mapping[str, Any], sp: int, tp: int) -> "Built":
    sizes = {"max_model_len": MAX_LENGTH, "max_num_seqs": 8, "num_blocks": 2048}
    return build_for_all_modes(
        options["model"], (8, 64), dtype=options["dtype"], sp=sp, tp=tp, **sizes
    )


def _generate(engine: Engine, mode: Mode, num_tokens: int) -> list[list[int]]:
    """Greedy tokens of every prompt, all steps in one mode."""
    engine.policy = FixedPolicy(engine.lanes[0].modes.index(mode))
    tokens = generate(engine, PROMPTS, num_tokens)
    engine.flush_prefix_cache()
    return tokens


def _row(built: "Built", sp: int, tp: int, mode: Mode) -> dict[str, Any]:
    (runner,) = built.runners
    layout, program = runner.step.layout, runner.programs[-1]
    step = runner.compiled(program, mode)
    compiled = collective_bytes(step.as_text() or "")
    formats = built.deployment.formats
    moves = step_collectives(layout, mode, *program.bucket[:2], formats.activation_bytes)
    machine = load_machine(machine_of(device_kind(runner)))
    costs = built.deployment.costs(machine, load_engine("shiftjax"))
    row = {"sp": sp, "tp": tp, "mode": mode.label, "bytes": sum(compiled.values())}
    row |= {"predicted_bytes": sum(m.num_bytes * m.num_times for m in moves)}
    memory = step.memory_analysis()
    row |= {"temporary_bytes": memory.temp_size_in_bytes if memory else None}
    for kind, span in (("decode", (32, 1)), ("prefill", (0, 64))):
        plan = plan_of(Case(kind, (span,)), MAX_LENGTH)
        row[f"{kind}_ms"] = 1e3 * min(measure(runner, plan, mode) for _ in range(5))
        row[f"{kind}_predicted_ms"] = 1e3 * costs.serial_seconds(mode, work_of(plan))
    return row

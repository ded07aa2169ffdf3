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
      - {machine: h200x8, model: llama-70b, trace: {file: trace.csv},
         acceptance: {tokens_per_step: 1.56, accepted_of_drafted: 0.25}}  # with drafts; or 0.7

Measured: the same prompts through every mesh and mode must give the same tokens; collective bytes
and memory come from the compiled programs, beside what the cost model says they are; times of a
decode and a prefill step beside the predicted ones. Everything lands in one folder: JSONL, CSV
and report.html.
"""

import argparse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from serving.bench.hlo import collectives
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
from shiftjax.control.request import SamplingParams
from shiftjax.costs.collectives import step_collectives
from shiftjax.costs.machine_files import load_engine, load_machine, machine_of
from shiftjax.drafts.draft import DraftOptions
from shiftjax.options import ConfigError, unknown_name
from shiftjax.parallel.grid import Mode
from shiftjax.settings import make_virtual_devices
from shiftjax.sim.drafts import acceptance_from
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
MAX_TOKENS = MAX_LENGTH // 2
PROMPTS = ([5, 6, 7, 8] * 6, [9] * 17, [11, 12, 13] * 11, [4])
BUDGETS = ("max_num_seqs", "max_num_batched_tokens", "block_size")
# What each part of a file may hold, with defaults where there are any.
PARTS: Mapping[str, Any] = dict.fromkeys(("title", "measured", "modelled"))
MEASURED = {"model": "random:tiny", "meshes": [[4, 2]], "tokens": 16, "dtype": "float32"}
NEEDED = ("machine", "model", "trace")
MODELLED: dict[str, Any] = dict.fromkeys((*NEEDED, "dtype", "kv_cache_dtype", "engine", *BUDGETS))
MODELLED |= {"acceptance": None, "compare": ["dp", "tp", "shift"], "rates": [1.0]}


def _is_count(value: Any) -> bool:
    return type(value) is int and value > 0


def _is_rate(value: Any) -> bool:
    return type(value) in (int, float) and value > 0


def _is_mesh(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(map(_is_count, value))


def _is_list(value: Any, is_item: Callable[[Any], bool] = lambda _: True) -> bool:
    return isinstance(value, list) and bool(value) and all(map(is_item, value))


CHECKS: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "modelled": (lambda value: isinstance(value, list), "must be a list"),
    "meshes": (lambda value: _is_list(value, _is_mesh), "must be a list of [SP, TP]"),
    "tokens": (lambda n: _is_count(n) and n <= MAX_TOKENS, f"must be 1 to {MAX_TOKENS}"),
    "compare": (_is_list, "must be a list"),
    "rates": (lambda value: _is_list(value, _is_rate), "must be a list of numbers above 0"),
    **dict.fromkeys(BUDGETS, (_is_count, "must be a whole number of at least 1")),
}


def run_file(arguments: argparse.Namespace, config: EngineConfig, sampling: SamplingParams) -> int:
    """Run all experiments of a file; exit code 1 if tokens or bytes disagree somewhere."""
    path, out = arguments.file, arguments.out
    options = _checked(_read(path), PARTS, str(path))
    report, agree = Report(str(options.get("title", path.stem))), True
    if "measured" in options:
        rows, agree = _measured(_checked(options["measured"], MEASURED, "measured"))
        print(as_text(rows))
        write_rows(out, "measured", rows)
        report.table("measured on this machine", rows)
    for number, values in enumerate(options.get("modelled", []), 1):
        experiment = _checked(values, MODELLED, f"modelled {number}", NEEDED)
        _modelled(experiment, f"modelled-{number}", out, report)
    out.mkdir(parents=True, exist_ok=True)
    report.save(out / "report.html")
    print(f"wrote {out / 'report.html'}")
    return 0 if agree else 1


def _read(path: Path) -> Any:
    try:
        return yaml.safe_load(path.read_text(encoding="utf-8")) or None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError([f"{path}: cannot be read: {error}"]) from None


def _checked(
    options: Any, known: Mapping[str, Any], where: str, needed: Sequence[str] = ()
) -> dict[str, Any]:
    """The options over their defaults. Raises ConfigError with everything that is wrong."""
    if not isinstance(options, dict):
        raise ConfigError([f"{where}: must map {', '.join(known)} to values"])
    wrong = [f"{where}: {unknown_name(str(n), known)}" for n in options if n not in known]
    wrong += [f"{where}: {name} is missing" for name in needed if name not in options]
    wrong += [
        f"{where}: {name} {CHECKS[name][1]}, got {str(value)[:80]}"
        for name, value in options.items()
        if name in known and name in CHECKS and not CHECKS[name][0](value)
    ]
    if wrong:
        raise ConfigError(wrong)
    return {n: v for n, v in known.items() if v is not None} | options


# ------------------------------------------------------------------ modelled


def _modelled(experiment: Mapping[str, Any], name: str, out: Path, report: Report) -> None:
    target = target_from(experiment)
    budgets = {name: experiment[name] for name in BUDGETS if name in experiment}
    acceptance, drafts = None, {}
    if "acceptance" in experiment:
        acceptance = acceptance_from(experiment["acceptance"])
        drafts["drafts"] = DraftOptions(speculation="suffix")
    deployments = choose_deployments(target, experiment["compare"], **budgets, **drafts)
    requests, rates = trace_from(experiment["trace"]), experiment["rates"]
    points = sweep(requests, target, deployments, rates, acceptance)
    write_rows(out, name, [point.row() for point in points])
    heading = f"{target.model.name} on {target.machine.name}, {target.engine.name}"
    report.sweep(heading, points, ("ttft",))


# ------------------------------------------------------------------ measured


def _measured(options: Mapping[str, Any]) -> tuple[list[dict[str, Any]], bool]:
    """(a row per mesh and mode, whether all of them agree)."""
    meshes = options["meshes"]
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
    compiled = collectives(step.as_text() or "")
    formats = built.deployment.formats
    moves = step_collectives(layout, mode, *program.bucket[:2], formats)
    machine = load_machine(machine_of(device_kind(runner)))
    costs = built.deployment.costs(machine, load_engine("shiftjax"))
    row = {
        "sp": sp,
        "tp": tp,
        "mode": mode.label,
        "bytes": sum(size * count for (_, size), count in compiled.items()),
    }
    row |= {"predicted_bytes": sum(m.num_bytes * m.num_times for m in moves)}
    memory = step.memory_analysis()
    row |= {"temporary_bytes": memory.temp_size_in_bytes if memory else None}
    for kind, span in (("decode", (32, 1)), ("prefill", (0, 64))):
        plan = plan_of(Case(kind, (span,)), MAX_LENGTH)
        row[f"{kind}_ms"] = 1e3 * min(measure(runner, plan, mode) for _ in range(5))
        row[f"{kind}_predicted_ms"] = 1e3 * costs.serial_seconds(mode, work_of(plan))
    return row

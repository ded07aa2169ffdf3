"""Times single steps of the real engine over a grid and fits a machine file to them.

Each point is one step on its own: its plan is given to the runner and its results are awaited,
several times, of which the quickest counts. Every other case of the grid is used for the fit, the
rest only to say how good it is. A switch between modes is timed too:
the first step after one against the same step after itself.
"""

import argparse
import itertools
import json
import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

from serving.bench.flags import STEPS_MODEL, meshes_of
from shiftjax.arch.cache import MOST_GROUPS
from shiftjax.arch.formats import formats_of
from shiftjax.config import EngineConfig
from shiftjax.core.engine import Engine
from shiftjax.core.policy import work_of
from shiftjax.core.request import (
    Request,
    SamplingParams,
    ScheduledSequence,
    SequenceState,
    StepPlan,
)
from shiftjax.costs.machine import Machine
from shiftjax.costs.machine_files import dump_machine, load_engine, load_machine, machine_of
from shiftjax.costs.step_costs import CostModel
from shiftjax.options import ConfigError, shown
from shiftjax.parallel.grid import Mode
from shiftjax.parallel.layout import Layout
from shiftjax.settings import compile_cache_dir, make_virtual_devices
from shiftjax.sim.fit import CostsOf, Point, errors, fit_machine

if TYPE_CHECKING:
    from shiftjax.build import Built
    from shiftjax.device.runner import DeviceRunner

TOKEN_BUCKETS = (8, 32, 128, 512)
BLOCK_SIZE, MAX_LENGTH, MAX_SEQS = 16, 2048, 32
DECODES = (1, 4, 8, 16, 32)
DECODE_CONTEXTS = (64, 256, 512, 1024, 1536)
CHUNKS = (24, 64, 120, 256, 500)
CHUNK_STARTS = (0, 512, 1024)
MOST_REPEATS = 10_000  # of each step: beyond it a run would last for days
SIZES = {"max_model_len": MAX_LENGTH, "max_num_seqs": MAX_SEQS}
SIZES |= {"num_blocks": 1 + MAX_SEQS * MAX_LENGTH // BLOCK_SIZE}


@dataclass(frozen=True)
class Case:
    """A step to measure: sequences as (start, tokens to compute)."""

    kind: str  # decode, chunk or mixed
    spans: tuple[tuple[int, int], ...]


def cases() -> list[Case]:
    """The grid: decodes by count and context, chunks by size and start, and mixtures."""
    decodes = [Case("decode", ((c, 1),) * n) for n in DECODES for c in DECODE_CONTEXTS]
    chunks = [Case("chunk", ((start, n),)) for n in CHUNKS for start in CHUNK_STARTS]
    mixed = [
        Case("mixed", (*((context, 1),) * n, (0, chunk)))
        for n in (4, 16)
        for context in (128, 1024)
        for chunk in (100, 480)
    ]
    return decodes + chunks + mixed


def plan_of(case: Case, max_length: int = MAX_LENGTH) -> StepPlan:
    """A plan of this shape; every sequence has blocks of its own, decodes come first."""
    blocks_each, items = max_length // BLOCK_SIZE, []
    for number, (start, count) in enumerate(case.spans):
        first = 1 + number * blocks_each
        prompt = [(7 * number + 3 * i) % 200 for i in range(start + count)]
        sequence = SequenceState(
            Request(str(number), prompt, SamplingParams(temperature=0.0)),
            index=0,
            seed=0,
            order=(0, 0.0, number, 0),
            token_ids=prompt,
            num_prompt_tokens=len(prompt),
            max_length=max_length,
            stop_ids=frozenset(),
            siblings=[],
            block_table=list(range(first, first + blocks_each)),
            window_tables=[list(range(first, first + blocks_each))] * (MOST_GROUPS - 1),
            first_blocks=[0] * MOST_GROUPS,
        )
        items.append(ScheduledSequence(sequence, start, count, 1, -1))
    num_decodes = sum(count == 1 for _, count in case.spans)
    tokens = sum(count for _, count in case.spans)
    return StepPlan(items, tokens, len(items), num_decodes, [], [], step_id=0)


def measure(runner: "DeviceRunner", plan: StepPlan, mode: Mode) -> float:
    """Seconds of one step from its plan to its results."""
    start = time.perf_counter()
    runner.fetch(runner.run(plan, mode, None))
    return time.perf_counter() - start


def measure_switch(runner: "DeviceRunner", plan: StepPlan, repeats: int) -> dict[str, float]:
    """Seconds of a step in a mode after a step in another or the same: "base->shift" ..."""
    pairs = list(itertools.product(runner.step.weights.modes, repeat=2))
    times: dict[str, list[float]] = {f"{a.label}->{b.label}": [] for a, b in pairs}
    for _ in range(4 * repeats):
        for first, then in pairs:
            measure(runner, plan, first)
            times[f"{first.label}->{then.label}"].append(measure(runner, plan, then))
    return {pair: statistics.median(values) for pair, values in times.items()}


def build_for_all_modes(model: str, token_buckets: Sequence[int], **options: Any) -> "Built":
    """An engine without a tokenizer whose steps are compiled in every mode of their group."""
    from shiftjax.build import build
    from shiftjax.weights.locate import open_source, resolve_model

    config = EngineConfig.from_options(
        model=model,
        token_buckets=token_buckets,
        max_num_batched_tokens=token_buckets[-1],
        block_size=BLOCK_SIZE,
        **options,
    )
    source = open_source(resolve_model(model), seed=0)
    cache_dir = compile_cache_dir(config)
    built = build(config, source, lambda task, done, total: None, cache_dir)
    for runner in built.runners:
        for program, mode in itertools.product(runner.programs, runner.step.weights.modes):
            runner.compiled(program, mode)
    return built


def generate(engine: Engine, prompts: Sequence[list[int]], num_tokens: int) -> list[list[int]]:
    """Continue prompts greedily, all at once, through the whole engine: `num_tokens` of each."""
    sampling = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    requests = [Request(str(n), prompt, sampling) for n, prompt in enumerate(prompts)]
    return list(answers(engine, requests).values())


def answers(engine: Engine, requests: Sequence[Request]) -> dict[str, list[int]]:
    """Serve requests of one continuation, all at once: the tokens of each, by its id.

    Raises RuntimeError if one ends with an error.
    """
    tokens: dict[str, list[int]] = {request.request_id: [] for request in requests}
    for request in requests:
        engine.add_request(request)
    while engine.has_work():
        for event in engine.step(time.monotonic()):
            if event.error is not None:
                raise RuntimeError(event.error)
            tokens[event.request_id] += event.token_ids
    return tokens


def measure_mesh(
    runner: "DeviceRunner", sp: int, tp: int, repeats: int
) -> list[tuple[Case, Point]]:
    """Every case in every mode of a mesh, in rounds; the quickest run of each counts.

    The first round does not. Other work on the machine only ever adds time, and it seldom lasts
    through all rounds.
    """
    modes = runner.step.layout.modes
    plans = [(case, plan_of(case), mode) for case in cases() for mode in modes]
    rounds = [[measure(runner, plan, mode) for _, plan, mode in plans] for _ in range(repeats + 1)]
    best = [min(times) for times in zip(*rounds[1:], strict=True)]
    return [
        (case, Point(sp, tp, mode, work_of(plan), seconds))
        for (case, plan, mode), seconds in zip(plans, best, strict=True)
    ]


def run_bench(arguments: argparse.Namespace, config: EngineConfig, sampling: SamplingParams) -> int:
    """Measure, fit, say how good the fit is, write the machine file and the points."""
    model, repeats, out = arguments.model or STEPS_MODEL, arguments.repeats, arguments.out
    meshes = meshes_of(arguments.meshes, "--meshes")
    if not 1 <= repeats <= MOST_REPEATS:
        raise ConfigError([f"--repeats must be 1 to {MOST_REPEATS}, got {shown(repeats)}"])
    if not out.parent.is_dir():
        raise ConfigError([f"--out {shown(str(out))}: its folder is not there"])
    devices = max(sp * tp for sp, tp in meshes)
    make_virtual_devices(EngineConfig.from_options(devices=devices))
    measured: list[tuple[Case, Point]] = []
    switches: dict[str, dict[str, float]] = {}
    layouts: dict[tuple[int, int], Any] = {}
    shape = formats = kind = None
    for sp, tp in meshes:
        (runner,) = build_for_all_modes(model, TOKEN_BUCKETS, sp=sp, tp=tp, **SIZES).runners
        dtype, kind = str(runner.step.model.dtype), runner.step.mesh.devices.flat[0].device_kind
        shape, formats = runner.step.layout.model, formats_of(dtype)
        layouts[sp, tp] = [program.bucket for program in runner.programs]
        measured += measure_mesh(runner, sp, tp, repeats)
        if sp > 1:
            plan = plan_of(Case("decode", ((256, 1),) * 8))
            switches[f"{sp}x{tp}"] = measure_switch(runner, plan, repeats)
        print(f"measured {sp}x{tp}: {len(measured)} points so far", flush=True)
        del runner
    assert shape is not None and formats is not None and kind is not None
    engine = load_engine("shiftjax")

    def costs_of(machine: Machine, sp: int, tp: int) -> CostModel:
        return CostModel(Layout(shape, sp, tp), machine, engine, formats, layouts[sp, tp])

    _save_points(out.with_suffix(".jsonl"), measured, switches)
    start = replace(load_machine(machine_of(kind)), num_devices=devices)
    machine = fit_every_other(start, measured, costs_of)
    for mesh, pairs in switches.items():
        print(f"switching on {mesh}:", {pair: f"{1e3 * s:.2f} ms" for pair, s in pairs.items()})
    where = f"shiftjax bench steps, {date.today()}, {model}, {os.cpu_count()} cores"
    machine = replace(machine, measured=where, published=False)
    out.write_text(dump_machine(machine, where), encoding="utf-8")
    print(f"wrote {out}")
    return 0


def fit_every_other(
    start: Machine, measured: Sequence[tuple[Case, Point]], costs_of: CostsOf
) -> Machine:
    """Fit to every other case of the grid and say how good the fit is on both halves."""
    grid = cases()
    used = [pair for pair in measured if grid.index(pair[0]) % 2 == 0]
    held = [pair for pair in measured if grid.index(pair[0]) % 2]
    machine = fit_machine(start, [point for _, point in used], costs_of)
    _print_errors("used for the fit", used, machine, costs_of)
    _print_errors("held out", held, machine, costs_of)
    return machine


def _print_errors(
    what: str, measured: Sequence[tuple[Case, Point]], machine: Machine, costs_of: CostsOf
) -> None:
    values = errors(machine, [point for _, point in measured], costs_of)
    print(f"{what}: median {statistics.median(values):.1%}, worst {max(values):.1%}")
    for kind in ("decode", "chunk", "mixed"):
        some = [e for e, (case, _) in zip(values, measured, strict=True) if case.kind == kind]
        print(f"  {kind}: median {statistics.median(some):.1%}, worst {max(some):.1%}")


def _save_points(
    path: Path, measured: Sequence[tuple[Case, Point]], switches: dict[str, dict[str, float]]
) -> None:
    rows: list[dict[str, Any]] = [
        {"kind": case.kind, "sp": p.sp, "tp": p.tp, "mode": p.mode.label, "seconds": p.seconds}
        | p.work._asdict()
        for case, p in measured
    ]
    rows += [{"switches": mesh} | pairs for mesh, pairs in switches.items()]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")

"""Deployments of one model side by side, on the devices here: tokens, bytes, and times.

Each is whatever settings of `LLM` say: degrees, policies, fleets, stages, drafts, formats. All of
them serve the same requests with the whole engine, one deployment after the other. Beside what was
measured stands what is predicted: the bytes of collectives of every compiled step
(`costs/collectives.py`), and the times of the same requests replayed on the machine's constants.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from serving.bench.hlo import collectives
from shiftjax.config import EngineConfig
from shiftjax.core.engine import Engine
from shiftjax.core.request import Event, Request, SamplingParams
from shiftjax.costs.buckets import Bucket
from shiftjax.costs.collectives import (
    DIGIT_BITS_ON_CPU,
    context_gathers,
    gather_of_experts,
    guess_collectives,
    sampling_collectives,
    step_collectives,
)
from shiftjax.costs.expert_load import room_to_exchange
from shiftjax.costs.machine_files import machine_of
from shiftjax.drafts.speculation import DraftStats
from shiftjax.options import ConfigError
from shiftjax.parallel.grid import Mode
from shiftjax.parallel.positions import GATHERED_TOKENS_ON_CPU, gathered_tokens
from shiftjax.settings import make_virtual_devices
from shiftjax.sim.columns import Row, row_of_run
from shiftjax.sim.devices import WallClock
from shiftjax.sim.drafts import AcceptanceModel, acceptance_from
from shiftjax.sim.experiments import target_of
from shiftjax.sim.modelled import not_simulated
from shiftjax.sim.replay import RequestRecord, replay, serve
from shiftjax.sim.replay_metrics import summary
from shiftjax.sim.trace import TraceRequest

if TYPE_CHECKING:
    from shiftjax.build import Built
    from shiftjax.device.step import StepDef
    from shiftjax.model_files import ModelFiles

TIMES = ("tokens_per_second", "ttft_p50_seconds", "tpot_p50_seconds", "completion_p50_seconds")
"""Columns of a run that are predicted, too."""
ComparesAs = tuple[str, ...]  # what has to agree for equal tokens
Load = Callable[["ModelFiles"], list[tuple[TraceRequest, list[int]]]]
"""Requests for a model, and the token ids of their prompts."""


@dataclass(frozen=True)
class Run:
    """The requests of one deployment, served; seconds."""

    tokens: dict[str, list[int]]  # by request
    records: list[RequestRecord]
    num_refused: int
    seconds: float


def compare(configs: Mapping[str, EngineConfig], load: Load) -> Iterator[tuple[Row, list[Row]]]:
    """Serve the same requests with every deployment in turn.

    Yields a row for each deployment, and one for each step that was compiled for it. Tokens are
    compared with those of the first deployment of the same number formats.

    Raises ConfigError, with the deployment's name, for what model or machine cannot take.
    """
    sizes = {name: config.parallel for name, config in configs.items()}
    needs = {name: size.devices or size.least_devices for name, size in sizes.items()}
    make_virtual_devices(configs[max(needs, key=needs.__getitem__)])
    first: dict[ComparesAs, tuple[str, dict[str, list[int]]]] = {}
    for name, config in configs.items():
        built, asked = _build(name, config, load)
        run = serve_all(built.engine, asked)
        reference, expected = first.setdefault(compares_as(built), (name, run.tokens))
        moved = [{"name": name} | row for row in program_rows(built)]
        measured = row_of_run(run.records, run.num_refused, run.seconds)
        predicted, why = _predicted(config, built, [request for request, _ in asked])
        steps = built.engine.stats().steps_by_mode
        row: Row = {
            "name": name,
            "mesh": built.mesh,
            "formats": "/".join(_formats(built)),
            "tokens_as": reference,
            "same_tokens": run.tokens == expected,
            "same_bytes": all(row["bytes"] == row["predicted_bytes"] for row in moved),
            "steps": " ".join(f"{mode}:{n}" for mode, n in steps.items()),
            "failed": run.num_refused,
        }
        built.engine.close()
        del built
        for column in TIMES:
            row[column] = measured[column]
            row[f"predicted_{column}"] = predicted and predicted[column]
        yield row | {"not_predicted": why}, moved


def agree(rows: Sequence[Mapping[str, Any]]) -> bool:
    """Whether all deployments served all requests, with the same tokens and predicted bytes."""
    return all(row["same_tokens"] and row["same_bytes"] and not row["failed"] for row in rows)


def _build(
    name: str, config: EngineConfig, load: Load
) -> "tuple[Built, list[tuple[TraceRequest, list[int]]]]":
    from shiftjax.build import build
    from shiftjax.model_files import open_files

    try:
        files = open_files(config, "generate")
        asked = load(files)
        return build(config, files.source, lambda *_: None, files.cache_dir), asked
    except ConfigError as error:
        raise ConfigError([f"{name}: {problem}" for problem in error.problems]) from None


def serve_all(engine: Engine, asked: Sequence[tuple[TraceRequest, list[int]]]) -> Run:
    """Serve requests greedily when they come, and keep their tokens."""
    tokens: dict[str, list[int]] = {}

    def hear(event: Event) -> None:
        tokens.setdefault(event.request_id, []).extend(event.token_ids)

    begin = time.monotonic()
    coming = (
        Request(
            str(number),
            prompt,
            SamplingParams(temperature=0.0, max_tokens=each.num_output_tokens, ignore_eos=True),
            begin + each.arrival_seconds,
            each.priority,
        )
        for number, (each, prompt) in enumerate(asked)
    )
    records, num_refused = serve(engine, WallClock(), coming, hear)
    return Run(tokens, records, num_refused, time.monotonic() - begin)


def compares_as(built: "Built") -> ComparesAs:
    """Deployments for which this is equal give equal tokens.

    Inputs of a product of codes are rounded in as many parts as a group has devices
    (`models/products.py`), so that number counts where weights are codes.
    """
    formats = _formats(built)
    layouts = [each.layout for each in built.deployments]
    if "fp8" not in formats[0]:
        return formats
    return *formats, *(str(layout.padded_for) for layout in layouts)


def _formats(built: "Built") -> tuple[str, ...]:
    formats = built.deployment.formats
    return formats.weights, formats.activations, formats.kv


# ------------------------------------------------------------------ bytes


def program_rows(built: "Built") -> Iterator[Row]:
    """What every compiled step moves, and is predicted to move; equal groups count once."""
    seen = set()
    for runner in built.runners:
        layout = runner.step.layout
        first = layout.model.stage.first if layout.model.stage else 0
        for program in runner.programs:
            for mode, compiled in program.steps.items():
                step = layout.sp, layout.tp, first, mode, program.bucket
                if step in seen:
                    continue
                seen.add(step)
                moved = collectives(compiled.as_text() or "")
                memory = compiled.memory_analysis()
                yield {
                    "sp": layout.sp,
                    "tp": layout.tp,
                    "layers": f"{first}-{first + layout.model.num_layers - 1}",
                    "mode": mode.label,
                    "tokens": program.bucket.tokens,
                    "rows": program.bucket.rows,
                    "bytes": sum(size * count for (_, size), count in moved.items()),
                    "predicted_bytes": predicted_bytes(runner.step, mode, program.bucket),
                    "temporary_bytes": memory.temp_size_in_bytes if memory else None,
                }


def predicted_bytes(step: "StepDef", mode: Mode, bucket: Bucket) -> int:
    """Bytes of all collectives in a compiled step, those of branches that are seldom taken, too."""
    layout, formats = step.layout, step.model.formats
    use = step.use_in(mode, bucket[:2])
    moves = step_collectives(layout, mode, bucket.tokens, bucket.rows, formats, use)
    gathered = gathered_tokens(step.block_size, GATHERED_TOKENS_ON_CPU)
    moves += layout.model.num_early_layers * context_gathers(layout, formats, gathered)
    if layout.model.is_last_stage:
        moves += sampling_collectives(layout, bucket.rows, DIGIT_BITS_ON_CPU, 1, formats.sums)
        moves += guess_collectives(layout, bucket.seqs, formats.activation_bytes)
    experts = step.experts_in(mode, bucket.tokens)
    if room_to_exchange(layout, mode, experts, bucket.tokens):  # beside it the way without room
        size = layout, mode, experts, bucket.tokens, formats.activation_bytes
        moves += layout.model.num_expert_layers * gather_of_experts(*size)
    return sum(move.num_bytes * move.num_times for move in moves)


# ------------------------------------------------------------------ times


def _predicted(
    config: EngineConfig, built: "Built", requests: Sequence[TraceRequest]
) -> tuple[Row | None, str]:
    """(the row of a replay on this machine, ""); or (None, why there is none)."""
    deployment, stats = built.deployment, built.engine.stats()
    problems = not_simulated(config)
    if problems:
        return None, problems[0]
    device = built.runners[0].step.mesh.devices.flat[0]
    num_output = sum(each.num_output_tokens for each in requests)
    drafts = stats.find(DraftStats)
    acceptance = _acceptance(drafts, num_output) if drafts else None
    try:
        machine = config.scheduler.machine or machine_of(device.device_kind)
        target = target_of(config, deployment.layout.model, machine)
        here = replace(target.machine, num_devices=deployment.grid.num_devices)
        target = replace(target, machine=here, formats=deployment.formats)
        return summary(replay(requests, target, deployment, acceptance=acceptance)), ""
    except ConfigError as error:
        return None, error.problems[0]


def _acceptance(drafts: DraftStats, num_output: int) -> AcceptanceModel:
    """As often as drafts were right here; each step of a sequence gives one token more."""
    accepted, drafted = drafts.num_accepted, drafts.tokens.total()
    steps = max(1, num_output - accepted)
    if not accepted:
        return AcceptanceModel((0.0,), drafted / steps)
    figures = {"tokens_per_step": 1 + accepted / steps, "accepted_of_drafted": accepted / drafted}
    return acceptance_from(figures)

"""`shiftjax mesh run`: a file of experiments, measured on devices here and modelled elsewhere.

    title: Llama-70B under bursts
    measured:                       # on the devices of this machine; on CPU virtual ones
      model: random:tiny            # any settings of LLM, for all deployments
      max_model_len: 128
      tokens: 16                    # greedy tokens of each of the prompts
      prompts: [Hello, [5, 6, 7]]   # texts or token ids; or a trace, as below; or none: made up
      deployments:                  # more settings, of one each
        shift: {sp: 4, tp: 2}
        replicas: {dp: 4, tp: 2}
        stages: {pp: 2, tp: 4}
        fleet: {fleet: true, tp: 2}
        codes: {sp: 4, tp: 2, quantization: fp8, kv_cache_dtype: fp8}
    modelled:
      - {machine: h200x8, model: llama-70b, dtype: fp8, engine: vllm,
         compare: [dp, tp, shift], rates: [0.5, 1],
         trace: {kind: poisson, rate: 4, seconds: 60, prompt_tokens: 4096, output_tokens: 250}}
      - {machine: h200x8, model: llama-70b, trace: {file: trace.csv},
         acceptance: {tokens_per_step: 1.56, accepted_of_drafted: 0.25}}  # with drafts; or 0.7

Measured: the same requests through every deployment must give the same tokens, but for other number
formats; collective bytes come from the compiled steps, beside what the cost model says they are;
times beside those of a replay (`serving/bench/deployments.py`). Numbers are float32 by default, in
which sums of another order choose no other token. Everything lands in one folder: JSONL, CSV,
report.html and its images.
"""

import argparse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from serving.bench.deployments import TIMES, Load, agree, compare
from serving.cli.asked import model_of
from shiftjax.config import SETTINGS, EngineConfig
from shiftjax.core.request import SamplingParams
from shiftjax.draft_options import DraftOptions
from shiftjax.options import ConfigError, unknown_name
from shiftjax.sim.closed_loop import ClosedLoop
from shiftjax.sim.drafts import acceptance_from
from shiftjax.sim.experiments import (
    as_text,
    choose_deployments,
    sweep,
    target_from,
    trace_from,
)
from shiftjax.sim.report import Report, side_by_side
from shiftjax.sim.trace import TraceRequest

if TYPE_CHECKING:
    from shiftjax.model_files import ModelFiles

PROMPTS = [[5, 6, 7, 8] * 6, [9] * 17, [11, 12, 13] * 11, [4]]
TOKENS = 16  # greedy ones of each of them
BUDGETS = ("max_num_seqs", "max_num_batched_tokens", "block_size")
NOT_COMPARED = (
    "Bytes are those of compiled steps. What moves between groups of a fleet, between stages, and "
    "between devices and host is in no step, and is not compared."
)
# What each part of a file may hold, with defaults where there are any.
PARTS: Mapping[str, Any] = dict.fromkeys(("title", "measured", "modelled"))
MEASURED: Mapping[str, Any] = dict.fromkeys(("tokens", "prompts", "trace", "deployments"))
DEGREES = {"sp": 4, "tp": 2}  # of the one deployment of a file that names none
SHARED: Mapping[str, Any] = MEASURED | dict.fromkeys(SETTINGS) | {"model": "random:tiny"}
NEEDED = ("machine", "model", "trace")
MODELLED: dict[str, Any] = dict.fromkeys(
    (*NEEDED, "dtype", "kv_cache_dtype", "engine", "hosts", *BUDGETS)
)
MODELLED |= {"acceptance": None, "compare": ["dp", "tp", "shift"], "rates": [1.0]}


def _is_count(value: Any) -> bool:
    return type(value) is int and value > 0


def _is_rate(value: Any) -> bool:
    return type(value) in (int, float) and value > 0


def _is_map(value: Any) -> bool:
    return isinstance(value, dict)


def _is_prompt(value: Any) -> bool:
    is_ids = isinstance(value, list) and all(type(each) is int and each >= 0 for each in value)
    return bool(value) and (is_ids or isinstance(value, str))


def _is_list(value: Any, is_item: Callable[[Any], bool] = lambda _: True) -> bool:
    return isinstance(value, list) and bool(value) and all(map(is_item, value))


CHECKS: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "modelled": (lambda value: isinstance(value, list), "must be a list"),
    "deployments": (
        lambda value: _is_map(value) and value != {} and all(map(_is_map, value.values())),
        "must map names to settings of LLM, as in {shift: {sp: 4, tp: 2}}",
    ),
    "prompts": (lambda value: _is_list(value, _is_prompt), "must be a list of texts or token ids"),
    "tokens": (_is_count, "must be a whole number of at least 1"),
    "compare": (_is_list, "must be a list"),
    "rates": (lambda value: _is_list(value, _is_rate), "must be a list of numbers above 0"),
    **dict.fromkeys(BUDGETS, (_is_count, "must be a whole number of at least 1")),
}


def run_file(arguments: argparse.Namespace, config: EngineConfig, sampling: SamplingParams) -> int:
    """Run all experiments of a file; exit code 1 if tokens or bytes disagree somewhere."""
    path, out = arguments.file, arguments.out
    options = _checked(_read(path), PARTS, str(path))
    report, all_agree = Report(str(options.get("title", path.stem)), out), True
    if "measured" in options:
        measured = _checked(options["measured"], SHARED, "measured")
        all_agree = _measured(measured, out, report)
    for number, values in enumerate(options.get("modelled", []), 1):
        experiment = _checked(values, MODELLED, f"modelled {number}", NEEDED)
        _modelled(experiment, f"modelled-{number}", report)
    report.save()
    print(f"wrote {out / 'report.html'}")
    return 0 if all_agree else 1


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


def _modelled(experiment: Mapping[str, Any], name: str, report: Report) -> None:
    target = target_from({**experiment, "model": model_of(str(experiment["model"]))})
    budgets = {name: experiment[name] for name in BUDGETS if name in experiment}
    acceptance, drafts = None, {}
    if "acceptance" in experiment:
        acceptance = acceptance_from(experiment["acceptance"])
        drafts["drafts"] = DraftOptions(speculation="suffix")
    deployments = choose_deployments(target, experiment["compare"], **budgets, **drafts)
    requests, rates = trace_from(experiment["trace"]), experiment["rates"]
    points = sweep(requests, target, deployments, rates, acceptance)
    heading = f"{target.model.name} on {target.machine.name}, {target.engine.name}"
    report.sweep(heading, points, ("ttft",), name)


# ------------------------------------------------------------------ measured


def _measured(options: Mapping[str, Any], out: Path, report: Report) -> bool:
    """Whether all deployments agree, in tokens and with the predicted bytes."""
    rows, programs = [], []
    configs, load = _configs(options), _load(options)
    out.mkdir(parents=True, exist_ok=True)  # before hours of measuring
    for row, moved in compare(configs, load):
        print(f"measured {row['name']}: {row['mesh']}", flush=True)
        rows.append(row)
        programs += moved
    print(as_text(rows))
    report.table("measured on this machine, beside what was predicted", rows, "measured")
    report.plot("measured and predicted", side_by_side(rows, TIMES))
    heading = "compiled steps: bytes of collectives and temporaries of a device"
    report.table(heading, programs, "programs")
    report.text(NOT_COMPARED)
    return agree(rows)


def _configs(options: Mapping[str, Any]) -> dict[str, EngineConfig]:
    """The settings of every deployment. Raises ConfigError with all that is wrong in all."""
    shared = {str(name): value for name, value in options.items() if name not in MEASURED}
    defaults = {"dtype": "float32"} | ({} if "deployments" in options else DEGREES)
    found, wrong = {}, []
    for name, own in options.get("deployments", {"shift": {}}).items():
        settings = defaults | shared | {str(n): value for n, value in own.items()}
        try:
            found[str(name)] = EngineConfig.from_options(**settings)
        except ConfigError as error:
            wrong += (f"measured: {name}: {problem}" for problem in error.problems)
    if wrong:
        raise ConfigError(wrong)
    return found


def _load(options: Mapping[str, Any]) -> Load:
    """The requests that all deployments serve: those of a trace, or prompts that come at once."""
    own = [name for name in ("prompts", "tokens") if name in options and "trace" in options]
    if own:
        raise ConfigError([f"measured: {name}: a trace says it: drop one" for name in own])
    requests = trace_from(options["trace"]) if "trace" in options else []
    if isinstance(requests, ClosedLoop):
        words = "a closed loop is modelled alone; shiftjax bench serve --clients is one"
        raise ConfigError([f"measured: trace: {words} for a server"])
    prompts, num_tokens = options.get("prompts", PROMPTS), options.get("tokens", TOKENS)

    def of_trace(files: "ModelFiles") -> list[tuple[TraceRequest, list[int]]]:
        size = files.source.config.vocab_size
        return [(each, each.prompt(number, size)) for number, each in enumerate(requests)]

    def of_prompts(files: "ModelFiles") -> list[tuple[TraceRequest, list[int]]]:
        ids = [_encoded(prompt, files) for prompt in prompts]
        return [(TraceRequest(0.0, len(each), num_tokens), each) for each in ids]

    return of_trace if requests else of_prompts


def _encoded(prompt: str | list[int], files: "ModelFiles") -> list[int]:
    model = files.source.config
    if isinstance(prompt, list):
        if max(prompt) >= model.vocab_size:
            words = f"token {max(prompt)} is none of the {model.vocab_size:,} of {model.name}"
            raise ConfigError([f"prompts: {words}"])
        return prompt
    if files.tokenizer is None:
        raise ConfigError([f"{model.name} has no tokenizer: give token ids"])
    return files.tokenizer.encode(prompt)

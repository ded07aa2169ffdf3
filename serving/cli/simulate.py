"""The commands `plan` and `mesh simulate`."""

import argparse
import math
import operator
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pallas_kernels.sum_sizes import LEAST_DEVICES
from serving.bench.flags import meshes_of
from serving.cli.advise import Sought, decide, is_asked
from serving.cli.asked import asked_of, fleet_flags, lora_settings
from serving.cli.mesh_flags import COMPARED, OUTPUT, PROMPT
from serving.cli.trace_flags import number_of, trace_of, window_of
from shiftjax.config import EngineConfig
from shiftjax.core.request import SamplingParams
from shiftjax.costs.machine import Machine
from shiftjax.deploy.deployment import Deployment
from shiftjax.deploy.window_rule import freed_in_words
from shiftjax.options import ConfigError, num_bytes_of
from shiftjax.parallel.arrangements import FleetOptions, spelled
from shiftjax.parallel.degrees import Degrees
from shiftjax.sim.best_row import best_of
from shiftjax.sim.columns import LATENCIES, percentiles
from shiftjax.sim.drafts import AcceptanceModel, acceptance_from
from shiftjax.sim.estimate import Estimate, Workload, estimate
from shiftjax.sim.experiments import (
    as_text,
    breakdown_by_context,
    choose_deployments,
    sweep,
    write_rows,
)
from shiftjax.sim.hindsight import Oracle
from shiftjax.sim.kv_positions import positions_in_words
from shiftjax.sim.modelled import Target, cost_model
from shiftjax.sim.named import ROLES, Phases, RoleSplit, standard_deployments
from shiftjax.sim.numerics_words import numerics_in_words
from shiftjax.sim.planning import (
    beside_in_words,
    degree_flags,
    fleet_estimates,
    gather_in_words,
    hosts_in_words,
    left_out_in_words,
    recommend,
    stages_in_words,
    table_of,
    with_switch_in_words,
)
from shiftjax.sim.refused import refused_in_words
from shiftjax.sim.replay import Replay
from shiftjax.sim.report import Report, breakdown_bars, memory_bars, roofline
from shiftjax.sim.serve_command import serve_command
from shiftjax.sim.stored_experts import step_rows

FLEET_HEADING = (
    "fleets: groups of units, all of which hold the model, come and go with traffic; times are of "
    "one request in a widest group, tokens/s of the groups named beside them"
)
METRICS = ("queue", *LATENCIES)
MOST_ADAPTERS = 10_000
MOST_KERNELS = 12  # of a step, on the screen; files have them all
CONTEXTS = (2048, 4096, 8192, 16_384, 32_768, 65_536, 131_072)


# ------------------------------------------------------------------ plan


def plan(arguments: argparse.Namespace, config: EngineConfig, sampling: SamplingParams) -> int:
    """Print what every (DP, PP, SP, TP) would hold and do, and which one to take."""
    if is_asked(arguments):
        if arguments.goal is not None:
            raise ConfigError(
                ["--goal is of the table: --ttft and --tpot say what a load must get"]
            )
        trace = arguments.trace
        requests = None if trace is None else window_of(trace, arguments.window)
        asked = asked_of(arguments, machine=arguments.machine.partition(",")[0])
        is_cache_open = arguments.kv_cache_dtype is None and arguments.config is None
        sought = Sought(asked.target, asked.settings, is_cache_open)
        return decide(arguments, sought, lambda: _workload(arguments, asked.target), requests)
    target, settings, own, options = asked_of(arguments)
    workload = _workload(arguments, target)
    estimates = [estimate(target, each, workload) for each in own]
    estimates += table_of(target, workload, **settings)
    to_compile = _to_compile(arguments.compile, target, estimates)
    print(_heading(target, workload))
    rows = [one.row() for one in estimates]
    print(as_text(rows))
    if left_out := left_out_in_words(target, **settings):
        print(left_out)
    recommended = recommend(target, workload, arguments.goal, **settings)
    if recommended is None:
        print(f"\nnothing is recommended: {_no_room(estimates, workload)}")
        return 1
    best, reason = recommended
    policy = ""
    if best.sp > 1:
        by_cost = best.policy == "cost"
        policy = " --policy cost" if by_cost else f" --shift-threshold {best.threshold}"
    print(f"\nrecommended: {degree_flags(best)}{policy}")
    print(reason)
    command = serve_command(arguments.model or target.model.name, best)
    print(f"start: {command}\ntry:   {command} --simulate {arguments.machine}")
    if steps := step_rows(target, best):
        print(f"\nsteps, and how far they split the experts:\n{as_text(steps)}\n")
    of_best = estimate(target, best, workload)
    beside = (beside_in_words(one, of_best) for one in estimates[: len(own)])
    if freed := freed_in_words(best):
        print(f"KV of a sequence: {freed}")
    more = (
        with_switch_in_words(
            target, best, best_of(estimates[len(own) :], workload, arguments.goal)
        ),
        numerics_in_words(target, own[0] if own else best),
        positions_in_words(target, own[0] if own else best, workload),
        hosts_in_words(target, workload, **settings),
        gather_in_words(target, **settings),
    )
    for words in filter(None, (*beside, *more, stages_in_words(estimates))):
        print(words)
    fleets = _fleets(target, workload, settings, options, estimates)
    compiled = _compile(target, to_compile, workload)
    if arguments.out:
        report = _plan_report(target, estimates, arguments.out)
        report.table("fleets", fleets, "fleets")
        if steps:
            report.table("experts by steps", steps, "expert_steps")
        if compiled:
            report.table("compiled", compiled.pop("compiled"), "compiled")
            for name, of_steps in compiled.items():
                write_rows(arguments.out, name, of_steps)
        report.save()
    return 0


def _no_room(estimates: Sequence[Estimate], workload: Workload) -> str:
    """Why nothing can be recommended, and what came nearest."""
    prompt, output = workload.num_prompt_tokens, workload.num_output_tokens
    words = f"no deployment has room for a request of {prompt:,} + {output:,} tokens"
    nearest = max(estimates, key=lambda one: one.deployment.longest_in(one.memory))
    name, room = nearest.deployment.name.strip(), nearest.deployment.longest_in(nearest.memory)
    if room > 0:
        return f"{words}; the longest is one of {room:,}, in {name}"
    missing = -nearest.memory.kv_bytes / 1e9
    return f"{words}; {name} misses {missing:.1f} GB on each device for the weights and a step"


def _workload(arguments: argparse.Namespace, target: Target) -> Workload:
    """Raises ConfigError for requests that there cannot be."""
    most = target.model.max_position_embeddings
    prompt, output = arguments.input, OUTPUT if arguments.output is None else arguments.output
    if prompt is None:
        prompt = max(1, min(PROMPT, most - output))
    if min(prompt, output) < 1:
        raise ConfigError(["--input and --output must be at least 1 token"])
    if prompt + output > most:
        words = f"{prompt:,} + {output:,} tokens are more than the {most:,} of {target.model.name}"
        raise ConfigError([f"--input and --output: {words}"])
    return Workload(prompt, output)


def _heading(target: Target, workload: Workload) -> str:
    """What is planned: much of it by default."""
    formats, machine = target.formats, target.machine
    host = widened = ""
    if formats.weights not in machine.matmul_flops:
        widened = (
            f"{machine.name} has no {formats.weights} products: weights are stored in it, and "
            f"widened to {formats.activations} for every product\n"
        )
    if machine.from_host:
        rate = machine.from_host[0].bytes_per_second / 1e9
        host = f" (host: {machine.host_memory_bytes / 2**30:,.0f} GiB, {rate:.0f} GB/s a device)"
    over = f" over {machine.num_hosts} hosts" if machine.num_hosts > 1 else ""
    return (
        f"{target.model.name} ({formats.weights}, KV {formats.kv}) on "
        f"{machine.name}{over}{host} with the overhead of {target.engine.name}, "
        f"{workload.num_prompt_tokens} prompt and {workload.num_output_tokens} output tokens; "
        "--model, --machine, --dtype, --input and --output choose others\n"
        f"constants of {machine.name}: {_origin(machine)}\n{widened}{_of_switch(target)}"
    )


def _of_switch(target: Target) -> str:
    """What is assumed of a switch that adds up, where there is one."""
    if not (target.machine.switch_sum and target.engine.sums_by_switch):
        return ""
    return (
        "sums of SHIFT over all devices are those of the switch (jax 0.12; nobody has run the "
        f"kernels), where one group has all of {LEAST_DEVICES} devices or more\n"
    )


def _origin(machine: Machine) -> str:
    """Where the constants of a machine are from."""
    if machine.measured:
        return f"measured by {machine.measured}"
    if machine.published:
        return "published figures alone; what kernels reach of them is H100's, not measured here"
    return "predicted, from data sheets and what others have measured"


def _fleets(
    target: Target,
    workload: Workload,
    settings: Mapping[str, Any],
    options: FleetOptions,
    others: Sequence[Estimate],
) -> list[dict[str, Any]]:
    """Print fleets of every unit size, and the one of most tokens beside `others`; their rows."""
    estimates = fleet_estimates(target, workload, options, **settings)
    rows = [one.row() for one in estimates]
    if not rows:
        return rows
    print(f"\n{FLEET_HEADING}")
    print(as_text([one.shown() for one in estimates]))
    fitting = [one for one in estimates if one.widest.fits]
    if fitting:
        best = max(fitting, key=lambda one: one.most_tokens or 0.0)
        words = f"of fleets, --fleet --tp {best.deployment.tp} has most tokens per second"
        print(f"\n{words}, {best.most_tokens:,.0f}{_beside(others)}")
    return rows


def _beside(others: Sequence[Estimate]) -> str:
    """What the best deployment has that stays as it is, to end a sentence about fleets."""
    fitting = [one for one in others if one.fits]
    if not fitting:
        return ""
    best = max(fitting, key=lambda one: one.tokens_per_second)
    return f"; without --fleet {best.deployment.name.strip()} has {best.tokens_per_second:,.0f}"


def _to_compile(
    wanted: str | None, target: Target, estimates: Sequence[Estimate]
) -> list[Deployment]:
    """With --compile: the named meshes, or all that fit. Raises ConfigError."""
    if wanted is None:
        return []
    if target.machine.num_hosts > 1:
        raise ConfigError(["--compile is for the devices of one host: drop it, or --hosts"])
    from serving.bench.compiled_plan import check_target

    plain = [e.deployment for e in estimates if e.fits and e.deployment.pp == 1]
    fitting = {(each.sp, each.tp): each for each in plain}
    if not wanted:
        meshes = [mesh for mesh, deployment in fitting.items() if deployment.dp == 1]
    else:
        meshes = meshes_of(wanted, "--compile")
    wrong = [f"--compile: {sp}x{tp} does not fit" for sp, tp in meshes if (sp, tp) not in fitting]
    if wrong:
        raise ConfigError(wrong)
    check_target(target)
    return [fitting[mesh] for mesh in meshes]


def _compile(
    target: Target, deployments: Sequence[Deployment], workload: Workload
) -> dict[str, list[dict[str, Any]]]:
    """Print the compiled steps of these, their kernels and layers; rows of each, by name."""
    if not deployments:
        return {}
    from serving.bench.compiled_plan import compile_rows

    rows, kernels, layers = compile_rows(target, deployments, workload)
    print("\ncompiled: the largest step in every mode, and one of decodes:")
    print(as_text(rows))
    step = operator.itemgetter("sp", "tp", "step", "tokens")
    print("\nits kernels, those of most time first:")
    for row in rows:
        ours = [one for one in kernels if step(one) == step(row)]
        shown = [{k: v for k, v in one.items() if k != "result"} for one in ours[:MOST_KERNELS]]
        print(as_text(shown))
    print("\nlaunches of a layer, in order, by the functions whose work is in them:")
    for row in rows:
        names = [one["name"] for one in layers if step(one) == step(row)]
        shallow = "not told apart in so shallow a model"
        print("sp {} tp {}, {} of {} tokens: ".format(*step(row)) + ("; ".join(names) or shallow))
    return {"compiled": rows, "kernels": kernels, "layers": layers}


def _plan_report(target: Target, estimates: Sequence[Estimate], out: Path) -> Report:
    deployment = standard_deployments(target, ("shift",))["shift"]
    report = Report(f"{target.model.name} on {target.machine.name}", out)
    report.table("deployments", [one.row() for one in estimates], "plan")
    report.plot("memory", memory_bars(estimates))
    rows = breakdown_by_context(target, deployment, CONTEXTS)
    report.plot("a prompt's time by context", breakdown_bars(rows))
    report.plot("roofline", roofline(cost_model(target, deployment).stages[0]))
    return report


# ------------------------------------------------------------------ mesh simulate


def simulate(arguments: argparse.Namespace, config: EngineConfig, sampling: SamplingParams) -> int:
    """Replay one trace through several deployments, at one or more rates."""
    target, settings, own, options = asked_of(arguments)
    if (arguments.shift_threshold or 0) < 0:
        raise ConfigError(["--shift-threshold must be at least 0"])
    names = compared_names(arguments.compare or [COMPARED])
    shared = settings | {"fleet": options, "host_bytes": _host_bytes(arguments.host_memory)}
    shared |= _adapters(arguments)
    deployments = [*own, *choose_deployments(target, names, **shared)]
    _check_use(arguments, deployments)
    requests = trace_of(arguments)
    factors = [number_of(text, "--rates") for text in arguments.rates.split(",")]
    if not all(0 < factor < math.inf for factor in factors):
        raise ConfigError(["--rates must be above 0 and finite"])
    points = sweep(requests, target, deployments, factors, _acceptance(arguments.acceptance))
    rows = [point.row() for point in points]
    more = [
        name
        for name in ("fleet", "phases", "roles", "best")
        if any(getattr(p.replay, name) for p in points)
    ]
    if any(not point.replay.deployment.targets.are_none for point in points):
        more.append("targets")
    meanings = [in_words(point.replay) for point in points]
    shown = [_shown(row, words, more) for row, words in zip(rows, meanings, strict=True)]
    print(as_text(shown))
    reasons = (refused_in_words(point.replay, target, requests) for point in points)
    for words in dict.fromkeys(filter(None, reasons)):  # at several rates the same
        print(words)
    if arguments.out:
        title = f"{arguments.trace}: {target.model.name} on {target.machine.name}"
        report = Report(title, arguments.out)
        report.sweep("deployments", points, METRICS, "simulate")
        report.save()
    return 0


def _adapters(arguments: argparse.Namespace) -> dict[str, Any]:
    """Settings of as many made-up adapters as the flag says. Raises ConfigError."""
    num = arguments.adapters
    if num is None:
        return {}
    if arguments.config is not None:
        raise ConfigError(["--adapters: the --config says them, as lora_modules"])
    if arguments.loras is None:
        raise ConfigError(["--adapters needs --loras, the slots for them"])
    if not 1 <= num <= MOST_ADAPTERS:
        raise ConfigError([f"--adapters must be 1 to {MOST_ADAPTERS}, got {num}"])
    modules = ",".join(f"a{nth}=a{nth}" for nth in range(num))
    return lora_settings(arguments) | {"lora_modules": modules}


def compared_names(texts: Sequence[str]) -> list[str]:
    """The names of `--compare`: a text with settings is one, any other has commas between names."""
    return [name for text in texts for name in ([text] if "=" in text else text.split(","))]


def _check_use(
    arguments: argparse.Namespace, deployments: Sequence[Deployment | Phases | RoleSplit | Oracle]
) -> None:
    """Raise ConfigError for flags that no deployment has a use for."""
    plain = [each for each in deployments if isinstance(each, Deployment)]
    uses = {
        "--shift-threshold is for shift": (
            arguments.shift_threshold is None
            or any(each.policy_class.has_threshold for each in plain)
        ),
        "--host-memory is for phases": (
            arguments.host_memory is None or any(isinstance(each, Phases) for each in deployments)
        ),
        **{
            f"{name} is for fleets": any(each.widths for each in plain)
            for name in fleet_flags(arguments)
        },
    }
    if unused := [
        f"{flag}, which --compare does not name" for flag, used in uses.items() if not used
    ]:
        raise ConfigError(unused)


def in_words(replay: Replay) -> str:
    """What a deployment is, whatever it is called: its degrees, and how steps choose a mode."""
    deployment = replay.deployment
    if replay.best:
        return "the best of all, in hindsight"
    if replay.roles or replay.phases:
        return _sides_in_words(deployment.name)
    if deployment.widths:
        units, fixed = f"{deployment.grid.units} units of tp{deployment.tp}", deployment.fixed
        if fixed:
            return f"{units} that stay {spelled(fixed)}"
        return f"{units} in groups of {' '.join(map(str, deployment.widths))}"
    degrees = Degrees(deployment.dp, deployment.pp, deployment.sp, deployment.tp).name
    if deployment.sp == 1:
        return degrees
    gathers = ", gathers" if deployment.layout.gathers else ""
    return f"{degrees}{gathers}, {deployment.policy_class.in_words(deployment.threshold)}"


def _sides_in_words(name: str) -> str:
    """What prompts and decodes have for themselves, in turns or side by side."""
    head, _, rest = next(word for word in name.split(",") if ":" in word).partition(":")
    if head != ROLES:
        return f"prompts in {head}, decodes in {rest}"
    prefill, plus, decode = rest.partition("+")
    return f"prompts in {prefill}, decodes in {decode}" if plus else f"{prefill}, roles by cost"


def _host_bytes(text: str | None) -> int:
    try:
        return num_bytes_of("0" if text is None else text)
    except ValueError as error:
        raise ConfigError([f"--host-memory {error}"]) from None


def _acceptance(text: str | None) -> AcceptanceModel | None:
    if text is None:
        return None
    parts = text.split(",")
    if "=" not in text:
        return acceptance_from(parts)
    pairs = [part.partition("=") for part in parts]
    return acceptance_from({name: value for name, _, value in pairs})


def _shown(row: Mapping[str, Any], is_a: str, more: Sequence[str]) -> dict[str, Any]:
    """A row of the sweep that fits a screen; `more` of these are among the deployments."""
    shown = {
        "name": row["name"],
        "is": is_a,
        **({"users": row["users"]} if "users" in row else {"requests/s": row["rate"]}),
        "tokens/s": row["tokens_per_second"],
        "peak": row["peak_tokens_per_second"],
    }
    for metric in METRICS:
        values = [row[column] for column in percentiles(metric, ())]
        shown[f"{metric} p50/90/99 s"] = "/".join("-" if v is None else f"{v:.3g}" for v in values)
    shown["mean s"] = row["completion_mean_seconds"]
    if "targets" in more:
        shown["inside/s"] = row["goodput_requests_per_second"]
    kinds = ("base", "between", "shift")
    shown[f"steps {'/'.join(kinds)}"] = "/".join(str(row[f"steps_{kind}"]) for kind in kinds)
    if row["drafted_tokens"]:
        shown["accepted/step"] = row["accepted_per_step"]
        shown["drafted"], shown["accepted"] = row["drafted_tokens"], row["accepted_tokens"]
    if "phases" in more:
        names = ("prefill", "decode", "switch")
        shown["/".join(names)] = "/".join(f"{row[f'{name}_share']:.0%}" for name in names)
        shown["phase switches"] = row["phase_switches"]
        shown["weights GB"] = row["weights_moved_bytes"] / 1e9
        shown["KV GB there/back"] = "/".join(
            f"{row[f'kv_{name}_bytes'] / 1e9:.3g}" for name in ("parked", "restored")
        )
    if "fleet" in more:
        shown |= {name: row[name] for name in ("binds", "releases", "moved_sequences")}
        shown |= {"moved GB": row["moved_bytes"] / 1e9, "arrangements": row["arrangements"]}
    if "roles" in more:
        shown |= {"splits": row["splits"], "role changes": row["role_changes"]}
        shown |= {"sent": row["kv_sent_sequences"], "sent GB": row["kv_sent_bytes"] / 1e9}
    if "best" in more:
        shown["best in windows"] = row["best_in_windows"]
    return shown | {"switches": row["mode_switches"], "failed": row["failed"]}

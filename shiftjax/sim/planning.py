"""Which deployments a machine offers, and which one to take, in words. No JAX."""

from collections.abc import Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from shiftjax.costs.crossing import shift_threshold
from shiftjax.costs.work import Work
from shiftjax.deploy.deployment import Deployment
from shiftjax.deploy.expert_storage import experts_setting
from shiftjax.options import ConfigError
from shiftjax.parallel.arrangements import NO_FLEET, FleetOptions
from shiftjax.sim.best_row import AS_NEAR, GOALS, best_of
from shiftjax.sim.estimate import Estimate, FleetEstimate, Workload, estimate, fleet_estimate
from shiftjax.sim.modelled import Target, cost_model, least_tp, memory_of, why_not_stored
from shiftjax.sim.named import FLEET, deploy
from shiftjax.sim.phase_rates import all_degrees
from shiftjax.sim.stored_experts import estimate_stored


def all_deployments(target: Target, **budgets: Any) -> list[Deployment]:
    """Every (dp, sp, tp) of the machine with powers of two, and stages; those with SP shift.

    Stages are as many as divide the layers, each with TP alone. Where only TP over all devices has
    room for the weights, there is SP with gathered ones, too. Those that cannot store the weights
    are left out (`left_out_in_words`). Raises ConfigError if none can.
    """
    found, left_out = _by_storage(target, **budgets)
    if not found:
        raise ConfigError([*left_out.values()][:1])
    return found + gathered_deployments(target, **budgets)


def left_out_in_words(target: Target, **budgets: Any) -> str:
    """Return which deployments are left out of the table, and why; "" where none is."""
    by_reason: dict[str, list[str]] = {}
    for name, reason in _by_storage(target, **budgets)[1].items():
        by_reason.setdefault(reason, []).append(name)
    parts = (f"{', '.join(names)}: {reason}" for reason, names in by_reason.items())
    return "\n".join(f"left out: {part}" for part in parts)


def _by_storage(target: Target, **budgets: Any) -> tuple[list[Deployment], dict[str, str]]:
    """Return the deployments that can store the weights, and why others cannot, by name."""
    found = []
    for degrees in all_degrees(target):
        dp, pp, sp, tp = degrees
        if pp == 1:
            policy = ",policy=greedy" if sp > 1 else ""
            plain = deploy(target, degrees.name + policy, **budgets)
            found.append(replace(plain, name=f"dp{dp} sp{sp} tp{tp}"))
        elif sp == 1 and target.model.num_layers % pp == 0:
            found.append(deploy(target, degrees.name, **budgets))
    reasons = {each.name: why_not_stored(target, each) for each in found}
    left_out = {name: reason for name, reason in reasons.items() if reason}
    return [each for each in found if each.name not in left_out], left_out


def table_of(target: Target, workload: Workload, **budgets: Any) -> list[Estimate]:
    """What each of them does with such requests, with experts as they are best stored for these."""
    deployments = all_deployments(target, **budgets)
    return [estimate_stored(target, each, workload) for each in deployments]


def gathered_deployments(target: Target, **budgets: Any) -> list[Deployment]:
    """SP over all devices with gathered weights, if the weights leave it no room otherwise."""
    devices = target.machine.num_devices
    try:
        if not 1 < devices == least_tp(target):
            return []
        gathered = deploy(target, "gather,policy=greedy", **budgets)
    except ConfigError:  # they fit nowhere, or there are too few heads
        return []
    return [replace(gathered, name=f"gather sp{devices}")]


def gather_in_words(target: Target, **budgets: Any) -> str:
    """What gathered weights offer where SP has no room, in a sentence or two; "" where it has."""
    for gathered in gathered_deployments(target, **budgets):
        costs, most = cost_model(target, gathered), gathered.max_num_batched_tokens
        base, shift = costs.layout.base, costs.layout.shift
        pays_from, work = shift_threshold(costs) + 1, Work.prefill(most)
        text = (
            f"offered: --weights gather --sp {gathered.sp} stores as little as TP {gathered.sp} "
            f"({memory_of(target, gathered).weight_bytes / 1e9:.1f} GB a device) and computes "
            f"steps of {pays_from:,} tokens or more in base mode, whose weights it gathers"
        )
        if pays_from > most:
            return f"{text}: only with more than max_num_batched_tokens = {most:,}"
        saved = 1 - costs.device_seconds(base, work) / costs.device_seconds(shift, work)
        return f"{text}: {saved:.0%} less time for a step of {most:,}"
    return ""


def fleet_estimates(
    target: Target, workload: Workload, options: FleetOptions = NO_FLEET, **budgets: Any
) -> list[FleetEstimate]:
    """A fleet for every unit size whose widths can share what units hold, the smallest first."""
    found = []
    for tp in (1 << i for i in range(target.machine.num_devices.bit_length() - 1)):
        try:
            deployment = deploy(target, f"{FLEET}:tp{tp}", fleet=options, **budgets)
            found.append(fleet_estimate(target, deployment, workload))
        except ConfigError:  # as a shard of all devices would cut a group of codes
            continue
    return found


def stages_in_words(estimates: Sequence[Estimate]) -> str:
    """Whether stages pay for this workload, in one sentence; "" where none fit."""
    fitting = [one for one in estimates if one.fits]
    staged = [one for one in fitting if one.deployment.pp > 1]
    plain = [one for one in fitting if one.deployment.pp == 1]
    if not staged:
        return ""
    best = max(staged, key=lambda one: one.tokens_per_second)
    if not plain:
        return f"stages: nothing fits without; {best.deployment.name} has most tokens per second"
    other = max(plain, key=lambda one: one.tokens_per_second)
    more = best.tokens_per_second / other.tokens_per_second
    longer = best.tpot_seconds / other.tpot_seconds
    than = f"of {other.deployment.name}, the best without"
    return (
        f"stages: {best.deployment.name} has {more:.2f} times the tokens per second {than}, when "
        f"full, and {longer:.2f} times its time per token, when one request is alone"
    )


# ------------------------------------------------------------------ the best row

IN_WORDS = MappingProxyType(
    {
        "ttft": "is the first with its first token",
        "tpot": "has the least time per token",
        "latency": "is the first to answer a request that is alone",
        "throughput": "has most tokens per second when full",
    }
)


def recommend(
    target: Target, workload: Workload, goal: str | None = None, **budgets: Any
) -> tuple[Deployment, str] | None:
    """The best row of the table for a goal, with its threshold, and the reason; None: none fits.

    By prices of what has run (`Machine.as_run`): where the switch's sums fail their check, XLA's
    take their place, and the mesh stays. Over several hosts it is one engine: replicas are told of
    beside it (`hosts_in_words`).
    """
    as_run = replace(target, machine=target.machine.as_run)
    estimates = table_of(as_run, workload, **budgets)
    if target.machine.num_hosts > 1:
        plain = [e for e in estimates if e.fits and e.deployment.pp == 1]
        widest = min((e.deployment.dp for e in plain), default=1)
        estimates = [e for e in plain if e.deployment.dp == widest]
    best = best_of(estimates, workload, goal)
    if best is None:
        return None
    chosen = best.deployment
    reason = _reason([one for one in estimates if one.fits], best, goal)
    has_experts, is_wide = target.model.experts is not None, target.machine.num_hosts > 1
    if chosen.layout.gathers or (chosen.sp > 1 and (has_experts or is_wide)):
        # A threshold leaves out the modes between, which gather less, and sum inside hosts. Of
        # experts they read less than BASE and move less than SHIFT.
        chosen = replace(chosen, policy="cost")
    elif chosen.sp > 1:
        degrees = f"dp={chosen.dp},sp={chosen.sp},tp={chosen.tp},policy=threshold"
        chosen = deploy(target, degrees, **budgets)
        threshold = shift_threshold(cost_model(target, chosen))
        chosen = replace(chosen, threshold=threshold)
        reason += f". Steps of up to {threshold:,} tokens are quicker in SHIFT"
    return replace(chosen, name="recommended"), f"{reason}."


def degree_flags(deployment: Deployment) -> str:
    """The flags of `shiftjax serve` that make its mesh, and say how far it splits experts."""
    degrees = deployment.dp, deployment.pp
    named = zip(("--dp", "--pp"), degrees, strict=True)
    flags = [f"{flag} {degree}" for flag, degree in named if degree > 1]
    flags += [f"--sp {deployment.sp}", f"--tp {deployment.tp}"]
    if (experts := experts_setting(deployment)) is not None:
        flags.append(f"--experts {experts}")
    return " ".join(flags + (["--weights gather"] if deployment.layout.gathers else []))


def _reason(fitting: Sequence[Estimate], best: Estimate, goal: str | None) -> str:
    """Why this row, in a sentence or two without the full stop."""
    name = best.deployment.name.strip()
    if goal is not None:
        return f"{name} {IN_WORDS[goal]}, of {len(fitting)} that fit"
    ttft = best.ttft_seconds / min(one.ttft_seconds for one in fitting)
    tpot = best.tpot_seconds / min(one.tpot_seconds for one in fitting)
    share = best.tokens_per_second / max(one.tokens_per_second for one in fitting)
    return (
        f"{name} takes {ttft:.2f} times the least time to the first token, {tpot:.2f} times the "
        f"least per token, and has {share:.0%} of the most tokens per second. Of "
        f"{len(fitting)} that fit none has a product of these ratios that is {AS_NEAR - 1:.0%} "
        "less, and of those as near none has more tokens per second; "
        f"--goal {', '.join(GOALS)} ask for one of them"
    )


def with_switch_in_words(target: Target, chosen: Deployment, in_table: Estimate | None) -> str:
    """Which row sums by the switch would recommend, in a sentence; "" if the same, or none."""
    machine = target.machine
    if in_table is None or machine.as_run == machine or machine.num_hosts > 1:
        return ""
    one = in_table.deployment
    if (one.dp, one.pp, one.sp, one.tp) == (chosen.dp, chosen.pp, chosen.sp, chosen.tp):
        return ""
    return (
        f"switch: with its sums, as in the table, {one.name.strip()} would be recommended "
        f"({degree_flags(one)}); nobody has run these kernels, so XLA's sums decide"
    )


def beside_in_words(one: Estimate, recommended: Estimate) -> str:
    """What a row of the user's own settings has beside the recommended one, in a sentence."""
    if not one.fits:
        return f"{one.deployment.name}: these settings have no room for such a request"
    ttft = one.ttft_seconds / recommended.ttft_seconds
    tpot = one.tpot_seconds / recommended.tpot_seconds
    share = one.tokens_per_second / recommended.tokens_per_second
    return (
        f"{one.deployment.name}: these settings take {ttft:.2f} times the time to the first token "
        f"of what is recommended, {tpot:.2f} times its time per token, and have {share:.0%} of "
        "its tokens per second"
    )


# ------------------------------------------------------------------ several hosts


def hosts_in_words(target: Target, workload: Workload, **budgets: Any) -> str:
    """One engine over all hosts, or a server on each behind a router; "" of one host.

    A replica on each host moves nothing between hosts, so it is better wherever it can be had: one
    engine is for a model that no host holds, and for a request whose KV none does.
    """
    hosts = target.machine.num_hosts
    if hosts == 1:
        return ""
    over_all = _recommended(target, workload, **budgets)
    alone = _recommended(replace(target, machine=target.machine.one_host), workload, **budgets)
    if over_all is None:
        return ""
    if alone is None:
        words = f"a request of {workload.num_tokens:,} tokens"
        return f"one engine over {hosts} hosts: no host alone has room for the model and {words}"
    own, room = alone.deployment, over_all.deployment.longest_in(over_all.memory)
    longest = own.longest_in(alone.memory)
    limit = f"is for requests of more than {longest:,} tokens: it holds {room:,}"
    if min(room, target.model.max_position_embeddings) <= longest:
        limit = "has room for no longer requests"
    return (
        f"replicas: a server on each of {hosts} hosts ({degree_flags(own)}) behind a router has "
        f"{_figures(alone, hosts)}; one engine over all of them has "
        f"{_figures(over_all)}, and {limit}"
    )


def _figures(one: Estimate, times: int = 1) -> str:
    return (
        f"{times * one.tokens_per_second:,.0f} tokens/s when full, and for a request alone "
        f"{1e3 * one.ttft_seconds:.0f} ms to the first token, {1e3 * one.tpot_seconds:.1f} ms "
        "for each after it"
    )


def _recommended(target: Target, workload: Workload, **budgets: Any) -> Estimate | None:
    """What a plan recommends, with all modes to choose from; None: there is no room."""
    try:
        found = recommend(target, workload, **budgets)
    except ConfigError:  # not even the weights fit
        return None
    return found and estimate(target, replace(found[0], policy="cost"), workload)

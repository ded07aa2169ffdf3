"""Which deployments a machine offers, and which one to take, in words. No JAX."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from shiftjax.costs.crossing import shift_threshold
from shiftjax.costs.work import Work
from shiftjax.deploy.deployment import Deployment
from shiftjax.draft_options import NO_DRAFTS
from shiftjax.options import ConfigError
from shiftjax.parallel.arrangements import NO_FLEET, FleetOptions
from shiftjax.sim.estimate import Estimate, FleetEstimate, Workload, estimate, fleet_estimate
from shiftjax.sim.modelled import Target, cost_model, least_tp, memory_of
from shiftjax.sim.named import FLEET, deploy
from shiftjax.sim.phase_rates import all_degrees, most_parts


def all_deployments(target: Target, **budgets: Any) -> list[Deployment]:
    """Every (dp, sp, tp) of the machine with powers of two, and stages; those with SP shift.

    Stages are as many as divide the layers, each with TP alone; with drafts there are none. Where
    only TP over all devices has room for the weights, there is SP with gathered ones, too.
    """
    found, drafts = [], budgets.get("drafts", NO_DRAFTS)
    for degrees in all_degrees(target):
        dp, pp, sp, tp = degrees
        if pp == 1:
            policy = ",policy=greedy" if sp > 1 else ""
            plain = deploy(target, degrees.name + policy, **budgets)
            found.append(replace(plain, name=f"dp{dp} sp{sp} tp{tp}"))
        elif sp == 1 and target.model.num_layers % pp == 0 and drafts.speculation == "none":
            found.append(deploy(target, degrees.name, **budgets))
    return found + gathered_deployments(target, **budgets)


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
        except ConfigError:
            continue
        found.append(fleet_estimate(target, deployment, workload))
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


def recommend(target: Target, workload: Workload, **budgets: Any) -> tuple[Deployment, str] | None:
    """The base configuration by the rule, with its threshold, and the reason in one sentence.

    TP is the least that leaves room for one request; None where no TP does.
    """
    num, most = target.machine.num_devices, most_parts(target.model)
    size = max(size for size in range(1, min(num, most) + 1) if num % size == 0)
    for tp in (tp for tp in range(least_tp(target), size + 1) if size % tp == 0):
        degrees = f"dp={num // size},sp={size // tp},tp={tp},policy=threshold"
        shifting = replace(deploy(target, degrees, **budgets), name="recommended")
        memory, costs = memory_of(target, shifting), cost_model(target, shifting)
        if memory.num_kv_tokens >= workload.num_tokens:
            break
    else:
        return None
    threshold = shift_threshold(costs) if shifting.sp > 1 else 0
    weights = (memory.weight_bytes + memory.shift_weight_bytes) / 1e9
    reason = (
        f"TP {tp} is the least whose share of the weights ({weights:.1f} GB of "
        f"{target.machine.memory_bytes / 1e9:.0f} GB) leaves room for KV "
        f"({memory.num_kv_tokens:,} tokens)"
    )
    if shifting.sp > 1:
        reason += (
            f"; SP takes the rest ({shifting.sp}), because what it moves per token shrinks with "
            f"SP. Steps of up to {threshold} tokens are quicker in SHIFT"
        )
    return replace(shifting, threshold=threshold), f"{reason}."


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
    own, room = alone.deployment, over_all.memory.num_kv_tokens
    longest = alone.memory.num_kv_tokens
    limit = f"is for requests of more than {longest:,} tokens: it holds {room:,}"
    if min(room, target.model.max_position_embeddings) <= longest:
        limit = "has room for no longer requests"
    return (
        f"replicas: a server on each of {hosts} hosts (--sp {own.sp} --tp {own.tp}) behind a "
        f"router has {_figures(alone, hosts)}; one engine over all of them has "
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

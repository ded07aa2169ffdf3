"""Which deployments fit a machine and what each would do, in closed form. No JAX."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from shiftjax.core.policy import shift_threshold
from shiftjax.costs.memory import Memory
from shiftjax.costs.stages import GroupCosts
from shiftjax.costs.work import Work
from shiftjax.deploy.deployment import Deployment
from shiftjax.options import ConfigError
from shiftjax.parallel.grid import Mode
from shiftjax.sim.deployment import (
    Target,
    cost_model,
    deploy,
    deploy_degrees,
    deploy_gathered,
    least_tp,
    memory_of,
    modes_of,
)
from shiftjax.sim.phase_rates import Batch, all_degrees, mixed_rate


@dataclass(frozen=True)
class Workload:
    """The requests that a plan is made for, all alike."""

    num_prompt_tokens: int
    num_output_tokens: int


@dataclass(frozen=True)
class Estimate:
    """One deployment under one workload. A deployment that shifts takes the better mode."""

    deployment: Deployment
    memory: Memory
    fits: bool
    ttft_seconds: float  # one request alone
    tpot_seconds: float  # one request alone
    tokens_per_second: float  # input and output, saturated, all replicas

    def row(self) -> dict[str, Any]:
        """For a table or a file."""
        memory, gigabyte = self.memory, 1e9
        return {
            "name": self.deployment.name,
            "dp": self.deployment.dp,
            "pp": self.deployment.pp,
            "sp": self.deployment.sp,
            "tp": self.deployment.tp,
            "fits": self.fits,
            "weights_gb": memory.weight_bytes / gigabyte,
            "shift_copy_gb": memory.shift_weight_bytes / gigabyte,
            "workspace_gb": memory.workspace_bytes / gigabyte,
            "kv_gb": memory.kv_bytes / gigabyte,
            "kv_tokens": memory.num_kv_tokens * self.deployment.dp,
            "ttft_seconds": self.ttft_seconds,
            "tpot_seconds": self.tpot_seconds,
            "tokens_per_second": self.tokens_per_second,
        }


def estimate(target: Target, deployment: Deployment, workload: Workload) -> Estimate:
    """What a deployment can hold and how quick it is; of a pipeline, its fullest stage."""
    memory, costs = memory_of(target, deployment), cost_model(target, deployment)
    prompt, output = workload.num_prompt_tokens, workload.num_output_tokens
    fits = memory.num_kv_tokens >= prompt + output
    if not fits:
        return Estimate(deployment, memory, False, 0.0, 0.0, 0.0)
    decode = Work.decode(1, prompt + output // 2)
    modes = modes_of(costs, deployment)
    return Estimate(
        deployment,
        memory,
        True,
        ttft_seconds=_prefill_seconds(costs, deployment, prompt),
        tpot_seconds=min(_seconds_alone(costs, mode, decode) for mode in modes),
        tokens_per_second=saturated_tokens_per_second(costs, deployment, memory, workload),
    )


def _prefill_seconds(costs: GroupCosts, deployment: Deployment, num_tokens: int) -> float:
    """A prompt alone, in chunks of the step's budget, which follow each other through stages."""
    total, start, modes = 0.0, 0, modes_of(costs, deployment)
    while start < num_tokens:
        chunk = min(num_tokens - start, deployment.max_num_batched_tokens)
        work = Work.prefill(chunk, start)
        start += chunk
        is_last = start == num_tokens
        seconds = (
            _seconds_alone(costs, mode, work) if is_last else costs.seconds(mode, work)
            for mode in modes
        )
        total += min(seconds)
    return total


def _seconds_alone(costs: GroupCosts, mode: Mode, work: Work) -> float:
    """Of a step that the next one needs the result of, in all stages."""
    device, host = costs.device_seconds(mode, work), costs.host_seconds(work)
    return max(device, host) if costs.engine.overlaps else device + host


def saturated_tokens_per_second(
    costs: GroupCosts, deployment: Deployment, memory: Memory, workload: Workload
) -> float:
    """Throughput of a stream that never ends, of all replicas.

    As many sequences run as there are seats and KV for, a sequence holding half its output on
    average; or fewer, where more would be padded to a step that is slower by more. What a step
    holds is in `phase_rates.mixed_rate`.
    """
    batch = Batch.of([(workload.num_prompt_tokens, workload.num_output_tokens)])
    fits = min(memory.num_kv_tokens / batch.resident, deployment.max_num_seqs) / deployment.pp
    fits = max(1.0, min(fits, deployment.max_num_batched_tokens / 2))
    sizes = {fits, *(size for size in deployment.step_sizes if size < fits)}
    rate = max(mixed_rate(costs, deployment, batch, size) for size in sizes)
    return rate * (workload.num_prompt_tokens + workload.num_output_tokens)


def all_deployments(target: Target, **budgets: Any) -> list[Deployment]:
    """Every (dp, sp, tp) of the machine with powers of two, and stages; those with SP shift.

    Stages are as many as divide the layers, each with TP alone. Where only TP over all devices has
    room for the weights, there is SP with gathered ones, too.
    """
    devices = target.machine.num_devices
    sizes = [size for size in (2**k for k in range(devices.bit_length())) if devices % size == 0]
    most = target.model.num_heads
    return (
        [
            deploy(
                target,
                f"dp{devices // (sp * tp)} sp{sp} tp{tp}",
                (devices // (sp * tp), sp, tp),
                "greedy" if sp > 1 else "base",
                **budgets,
            )
            for sp in sizes
            for tp in sizes
            if devices % (sp * tp) == 0 and sp * tp <= most
        ]
        + [
            deploy_degrees(target, degrees, **budgets)
            for degrees in all_degrees(target)
            if degrees.pp > 1 and degrees.sp == 1 and target.model.num_layers % degrees.pp == 0
        ]
        + gathered_deployments(target, **budgets)
    )


def gathered_deployments(target: Target, **budgets: Any) -> list[Deployment]:
    """SP over all devices with gathered weights, if the weights leave it no room otherwise."""
    devices, name = target.machine.num_devices, f"gather sp{target.machine.num_devices}"
    try:
        leaves_none = 1 < devices == least_tp(target)
        return [deploy_gathered(target, name, "greedy", **budgets)] if leaves_none else []
    except ConfigError:  # they fit nowhere, or there are too few heads
        return []


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
    tp, num = least_tp(target), target.machine.num_devices
    needed = workload.num_prompt_tokens + workload.num_output_tokens
    while True:
        shifting = deploy(target, "recommended", (1, num // tp, tp), "threshold", **budgets)
        memory, costs = memory_of(target, shifting), cost_model(target, shifting)
        if memory.num_kv_tokens >= needed:
            break
        if tp == num:
            return None
        tp = next(larger for larger in range(tp + 1, num + 1) if num % larger == 0)
    threshold = shift_threshold(costs) if shifting.sp > 1 else 0
    weights = (memory.weight_bytes + memory.shift_weight_bytes) / 1e9
    reason = (
        f"TP {tp} is the least whose share of the weights ({weights:.1f} GB of "
        f"{target.machine.memory_bytes / 1e9:.0f} GB) leaves room for KV "
        f"({memory.num_kv_tokens:,} tokens); SP takes the rest ({shifting.sp}), because what it "
        f"moves per token shrinks with SP. Steps of up to {threshold} tokens are quicker in SHIFT."
    )
    return replace(shifting, threshold=threshold), reason

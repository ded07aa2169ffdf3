"""What a deployment does with requests, in closed form: memory, latencies, throughput. No JAX.

`estimate` answers for one deployment under one workload. `fleet_estimate` answers for each width of
a fleet, whose units of `tp` devices hold the whole model. Larger units leave more memory for KV;
smaller ones can be split further, into replicas that do not talk to each other.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from shiftjax.core.policy import wanted_modes
from shiftjax.costs.group_costs import GroupCosts
from shiftjax.costs.memory import Memory
from shiftjax.costs.work import Work
from shiftjax.deploy.deployment import Deployment
from shiftjax.parallel.grid import Mode
from shiftjax.parallel.layout import Layout
from shiftjax.sim.modelled import Target, cost_model, memory_of, modes_of, policy_of
from shiftjax.sim.phase_rates import Batch, mixed_rate

MOST_SEQUENCES = 4096  # that regimes are predicted for


@dataclass(frozen=True)
class Workload:
    """The requests that a plan is made for, all alike."""

    num_prompt_tokens: int
    num_output_tokens: int

    @property
    def num_tokens(self) -> int:
        """Of a request, in and out."""
        return self.num_prompt_tokens + self.num_output_tokens


@dataclass(frozen=True)
class Estimate:
    """One deployment under one workload. A deployment that shifts takes the better mode."""

    deployment: Deployment
    memory: Memory
    fits: bool
    ttft_seconds: float = 0.0  # one request alone
    tpot_seconds: float = 0.0  # one request alone
    tokens_per_second: float = 0.0  # input and output, saturated, all replicas

    def alone_seconds(self, workload: Workload) -> float:
        """Of a request that is alone, to its end."""
        return self.ttft_seconds + (workload.num_output_tokens - 1) * self.tpot_seconds

    @property
    def why_not(self) -> str:
        """Why a request does not fit; "" where one does."""
        if self.fits:
            return ""
        room = self.deployment.longest_in(self.memory)
        return f"room for {room:,} tokens" if room > 0 else "no room beside the weights"

    def row(self) -> dict[str, Any]:
        """For a table or a file."""
        memory, gigabyte, deployment = self.memory, 1e9, self.deployment
        return {
            **{name: getattr(deployment, name) for name in ("name", "dp", "pp", "sp", "tp")},
            **_experts(deployment.layout),
            "fits": self.why_not or True,
            "weights_gb": memory.weight_bytes / gigabyte,
            "shift_copy_gb": memory.shift_weight_bytes / gigabyte,
            "workspace_gb": memory.workspace_bytes / gigabyte,
            "kv_gb": max(0, memory.kv_bytes) / gigabyte,
            "kv_tokens": max(0, memory.num_kv_tokens) * deployment.dp,
            **self.times(),
        }

    def times(self) -> dict[str, float | None]:
        """Its columns of latencies and throughput; None where nothing fits."""
        names = ("ttft_seconds", "tpot_seconds", "tokens_per_second")
        return {name: getattr(self, name) if self.fits else None for name in names}


def _experts(layout: Layout) -> dict[str, int]:
    """How many ways devices split the experts that they store, where there are some."""
    if layout.model.experts is None:
        return {}
    return {"experts_split": layout.least_ways}


def estimate(target: Target, deployment: Deployment, workload: Workload) -> Estimate:
    """What a deployment can hold and how quick it is; of a pipeline, its fullest stage."""
    memory, costs = memory_of(target, deployment), cost_model(target, deployment)
    prompt, output = workload.num_prompt_tokens, workload.num_output_tokens
    if deployment.longest_in(memory) < prompt + output:
        return Estimate(deployment, memory, False)
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
    holds is in `stages.mixed_rate`.
    """
    batch = Batch.of([(workload.num_prompt_tokens, workload.num_output_tokens)])
    room = deployment.kv_tokens_of(memory, math.ceil(batch.resident))
    fits = min(room / batch.resident, deployment.max_num_seqs) / deployment.pp
    fits = max(1.0, min(fits, deployment.max_num_batched_tokens / 2))
    sizes = {fits, *(size for size in deployment.step_sizes if size < fits)}
    rate = max(mixed_rate(costs, deployment, batch, size) for size in sizes)
    return rate * (workload.num_prompt_tokens + workload.num_output_tokens)


class FleetEstimate(NamedTuple):
    """A fleet under one workload, all its groups of one width at a time."""

    deployment: Deployment
    memory: Memory
    by_width: dict[int, Estimate]
    regimes: dict[int, int]  # the most decoding sequences that each width is quickest for
    num_programs: dict[int, int]  # steps to compile, by width; others of a width are loaded
    num_moves: int  # programs that move blocks: two of every pair of widths, one of every width
    padding: tuple[float, float]  # more query heads, a larger cache than a unit alone would have

    @property
    def best(self) -> int:
        """The width of most tokens per second."""
        return max(self.by_width, key=lambda width: self.by_width[width].tokens_per_second)

    @property
    def widest(self) -> Estimate:
        """With groups as wide as there can be, which take the longest requests."""
        return self.by_width[self.deployment.widths[-1]]

    def kv_tokens(self, width: int) -> int:
        """Tokens that the KV cache of one group holds: the longest request it can serve."""
        of_width = self.deployment.of_width(width)
        blocks = self.memory.num_kv_tokens // self.deployment.block_size
        return blocks * of_width.block_size

    def shown(self) -> dict[str, Any]:
        """A row for people."""
        widths, units = self.deployment.widths, self.deployment.grid.units
        wide, times = widths[-1], self.widest.times()
        longest = (
            f"{self.kv_tokens(widths[0]):,} in a narrowest, {self.kv_tokens(wide):,} in a widest"
        )
        return {
            "name": self.deployment.name,
            "is": f"{units} units of tp{self.deployment.tp} in groups of {_listed(widths)}",
            "fits": self.widest.why_not or True,
            "longest request": longest if self.widest.fits else None,
            "ttft_seconds": times["ttft_seconds"],
            "tpot_seconds": times["tpot_seconds"],
            "tokens_per_second": self.most_tokens,
            "in groups of": self.best if self.widest.fits else None,
            "quickest": self._quickest(),
            "programs": sum(self.num_programs.values()) + self.num_moves,
        }

    def _quickest(self) -> str:
        """For which numbers of decoding sequences each width is the quickest."""
        *first, (last, _) = self.regimes.items()
        parts = [f"{width} wide to {num:,} sequences" for width, num in first]
        return ", ".join([*parts, f"then {last}" if parts else f"{last} wide"])

    @property
    def most_tokens(self) -> float | None:
        """Per second, in the width of which that is most; None: there is no room."""
        return self.by_width[self.best].times()["tokens_per_second"]

    def row(self) -> dict[str, Any]:
        """For a table or a file."""
        widths, units = self.deployment.widths, self.deployment.grid.units
        return {
            "name": self.deployment.name,
            "tp": self.deployment.tp,
            "units": units,
            "widths": ",".join(map(str, widths)),
            "fits": self.widest.why_not or True,
            "weights_gb": self.memory.weight_bytes / 1e9,
            "kv_tokens": self.kv_tokens(widths[-1]) * (units // widths[-1]),
            "reach_narrow": self.kv_tokens(widths[0]),
            "reach_wide": self.kv_tokens(widths[-1]),
            **self.widest.times(),
            "tokens_per_second": self.most_tokens,
            "at_width": self.best,
            "decodes_by_width": " ".join(f"{w}:{n}" for w, n in self.regimes.items()),
            "programs": "+".join(map(str, self.num_programs.values())) + f"+{self.num_moves}",
            "padded_heads": f"+{self.padding[0]:.0%} q, +{self.padding[1]:.0%} kv",
        }


def _listed(numbers: Sequence[int]) -> str:
    """As 1, 2 or 4."""
    *first, last = map(str, numbers)
    return f"{', '.join(first)} or {last}" if first else last


def fleet_estimate(target: Target, deployment: Deployment, workload: Workload) -> FleetEstimate:
    """What one fleet holds, how quick it is, and what has to be compiled for it."""
    by_width, programs = {}, {}
    for width, of_width in deployment.by_width.items():
        costs = cost_model(target, of_width)
        by_width[width] = estimate(target, of_width, workload)
        policy = policy_of(of_width, costs, costs)
        wanted = wanted_modes(policy, of_width.buckets, modes_of(costs, of_width))
        programs[width] = sum(map(len, wanted.values()))
    widths, layout = len(deployment.widths), deployment.layout.of_width(1)
    alone = Layout(layout.model, 1, layout.tp)
    return FleetEstimate(
        deployment,
        memory_of(target, deployment),
        by_width,
        _regimes(target, deployment, workload),
        programs,
        widths * widths,
        (
            layout.num_heads / alone.num_heads - 1,
            layout.cached_numbers / alone.cached_numbers - 1,
        ),
    )


def _regimes(target: Target, deployment: Deployment, workload: Workload) -> dict[int, int]:
    """Of every width that is somewhere the quickest, the most sequences for which it is."""
    context = workload.num_prompt_tokens + workload.num_output_tokens // 2
    units = deployment.grid.units
    costs = {w: cost_model(target, each) for w, each in deployment.by_width.items()}

    def seconds(width: int, num: int) -> float:
        model, groups = costs[width], units // width
        work = Work.decode(-(-num // groups), context)
        return min(model.seconds(mode, work) for mode in modes_of(model, deployment))

    found: dict[int, int] = {}
    for num in (1 << i for i in range(MOST_SEQUENCES.bit_length())):
        found[min(costs, key=lambda width: seconds(width, num))] = num
    return found

"""What a fleet of each unit size would be: memory against reach, in closed form. No JAX.

A unit of `tp` devices holds the whole model, whatever groups units form. Larger units leave more
memory for KV; smaller ones can be split further, into replicas that do not talk to each other.
"""

from typing import Any, NamedTuple

from shiftjax.core.policy import wanted_modes
from shiftjax.costs.memory import Memory
from shiftjax.costs.work import Work
from shiftjax.deploy.deployment import Deployment
from shiftjax.options import ConfigError
from shiftjax.parallel.fleet import NO_FLEET, FleetOptions
from shiftjax.parallel.layout import Layout
from shiftjax.sim.deployment import Target, cost_model, memory_of, modes_of
from shiftjax.sim.deployment import policy_of as mode_policy_of
from shiftjax.sim.named import FLEET, deploy_named
from shiftjax.sim.planning import Estimate, Workload, estimate

MOST_SEQUENCES = 4096  # that regimes are predicted for


class FleetEstimate(NamedTuple):
    """A fleet under one workload, all its groups of one width at a time."""

    deployment: Deployment
    memory: Memory
    by_width: dict[int, Estimate]
    regimes: dict[int, int]  # the most decoding sequences that each width is quickest for
    num_programs: dict[int, int]  # steps to compile, by width; others of a width are loaded
    num_moves: int  # programs that move blocks: two of every pair of widths, one of every width
    padding: tuple[float, float]  # more query heads, more KV heads than a unit alone would have

    @property
    def best(self) -> int:
        """The width of most tokens per second."""
        return max(self.by_width, key=lambda width: self.by_width[width].tokens_per_second)

    def kv_tokens(self, width: int) -> int:
        """Tokens that the KV cache of one group holds: the longest request it can serve."""
        of_width = self.deployment.of_width(width)
        blocks = self.memory.num_kv_tokens // self.deployment.block_size
        return blocks * of_width.block_size

    def row(self) -> dict[str, Any]:
        """For a table or a file."""
        widths = self.deployment.widths
        narrow, wide = widths[0], widths[-1]
        units = self.deployment.grid.units
        return {
            "name": self.deployment.name,
            "tp": self.deployment.tp,
            "units": units,
            "widths": ",".join(map(str, widths)),
            "fits": self.by_width[wide].fits,
            "weights_gb": self.memory.weight_bytes / 1e9,
            "kv_tokens": self.kv_tokens(wide) * (units // wide),
            "reach_narrow": self.kv_tokens(narrow),
            "reach_wide": self.kv_tokens(wide),
            "ttft_seconds": self.by_width[wide].ttft_seconds,
            "tpot_seconds": self.by_width[wide].tpot_seconds,
            "tokens_per_second": self.by_width[self.best].tokens_per_second,
            "at_width": self.best,
            "decodes_by_width": " ".join(f"{w}:{n}" for w, n in self.regimes.items()),
            "programs": "+".join(map(str, self.num_programs.values())) + f"+{self.num_moves}",
            "padded_heads": f"+{self.padding[0]:.0%} q, +{self.padding[1]:.0%} kv",
        }


def fleet_estimates(
    target: Target, workload: Workload, options: FleetOptions = NO_FLEET, **budgets: Any
) -> list[FleetEstimate]:
    """A fleet for every unit size whose widths can share what units hold, the smallest first."""
    found = []
    for tp in (1 << i for i in range(target.machine.num_devices.bit_length() - 1)):
        try:
            deployment = deploy_named(target, f"{FLEET}:tp{tp}", fleet=options, **budgets)
        except ConfigError:
            continue
        assert isinstance(deployment, Deployment)  # a fleet has no phases
        found.append(fleet_estimate(target, deployment, workload))
    return found


def fleet_estimate(target: Target, deployment: Deployment, workload: Workload) -> FleetEstimate:
    """What one fleet holds, how quick it is, and what has to be compiled for it."""
    by_width, programs = {}, {}
    for width, of_width in deployment.by_width.items():
        costs = cost_model(target, of_width)
        by_width[width] = estimate(target, of_width, workload)
        policy = mode_policy_of(of_width, costs, costs)
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
            layout.kv_heads_per_device / alone.kv_heads_per_device - 1,
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

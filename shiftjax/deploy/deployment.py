"""What the settings come to for one model on one machine: resolved once, read by all. No JAX.

The engine is built from a `Deployment`; `check`, `plan` and the simulator ask the same one what
it holds and does, with the memory of real devices or of a machine file.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, NamedTuple

from pallas_kernels.window import Window
from shiftjax.arch.cache import blocks_kept, longest_kept
from shiftjax.arch.config import stages_of
from shiftjax.arch.formats import Formats
from shiftjax.arch.numerics import NUMERICS, Numerics, NumericsName
from shiftjax.core.limits import RequestLimits
from shiftjax.core.policies import POLICIES
from shiftjax.core.policy import Policy
from shiftjax.core.scheduler_config import SchedulerConfig
from shiftjax.costs.buckets import Bucket, doubling, make_buckets
from shiftjax.costs.expert_modes import ExpertModes, by_bytes
from shiftjax.costs.group_costs import GroupCosts, PipelineCosts
from shiftjax.costs.machine import EngineOverhead, Machine
from shiftjax.costs.memory import (
    Memory,
    block_token_bytes,
    kv_token_bytes,
    shift_copy_bytes,
    temporary_bytes,
    weight_bytes,
)
from shiftjax.costs.step_costs import CostModel
from shiftjax.costs.sum_buffers import sum_buffer_bytes, switch_buffer_bytes
from shiftjax.deploy.budgets import OF_CPUS, Budgets
from shiftjax.draft_options import NO_DRAFTS, DraftOptions
from shiftjax.host_tier.extents import EXTENT_SIZES, MOST_AHEAD, MOST_IN_FLIGHT
from shiftjax.lora_options import NO_LORA, LoraOptions
from shiftjax.options import ConfigError
from shiftjax.parallel.arrangements import (
    NO_FLEET,
    Arrangement,
    FleetOptions,
    parse_arrangement,
)
from shiftjax.parallel.grid import Grid, Mode
from shiftjax.parallel.layout import Layout
from shiftjax.targets import NO_TARGETS, Targets


class Devices(NamedTuple):
    """The devices of a machine, and the memory of each."""

    num_devices: int
    total_bytes: int
    free_bytes: int  # before weights are loaded
    pool_share: float = 1.0  # of what weights leave, for KV
    per_host: int = 0  # 0: all are on one host
    budgets: Budgets = OF_CPUS  # of a step, where settings say nothing
    is_priced: bool = True  # what a step costs is known, whatever settings say
    has_kernels: bool = True  # of attention, or may have


@dataclass(frozen=True)
class Deployment:
    """A model on `dp` groups of devices, in number formats, with the budgets of a group.

    `weights` is how SHIFT comes by its weights. An engine without `token_buckets` has steps of
    any size. `num_blocks` counts the null block; 0: as many as fit. Where the model has several
    cache groups, each block is of one of them.
    """

    name: str  # in tables
    layout: Layout  # the model, SP and TP
    formats: Formats
    dp: int
    policy: str
    threshold: int | None  # steps of more tokens run in BASE; None: where the costs say it pays
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    token_buckets: tuple[int, ...] = ()
    weights: str = "alias"
    attention: Literal["auto", "pallas", "xla"] = "auto"
    block_size: int = 16
    num_blocks: int = 0
    memory_fraction: float = 0.9
    prefix_caching: bool = True
    preemption: Literal["recompute", "swap"] = "recompute"
    host_bytes: int = 0  # of host memory for KV blocks, of all groups
    disk_dir: str | None = None  # for KV blocks that fall out of it; None: they are lost
    disk_bytes: int = 0  # that files there may have
    retention_fraction: float = 0.0  # of the blocks, that requests may keep for later ones
    drafts: DraftOptions = NO_DRAFTS
    max_draft_rows: int = 0
    widths: tuple[int, ...] = ()  # units of the groups of a fleet, ascending; (): not a fleet
    fleet: FleetOptions = NO_FLEET
    hash_size: int = 0  # tokens that a prefix is hashed by, in all widths; 0: a block's
    logprobs_mode: Literal["raw_logprobs", "processed_logprobs"] = "raw_logprobs"
    routed_experts: bool = False  # steps tell which experts their tokens chose
    deterministic: bool = False  # attention of a sequence does not depend on the others
    gpu_options: str = "auto"  # XLA's, as the setting spells them
    pp: int = 1  # stages of a group, each on `sp * tp` devices
    parks: bool = False  # computes prompts alone (`phases/resharding.py`)
    overlap: bool = True  # a step is scheduled while the one before it runs
    machine: str | None = None  # what predictions take the devices for; None: by their kind
    seed: int = 0  # of requests that bring none, and of random weights
    sizes_by: Literal["cost", "largest"] = "cost"  # of steps with prompts, where costs are known
    targets: Targets = NO_TARGETS  # of latency, that sizes of steps are chosen for, too
    lora: LoraOptions = NO_LORA  # which adapters are served
    kv_scales: str = ""  # name of the scales of a KV cache of codes: equal ones have equal names

    @cached_property
    def stages(self) -> "tuple[Deployment, ...]":
        """The stages of its groups, as deployments of a part of the layers; itself if it has one.

        `layout` is that of the whole model on the devices of one stage.
        """
        if self.pp == 1:
            return (self,)
        models = stages_of(self.layout.model, self.pp)
        own = replace(self, pp=1, max_num_seqs=self.budgets.max_step_seqs)  # those of its steps
        return tuple(replace(own, layout=replace(self.layout, model=each)) for each in models)

    @property
    def by_width(self) -> dict[int, "Deployment"]:
        """The same deployment for the groups of each width; of a fleet it is that of the first."""
        return {width: self.of_width(width) for width in self.widths or (self.sp,)}

    def of_width(self, width: int) -> "Deployment":
        """The same deployment in groups of another width, with blocks of as many bytes."""
        layout = self.layout.of_width(width)
        return replace(
            self,
            layout=layout,
            dp=self.grid.units // width,
            block_size=layout.block_tokens(self.block_size, self.layout),
        )

    @property
    def sp(self) -> int:
        """The units of a group."""
        return self.layout.sp

    @property
    def tp(self) -> int:
        """How many ways a unit splits the weights."""
        return self.layout.tp

    @property
    def policy_class(self) -> type[Policy]:
        """What chooses the modes of its steps."""
        return POLICIES[self.policy]

    @property
    def numerics(self) -> NumericsName:
        """The name of how its steps sum over devices."""
        return self.formats.sums

    @property
    def of_numerics(self) -> Numerics:
        """How its steps sum over devices, and what that promises."""
        return NUMERICS[self.numerics]

    @property
    def is_deterministic(self) -> bool:
        """Whether the attention of a sequence has the same bits whatever runs beside it."""
        return self.deterministic or self.of_numerics.is_strict

    @property
    def bars_switch(self) -> bool:
        """Whether no switch may do its sums: none is known to add in one order, or wider."""
        return self.is_deterministic or self.of_numerics.is_wide

    @property
    def shifts(self) -> bool:
        """Whether its policy may choose SHIFT."""
        return self.layout.shift in self.policy_class.modes_used(self.layout.modes)

    @property
    def needs_costs(self) -> bool:
        """Whether its policy takes a cost model of the machine."""
        return self.policy_class.needs_costs(self.threshold)

    @property
    def prices_drafts(self) -> bool:
        """Whether drafts are as long as costs say, or the costs are needed in any case."""
        drafts = self.drafts
        by_cost = not drafts.fixed_drafts and drafts.draft_choice != "fill"
        is_of_fleet = bool(self.widths) and self.fleet.traits.needs_costs
        return self.needs_costs or by_cost or is_of_fleet

    @property
    def grid(self) -> Grid:
        """The devices of all groups."""
        return Grid(self.tp, self.sp * self.dp, self.pp)

    @property
    def fixed(self) -> Arrangement | None:
        """The groups of a fleet that keeps them; None: they come and go.

        Raises ConfigError where the units cannot form them.
        """
        text = self.fleet.fixed
        if text is None:
            return None
        try:
            return parse_arrangement(text, self.grid.units, self.widths)
        except ValueError as error:
            raise ConfigError([f"fleet_policy: {error}"]) from None

    @property
    def widest(self) -> int:
        """Units of the widest group that a request can come to; 1: not a fleet."""
        return max((group.width for group in self.fixed or ()), default=max(self.widths or (1,)))

    @property
    def mesh(self) -> str:
        """For people."""
        if self.widths:
            widths = ",".join(map(str, self.widths))
            return f"fleet of {self.grid.units} units, tp={self.tp}, widths {widths}"
        stages = f"pp={self.pp} " if self.pp > 1 else ""
        return f"dp={self.dp} {stages}sp={self.sp} tp={self.tp}"

    @cached_property
    def buckets(self) -> list[Bucket]:
        """The sizes of steps, smallest first."""
        most = self.budgets.max_step_seqs
        least = self.of_numerics.least_rows
        return make_buckets(self.token_buckets, most, self.layout, self.max_draft_rows, least)

    @property
    def step_sizes(self) -> tuple[int, ...]:
        """Tokens of steps that drafts may reach: those that are compiled, or some of all."""
        if self.token_buckets:
            return tuple(bucket.tokens for bucket in self.buckets)
        return doubling(self.max_num_batched_tokens)

    @property
    def blocks_per_seq(self) -> int:
        """KV blocks of the longest sequence."""
        return -(-self.max_model_len // self.block_size)

    @property
    def windows(self) -> tuple[Window | None, ...]:
        """How far back each of the model's cache groups sees."""
        return tuple(group.window for group in self.layout.model.cache_groups)

    def blocks_of(self, num_tokens: int, step_tokens: int = 0) -> int:
        """The most KV blocks that a sequence of so many tokens keeps, in all cache groups.

        While it decodes; or while its prompt is computed, in steps of up to `step_tokens`.
        """
        size = self.block_size
        return sum(blocks_kept(num_tokens, window, size, step_tokens) for window in self.windows)

    def longest_sequence(self, num_blocks: int) -> int:
        """Tokens of the longest sequence that so many KV blocks hold, from its prompt on."""
        sizes = self.block_size, self.max_num_batched_tokens
        return longest_kept(num_blocks, self.windows, *sizes)

    def longest_in(self, memory: Memory) -> int:
        """Tokens of the longest sequence that the KV cache holds; 0 or less: none."""
        if not any(self.windows):
            return memory.num_kv_tokens
        return self.longest_sequence(max(0, self.fitting_blocks(memory)))

    def kv_tokens_of(self, memory: Memory, num_tokens: int) -> int:
        """Tokens that the KV cache holds of sequences that have so many each."""
        if not any(self.windows):
            return memory.num_kv_tokens
        return self.fitting_blocks(memory) * num_tokens // self.blocks_of(num_tokens)

    @property
    def num_kv_tokens(self) -> int:
        """Tokens that the KV cache of a group holds, of sequences that are as long as they may be.

        Of groups of the first width, in a fleet.
        """
        num_blocks = self.num_blocks - 1
        if not any(self.windows):
            return num_blocks * self.block_size
        return num_blocks * self.max_model_len // self.blocks_of(self.max_model_len)

    @property
    def block_bytes(self) -> int:
        """Bytes of a KV block on one device, of the stage that has the most."""
        each = (block_token_bytes(stage.layout, self.formats) for stage in self.stages)
        return self.block_size // self.layout.position_ways * max(each)

    @property
    def host_block_bytes(self) -> int:
        """Bytes of a KV block on the host: of all devices of a group, in all stages."""
        if self.pp > 1:
            return sum(stage.host_block_bytes for stage in self.stages)
        return self.block_bytes * self.layout.num_devices

    @property
    def blocks_in_flight(self) -> int:
        """KV blocks on their way to the host or back; each has device memory until it is there.

        A copy waits in its stage for the steps before it. Where every step's prompts are parked,
        there is room for those of all steps in flight: with less the host would wait, before
        each step, for a pipeline to run empty.
        """
        least = MOST_IN_FLIGHT * EXTENT_SIZES[0]
        if not self.parks:
            return least
        blocks = -(-self.max_num_batched_tokens // self.block_size)
        return max(least, (self.pp + 1) * blocks)

    @property
    def budgets(self) -> SchedulerConfig:
        """What the scheduler of a group may give away."""
        model = self.layout.model
        return SchedulerConfig(
            num_blocks=self.num_blocks,
            block_size=self.block_size,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            eos_token_ids=model.eos_token_ids,
            model=model.name,
            kv=f"{self.formats.kv} {self.kv_scales}",
            prefix_caching=self.prefix_caching,
            preemption=self.preemption,
            max_proposed_rows=self.max_draft_rows,
            hash_size=self.hash_size,
            num_micro_batches=self.pp,
            kept_share=self.retention_fraction if self.prefix_caching else 0.0,
            windows=self.windows if any(self.windows) else (),
        )

    @property
    def limits(self) -> RequestLimits:
        """What a request may ask for."""
        model = self.layout.model
        widest = self.of_width(self.widest) if self.widths else self
        return RequestLimits(
            vocab_size=model.vocab_size,
            max_model_len=self.max_model_len,
            num_kv_tokens=widest.longest_sequence(self.num_blocks - 1),
            eos_token_ids=model.eos_token_ids,
            computes_prompts=model.num_late_layers == 0,
            widest=self.widest,
            keeps_notes=self.routed_experts,
        )

    @property
    def sums_by_switch(self) -> bool:
        """Whether a switch may do sums of its steps (`models/sum_backend.py`)."""
        is_one_group = self.dp == self.pp == 1
        return is_one_group and self.attention != "xla" and not self.bars_switch

    def costs(self, machine: Machine, engine: EngineOverhead) -> GroupCosts:
        """The seconds of a group's steps on a machine, whatever stages it has."""
        by_switch = engine.sums_by_switch and self.sums_by_switch
        engine = replace(engine, sums_by_switch=by_switch)
        stages = [
            CostModel(stage.layout, machine, engine, self.formats, stage.buckets)
            for stage in self.stages
        ]
        return stages[0] if self.pp == 1 else PipelineCosts(stages)

    @property
    def temporary_bytes(self) -> int:
        """Estimate the temporaries of the largest step, before it is compiled.

        Where sizes are padded, SHIFT's largest step has room, too; elsewhere only one that a
        threshold lets through.
        """
        most = shifted = self.max_num_batched_tokens
        if self.sp == 1 or not self.shifts:
            shifted = 0
        elif self.policy_class.has_threshold and not self.token_buckets:
            shifted = most if self.threshold is None else min(most, self.threshold)
        rows = self.budgets.max_rows
        choose = ExpertModes(self.layout, by_bytes(self.formats))
        of_experts = choose(self.layout.base, most).sp
        return temporary_bytes(self.layout, self.formats, most, shifted, rows, of_experts)

    def sum_buffer_bytes(
        self, wanted: Mapping[int, Mapping[Bucket, Iterable[Mode]]], *, has_switch: bool = True
    ) -> int:
        """Bytes of a GPU that sums hold outside of JAX's share of it, if NVLink joins the devices.

        `wanted` are the programs, by units of a group. Of a pipeline, those of the fullest stage.
        `has_switch` says whether a switch that adds up may join them, too.
        """
        by_switch = self.switch_buffer_bytes(wanted) if has_switch else 0
        return by_switch + max(
            sum(
                sum_buffer_bytes(each.layout, each.formats, wanted[width])
                for width, each in stage.by_width.items()
            )
            for stage in self.stages
        )

    def switch_buffer_bytes(self, wanted: Mapping[int, Mapping[Bucket, Iterable[Mode]]]) -> int:
        """Bytes of a GPU that sums by a switch hold, if one joins the devices."""
        widths = ((w, each) for w, each in self.by_width.items() if each.sums_by_switch)
        return max((switch_buffer_bytes(each.layout, wanted[w]) for w, each in widths), default=0)

    def memory(self, devices: Devices, workspace_bytes: int | None = None) -> Memory:
        """What a device holds, and what is left for KV; `workspace_bytes` None: the estimate.

        Of a pipeline, what one of the stage holds that has room for the fewest tokens.
        """
        if self.pp > 1:
            of_stages = (stage.memory(devices, workspace_bytes) for stage in self.stages)
            return min(of_stages, key=lambda memory: memory.num_kv_tokens)
        layout, formats = self.layout, self.formats
        weights, copy = weight_bytes(layout, formats), 0
        if self.shifts:
            copy = shift_copy_bytes(layout, formats, self.weights)
        workspace = self.temporary_bytes if workspace_bytes is None else workspace_bytes
        if self.host_bytes:
            ahead = MOST_AHEAD * EXTENT_SIZES[0]
            workspace += (self.blocks_in_flight + ahead) * self.block_bytes
        used = devices.total_bytes - devices.free_bytes
        room = int(self.memory_fraction * devices.total_bytes) - used
        kv = int(devices.pool_share * (room - weights - copy - workspace))
        token = kv_token_bytes(layout, formats)
        if any(self.windows):
            token = -(-self.blocks_of(self.max_model_len) * self.block_bytes // self.max_model_len)
        return Memory(weights, copy, workspace, kv, token)

    def sized(self, memory: Memory) -> "Deployment":
        """With KV blocks: as configured, or what fits, but never more than could be used."""
        return self if self.num_blocks else self.with_blocks(self.blocks_for(memory), memory)

    def blocks_for(self, memory: Memory) -> int:
        """KV blocks that fit, in a rounded number, but never more than could be used."""
        fits = stable(max(0, self.fitting_blocks(memory)))
        each = self.blocks_of(self.max_model_len, self.max_num_batched_tokens)
        return min(fits, 1 + self.max_num_seqs * each)

    def fitting_blocks(self, memory: Memory) -> int:
        """KV blocks that fit, the null block included; 0 or less: none."""
        if any(self.windows):
            return memory.kv_bytes // self.block_bytes
        return memory.num_kv_tokens // self.block_size

    def with_blocks(self, num_blocks: int, memory: Memory) -> "Deployment":
        """With so many KV blocks. Raises ConfigError where that is none but the null block."""
        if num_blocks > len(self.windows):
            return replace(self, num_blocks=num_blocks)
        held = (memory.weight_bytes + memory.shift_weight_bytes) / 1e9
        raise ConfigError(
            [
                f"{self.name}: {held:.1f} GB of weights a device leave no memory for KV blocks: "
                "use more TP, more devices, a smaller model or a larger memory_fraction"
            ]
        )


def stable(count: int) -> int:
    """Round down to 4 significant bits, so that starts on a busy machine agree.

    The pool's size is part of every compiled program, and so of its key in the compilation cache.
    """
    shift = max(0, count.bit_length() - 4)
    return count >> shift << shift

"""What the settings come to for one model on one machine: resolved once, read by all. No JAX.

The engine is built from a `Deployment`; `check`, `plan` and the simulator ask the same one what
it holds and does, with the memory of real devices or of a machine file.
"""

import logging
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, NamedTuple

from shiftjax.arch.config import ModelConfig, stages_of
from shiftjax.arch.formats import AUTO, Formats, formats_of
from shiftjax.arch.weights import EXPERT_NAMES
from shiftjax.config import EngineConfig, ParallelOptions
from shiftjax.control.admission import RequestLimits
from shiftjax.control.host_chunks import CHUNK_SIZES, MOST_AHEAD, MOST_IN_FLIGHT
from shiftjax.control.scheduler_config import SchedulerConfig
from shiftjax.costs.buckets import SMALLEST_TOKENS, Bucket, doubling, make_buckets
from shiftjax.costs.machine import EngineOverhead, Machine
from shiftjax.costs.memory import (
    Memory,
    expert_bytes,
    kv_token_bytes,
    shift_copy_bytes,
    temporary_bytes,
    weight_bytes,
)
from shiftjax.costs.stages import GroupCosts, PipelineCosts
from shiftjax.costs.step import CostModel
from shiftjax.drafts.draft import NO_DRAFTS, DraftOptions
from shiftjax.options import ConfigError, shown
from shiftjax.parallel.fleet import (
    FIXED,
    NO_FLEET,
    Arrangement,
    FleetOptions,
    parse_arrangement,
    widths_of,
)
from shiftjax.parallel.grid import Grid
from shiftjax.parallel.layout import Layout

logger = logging.getLogger(__name__)
MOST_DRAFT_ROWS = 256  # unless asked for; the LM head of a row costs what a small layer costs
WEIGHT_SHARE = 0.6  # of a device's memory, at most; the rest is for KV blocks and temporaries


class Devices(NamedTuple):
    """The devices of a machine, and the memory of each."""

    num_devices: int
    total_bytes: int
    free_bytes: int  # before weights are loaded


class Suited(NamedTuple):
    """What suits the processor, where the settings leave it open."""

    dtype: str = AUTO  # what dtype = auto means
    few_tokens: tuple[int, ...] = (SMALLEST_TOKENS,)  # sizes of small steps; they double from there


@dataclass(frozen=True)
class Deployment:
    """A model on `dp` groups of devices, in number formats, with the budgets of a group.

    `weights` is how SHIFT comes by its weights. An engine without `token_buckets` has steps of
    any size. `num_blocks` counts the null block; 0: as many as fit.
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
    drafts: DraftOptions = NO_DRAFTS
    max_draft_rows: int = 0
    widths: tuple[int, ...] = ()  # units of the groups of a fleet, ascending; (): not a fleet
    fleet: FleetOptions = NO_FLEET
    hash_size: int = 0  # tokens that a prefix is hashed by, in all widths; 0: a block's
    deterministic: bool = False  # attention of a sequence does not depend on the others
    gpu_options: str = "auto"  # XLA's, as the setting spells them
    pp: int = 1  # stages of a group, each on `sp * tp` devices
    parks: bool = False  # computes prompts alone (`control/resharding.py`)
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
        bytes_of_head = self.block_size * self.layout.kv_heads_per_device
        return replace(
            self,
            layout=layout,
            dp=self.grid.units // width,
            block_size=bytes_of_head // layout.kv_heads_per_device,
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
    def grid(self) -> Grid:
        """The devices of all groups."""
        return Grid(self.tp, self.sp * self.dp, self.pp)

    @property
    def fixed(self) -> Arrangement | None:
        """The groups of a fleet that keeps them; None: they come and go.

        Raises ConfigError where the units cannot form them.
        """
        if not self.fleet.fleet_policy.startswith(FIXED):
            return None
        text = self.fleet.fleet_policy.removeprefix(FIXED)
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
        return make_buckets(self.token_buckets, most, self.layout, self.max_draft_rows)

    @property
    def blocks_per_seq(self) -> int:
        """KV blocks of the longest sequence."""
        return -(-self.max_model_len // self.block_size)

    @property
    def block_bytes(self) -> int:
        """Bytes of a KV block on one device, of the stage that has the most."""
        each = (kv_token_bytes(stage.layout, self.formats) for stage in self.stages)
        return self.block_size * max(each)

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
        least = MOST_IN_FLIGHT * CHUNK_SIZES[0]
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
            max_draft_rows=self.max_draft_rows,
            hash_size=self.hash_size,
            num_stages=self.pp,
            parks=self.parks,
        )

    @property
    def limits(self) -> RequestLimits:
        """What a request may ask for."""
        model = self.layout.model
        widest = self.of_width(self.widest) if self.widths else self
        return RequestLimits(
            vocab_size=model.vocab_size,
            max_model_len=self.max_model_len,
            num_kv_tokens=(self.num_blocks - 1) * widest.block_size,
            eos_token_ids=model.eos_token_ids,
            computes_prompts=model.num_late_layers == 0,
            widest=self.widest,
        )

    def costs(self, machine: Machine, engine: EngineOverhead) -> GroupCosts:
        """The seconds of a group's steps on a machine, whatever stages it has."""
        stages = [
            CostModel.of(stage.layout, machine, engine, self.formats, stage.buckets)
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
        if self.sp == 1 or self.policy == "base":
            shifted = 0
        elif self.policy == "threshold" and not self.token_buckets and self.threshold is not None:
            shifted = min(most, self.threshold)
        rows = self.budgets.max_rows
        return temporary_bytes(self.layout, self.formats, most, shifted, rows)

    def memory(self, devices: Devices, workspace_bytes: int | None = None) -> Memory:
        """What a device holds, and what is left for KV; `workspace_bytes` None: the estimate.

        Of a pipeline, what one of the stage holds that has room for the fewest tokens.
        """
        if self.pp > 1:
            of_stages = (stage.memory(devices, workspace_bytes) for stage in self.stages)
            return min(of_stages, key=lambda memory: memory.num_kv_tokens)
        layout, formats = self.layout, self.formats
        weights, copy = weight_bytes(layout, formats), 0
        if self.policy != "base":
            copy = shift_copy_bytes(layout, formats, self.weights)
        workspace = self.temporary_bytes if workspace_bytes is None else workspace_bytes
        if self.host_bytes:
            ahead = MOST_AHEAD * CHUNK_SIZES[0]
            workspace += (self.blocks_in_flight + ahead) * self.block_bytes
        used = devices.total_bytes - devices.free_bytes
        room = int(self.memory_fraction * devices.total_bytes) - used
        kv = room - weights - copy - workspace
        return Memory(weights, copy, workspace, kv, kv_token_bytes(layout, formats))

    def sized(self, memory: Memory) -> "Deployment":
        """With KV blocks: as configured, or what fits, but never more than could be used."""
        return self if self.num_blocks else self.with_blocks(self.blocks_for(memory), memory)

    def blocks_for(self, memory: Memory) -> int:
        """KV blocks that fit, in a rounded number, but never more than could be used."""
        fits = stable(max(0, memory.num_kv_tokens // self.block_size))
        return min(fits, 1 + self.max_num_seqs * self.blocks_per_seq)

    def with_blocks(self, num_blocks: int, memory: Memory) -> "Deployment":
        """With so many KV blocks. Raises ConfigError where that is none but the null block."""
        if num_blocks >= 2:
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


def formats_in(config: EngineConfig, model: ModelConfig, suited: Suited | None = None) -> Formats:
    """The number formats that the settings come to; matrices are as the checkpoint has them."""
    suited, quantization = suited or Suited(), config.model.quantization
    dtype = suited.dtype if config.model.dtype == "auto" else config.model.dtype
    formats = formats_of(dtype, config.cache.kv_cache_dtype)
    if quantization == "auto":
        quantization = "none" if model.codes is None else "fp8"
    return formats if quantization == "none" else replace(formats, weights=quantization)


def resolve(
    config: EngineConfig, model: ModelConfig, devices: Devices, suited: Suited | None = None
) -> Deployment:
    """What the settings come to. Raises ConfigError where model or machine cannot take them."""
    suited = suited or Suited()
    problems = check_model(config, model, devices.num_devices)
    if problems:
        raise ConfigError(problems)
    cache, scheduler = config.cache, config.scheduler
    formats = formats_in(config, model, suited)
    budget = scheduler.max_num_batched_tokens
    sizes = config.compile.token_buckets or doubling(budget, suited.few_tokens)
    layout, dp, block_size = Layout(model, 1, 1), config.parallel.dp, cache.block_size
    widths: tuple[int, ...] = ()
    if config.fleet.fleet:
        tp, units = fleet_degrees(config, model, formats, devices)
        widths = widths_of(config.fleet, units)
        layout = Layout(model, widths[0], tp, widths[-1])
        dp, block_size = units // widths[0], layout.block_tokens(block_size)
    else:
        degrees = choose_degrees(config.parallel, model, formats, devices)
        layout = Layout(model, *degrees, gathers=config.parallel.gathers)
    deployment = Deployment(
        name="config",
        layout=layout,
        formats=formats,
        dp=dp,
        policy=scheduler.policy,
        threshold=config.threshold_tokens,
        max_model_len=config.model.max_model_len or model.max_position_embeddings,
        max_num_seqs=scheduler.max_num_seqs,
        max_num_batched_tokens=scheduler.max_num_batched_tokens,
        token_buckets=sizes,
        weights=config.parallel.weights,
        attention=config.compile.attention,
        block_size=block_size,
        num_blocks=cache.num_blocks or 0,
        memory_fraction=cache.memory_fraction,
        prefix_caching=cache.prefix_caching,
        preemption=cache.preemption,
        host_bytes=cache.host_bytes,
        drafts=config.drafts,
        max_draft_rows=draft_rows(config.drafts, scheduler.max_num_seqs),
        widths=widths,
        fleet=config.fleet,
        hash_size=block_size if widths else 0,
        deterministic=config.model.deterministic,
        gpu_options=config.compile.gpu_options,
        pp=config.parallel.pp,
    )
    _ = deployment.fixed  # that its groups can be formed
    least = min(of_width.host_block_bytes for of_width in deployment.by_width.values())
    if 0 < deployment.host_bytes < least:
        given = f"host_memory = {cache.host_memory} is less than a KV block of {least} bytes"
        raise ConfigError([f"{given}: use more, or leave it out"])
    return deployment


def fleet_degrees(
    config: EngineConfig, model: ModelConfig, formats: Formats, devices: Devices
) -> tuple[int, int]:
    """(tp of a unit, units): as configured, or the least tp whose share of the weights fits.

    Raises ConfigError where the devices cannot be cut into such units, or those into the widths.
    """
    num_devices = config.parallel.devices or devices.num_devices
    tp = config.parallel.tp
    if tp is None:
        num_bytes = weight_bytes(Layout(model, 1, 1), formats)
        _, tp = base_rule(num_bytes, devices.total_bytes, num_devices)
    if num_devices % tp:
        raise ConfigError([f"{num_devices} devices cannot be cut into units of tp = {tp}"])
    units = num_devices // tp
    widths = widths_of(config.fleet, units)
    if units == 1:
        words = f"devices = {num_devices} are one unit of tp = {tp}, and a fleet has several"
        raise ConfigError([f"fleet: {words}: use more devices, or drop fleet"])
    if len(widths) == 1 and not config.fleet.fleet_policy.startswith(FIXED):
        words = f"{units} units in groups of {widths[0]} alone have nothing to choose from"
        raise ConfigError([f"fleet: {words}: use more widths, other devices, or drop fleet"])
    problems = [
        f"fleet_widths: {units} units cannot be cut into groups of {width}"
        for width in widths
        if units % width
    ]
    bind_width = config.fleet.bind_width
    if bind_width is not None and bind_width not in widths:
        given = f"bind_width = {bind_width} is none of the widths {shown(widths)}"
        problems.append(f"{given} of its groups")
    problems += widths_problems(Layout(model, widths[0], tp, widths[-1]), widths)
    if problems:
        raise ConfigError(problems)
    return tp, units


def widths_problems(layout: Layout, widths: tuple[int, ...]) -> list[str]:
    """Why groups of these widths cannot share what their units hold; none: they can."""
    problems, unit = [], layout.of_width(1)
    if widths[-1] * layout.tp > layout.model.num_heads:
        problems.append(
            f"fleet_widths: {widths[-1]} units of tp = {layout.tp} are more devices than "
            f"{layout.model.name}'s {layout.model.num_heads} query heads: some would hold none"
        )
    for width in widths:
        of_width = layout.of_width(width)
        if of_width.base_kv_heads != unit.base_kv_heads:
            problems.append(
                f"fleet_widths: groups of {width} units would split {layout.model.name}'s "
                f"{layout.model.num_kv_heads} KV heads otherwise than a unit of tp = {layout.tp}"
            )
    return problems


def draft_rows(drafts: DraftOptions, max_num_seqs: int) -> int:
    """Logit rows of a step with drafts; 0 where nothing is drafted."""
    if drafts.speculation == "none":
        return 0
    return drafts.max_draft_rows or min(4 * max_num_seqs, MOST_DRAFT_ROWS)


def check_model(config: EngineConfig, model: ModelConfig, num_devices: int) -> list[str]:
    """What is wrong with `config` for this model on a machine of `num_devices` devices."""
    limit, wanted = model.max_position_embeddings, config.model.max_model_len
    parallel = config.parallel
    degree = (parallel.sp or 1) * (parallel.tp or 1)
    if parallel.devices:
        degree = parallel.devices // (parallel.dp * parallel.pp)
    used = degree * parallel.dp * parallel.pp
    problems = stage_problems(parallel.pp, model)
    if wanted is not None and wanted > limit:
        problems.append(f"max_model_len = {wanted} is beyond {model.name}'s {limit} positions")
    if model.encoder is not None:
        problems.append(f"{model.name} is an encoder: it embeds texts, and generates none")
    if config.model.task == "embed":
        problems.append("task = embed is of Embedder, of embed and of serve")
    if model.experts is not None:
        problems += _expert_problems(model, degree)
    if used > num_devices:
        problems.append(f"{used} devices are asked for, but this machine has {num_devices}")
    if degree > model.num_heads:
        problems.append(
            f"sp * tp = {degree} is more than {model.name}'s {model.num_heads} query heads: "
            "some devices would hold none"
        )
    return problems


def _expert_problems(model: ModelConfig, degree: int) -> list[str]:
    """Why `degree` devices cannot compute a model with experts; none: they can."""
    problems, experts = [], model.experts
    assert experts is not None
    if model.architecture not in EXPERT_NAMES or experts.shared_intermediate_size:
        problems.append(f"{model.name}'s kind of experts can be planned for, but not loaded")
    if degree > experts.num:
        problems.append(
            f"sp * tp = {degree} is more than {model.name}'s {experts.num} experts: "
            "some devices would hold none"
        )
    return problems


def stage_problems(pp: int, model: ModelConfig) -> list[str]:
    """Why a model cannot be computed in `pp` stages; none: it can."""
    if pp == 1:
        return []
    problems = []
    if pp > model.num_layers:
        problems.append(f"pp = {pp} is more than {model.name}'s {model.num_layers} layers")
    if model.num_kv_layers is not None:
        problems.append(
            f"pp = {pp} cannot be had with {model.name}: the late layers of SwiftKV need what the "
            "last early one gives, for all tokens"
        )
    return problems


def base_rule(
    num_bytes: int, memory_bytes_per_device: int, num_devices: int, expert_bytes: int = 0
) -> tuple[int, int]:
    """(sp, tp) by the rule: the least TP whose share of `num_bytes` fits, the rest SP.

    TP divides `num_devices`; a share fits in WEIGHT_SHARE of a device's memory. All devices split
    the experts among the weights, `expert_bytes`, whatever TP is. Raises ConfigError when not even
    TP = num_devices fits.
    """
    room = int(WEIGHT_SHARE * memory_bytes_per_device)
    for tp in range(1, num_devices + 1):
        share = (num_bytes - expert_bytes) / tp + expert_bytes / num_devices
        if num_devices % tp == 0 and share <= room:
            return num_devices // tp, tp
    raise ConfigError(
        [
            f"the weights ({num_bytes / 2**30:.1f} GiB) do not fit: {num_devices} devices offer "
            f"{room / 2**30:.1f} GiB each for weights; use more devices or a smaller dtype"
        ]
    )


def choose_degrees(
    parallel: ParallelOptions,
    model: ModelConfig,
    formats: Formats,
    devices: Devices,
) -> tuple[int, int]:
    """(sp, tp) of a group, or of each stage of it: as configured; else by `base_rule`.

    Where weights are gathered, a device stores 1/P of them whatever SP is, so that is P.

    Where the degrees leave it open, a group is the largest number of devices that all have a
    query head, a divisor of the machine's share if there is one. The options have passed
    `check_model`.
    """
    sp, tp = parallel.sp, parallel.tp
    if sp and tp:
        return sp, tp
    group = (parallel.devices or devices.num_devices) // (parallel.dp * parallel.pp)
    fixed = sp or tp or 1
    sizes = range(fixed, min(group, model.num_heads) + 1, fixed)
    size = max(sizes, key=lambda size: (group % size == 0, size))
    if sp:
        return sp, size // sp
    if tp:
        return size // tp, tp
    most, of_experts = max(
        (weight_bytes(Layout(stage, 1, 1), formats), expert_bytes(stage, formats))
        for stage in stages_of(model, parallel.pp)
    )
    by_rule = base_rule(most, devices.total_bytes, size, of_experts)
    if by_rule[0] == 1 < size and not parallel.gathers:
        logger.info(
            "the weights leave no room for SP: weights = gather stores as little, and gathers them "
            "for steps of many tokens; `shiftjax plan` says from how many that pays"
        )
    return (size, 1) if parallel.gathers else by_rule  # of which a device has 1/P, whatever SP

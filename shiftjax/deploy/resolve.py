"""What the settings come to: formats, degrees and sizes of a `Deployment`, or why not. No JAX."""

import logging
from dataclasses import replace
from typing import NamedTuple

from shiftjax.arch.config import ModelConfig, stages_of
from shiftjax.arch.contexts import context_problems, longest_context, most_attended, say_served
from shiftjax.arch.formats import AUTO, PACKED, Formats, formats_of
from shiftjax.arch.rotary import served_within
from shiftjax.arch.weights import EXPERT_NAMES
from shiftjax.config import EngineConfig, ParallelOptions
from shiftjax.core.policies import POLICIES
from shiftjax.costs.buckets import SMALLEST_TOKENS, doubling, with_halfway
from shiftjax.costs.memory import (
    expert_bytes,
    weight_bytes,
)
from shiftjax.deploy.budgets import chosen_budgets
from shiftjax.deploy.deployment import Deployment, Devices
from shiftjax.deploy.expert_storage import expert_problems, with_experts
from shiftjax.deploy.lora_rule import with_adapters
from shiftjax.deploy.numerics_rule import check_numerics
from shiftjax.deploy.position_rule import with_positions
from shiftjax.deploy.routed_rule import routed_problems
from shiftjax.deploy.window_rule import with_freed_blocks
from shiftjax.draft_options import DraftOptions
from shiftjax.options import ConfigError
from shiftjax.parallel.arrangements import (
    widths_of,
)
from shiftjax.parallel.layout import Layout

logger = logging.getLogger(__name__)
MOST_DRAFT_ROWS = 256  # unless asked for; the LM head of a row costs what a small layer costs
WEIGHT_SHARE = 0.6  # of a device's memory, at most; the rest is for KV blocks and temporaries
LAST_SHARE = 0.8  # the same where all devices split the weights already: little KV, or no engine


class Suited(NamedTuple):
    """What suits the processor, where the settings leave it open."""

    dtype: str = AUTO  # what dtype = auto means
    few_tokens: tuple[int, ...] = (SMALLEST_TOKENS,)  # sizes of small steps; they double from there


def formats_in(config: EngineConfig, model: ModelConfig, suited: Suited | None = None) -> Formats:
    """The number formats that the settings come to; matrices are as the checkpoint has them.

    Raises ConfigError for four bits that it has not.
    """
    suited, quantization = suited or Suited(), config.model.quantization
    dtype = suited.dtype if config.model.dtype == "auto" else config.model.dtype
    formats = formats_of(dtype, config.cache.kv_cache_dtype)
    formats = replace(formats, sums=config.model.numerics)
    if quantization == "auto":
        quantization = "none" if model.codes is None else model.codes.format
    if quantization in PACKED and (model.codes is None or model.codes.format != quantization):
        words = f"quantization = {quantization}: {model.name} has no such codes, and none are made"
        raise ConfigError([f"{words}: use auto, fp8 or none"])
    return formats if quantization == "none" else replace(formats, weights=quantization)


def check_experts(model: ModelConfig) -> None:
    """Raise ConfigError for a model whose experts no checkpoint that can be read has."""
    if model.experts is not None and model.architecture not in EXPERT_NAMES:
        raise ConfigError([f"{model.name}'s kind of experts can be planned for, but not loaded"])


def check_hosts(config: EngineConfig, num: int = 1) -> None:
    """Raise ConfigError for settings of another number of machines than these."""
    if config.host.hosts != num:
        words = "shiftjax plan --hosts says what they come to"
        given = f"hosts = {config.host.hosts}"
        raise ConfigError([f"{given} can be had with shiftjax serve alone, on each: {words}"])


def resolve(
    config: EngineConfig, model: ModelConfig, devices: Devices, suited: Suited | None = None
) -> Deployment:
    """What the settings come to. Raises ConfigError where model or machine cannot take them."""
    suited = suited or Suited()
    problems = check_model(config, model, devices.num_devices)
    if problems:
        raise ConfigError(problems)
    cache, scheduler = config.cache, config.scheduler
    longest = longest_context(model, config.model.max_model_len)
    if config.model.max_model_len is None and longest < model.max_position_embeddings:
        say_served(model.name, longest, model.max_position_embeddings, most_attended(model))
    model = with_freed_blocks(config, served_within(model, longest), longest)
    model = with_adapters(config, model)
    formats = formats_in(config, model, suited)
    budgets = chosen_budgets(config, devices.budgets)
    tokens = budgets.max_num_batched_tokens
    sizes = config.compile.token_buckets or doubling(tokens, suited.few_tokens)
    if config.compile.token_buckets is None and _chooses_for_targets(config, devices):
        sizes = with_halfway(sizes)  # the largest that keeps to a target is rarely a doubled one
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
    room = int(WEIGHT_SHARE * devices.total_bytes)
    layout = with_experts(layout, config.parallel, formats, widths, room)
    deployment = Deployment(
        name="config",
        layout=layout,
        formats=formats,
        dp=dp,
        policy=scheduler.mode_policy,
        threshold=config.threshold_tokens,
        max_model_len=longest,
        max_num_seqs=budgets.max_num_seqs,
        max_num_batched_tokens=tokens,
        token_buckets=sizes,
        weights=config.parallel.shift_weights or config.parallel.weights,
        attention=config.compile.attention,
        block_size=block_size,
        num_blocks=len(model.cache_groups) * (cache.num_blocks - 1) + 1 if cache.num_blocks else 0,
        memory_fraction=cache.memory_fraction,
        prefix_caching=cache.prefix_caching,
        preemption=cache.preemption,
        host_bytes=cache.host_bytes,
        disk_dir=cache.disk_cache_dir,
        disk_bytes=cache.disk_bytes if cache.disk_cache_dir else 0,
        retention_fraction=cache.retention_fraction,
        drafts=config.drafts,
        max_draft_rows=draft_rows(config.drafts, -(-budgets.max_num_seqs // config.parallel.pp)),
        widths=widths,
        fleet=config.fleet,
        hash_size=block_size if widths else 0,
        logprobs_mode=config.model.logprobs_mode,
        routed_experts=config.model.routed_experts,
        deterministic=config.model.deterministic,
        gpu_options=config.compile.gpu_options,
        pp=config.parallel.pp,
        overlap=scheduler.overlap,
        machine=scheduler.machine,
        sizes_by=scheduler.step_sizes,
        targets=scheduler.targets,
        seed=config.model.seed,
        lora=config.lora,
    )
    deployment = with_positions(config, deployment, devices)
    check_numerics(config, deployment)
    _ = deployment.fixed  # that its groups can be formed
    check_host_block(deployment)
    return deployment


def check_host_block(deployment: Deployment) -> None:
    """Raise ConfigError for a host tier without room for one KV block."""
    least = min(of_width.host_block_bytes for of_width in deployment.by_width.values())
    if 0 < deployment.host_bytes < least:
        given = f"host_memory, {deployment.host_bytes} bytes, is less than a KV block of {least}"
        raise ConfigError([f"{given}: use more, or leave it out"])
    if deployment.disk_dir is not None and any(deployment.windows):
        reason = "blocks of a model with windows belong to some of its layers alone"
        raise ConfigError([f"disk_cache_dir = {deployment.disk_dir} cannot be had: {reason}"])


def _chooses_for_targets(config: EngineConfig, devices: Devices) -> bool:
    """Whether sizes of steps may be chosen for targets: some are set, and costs are known."""
    scheduler = config.scheduler
    if scheduler.step_sizes != "cost" or scheduler.targets.are_none:
        return False
    is_named = scheduler.machine is not None
    by_cost = POLICIES[scheduler.mode_policy].needs_costs(config.threshold_tokens)
    return devices.is_priced or is_named or by_cost


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
    if len(widths) == 1 and config.fleet.fixed is None:
        words = f"{units} units in groups of {widths[0]} alone have nothing to choose from"
        raise ConfigError([f"fleet: {words}: use more widths, other devices, or drop fleet"])
    problems = [
        f"fleet_widths: {units} units cannot be cut into groups of {width}"
        for width in widths
        if units % width
    ]
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
        times = set()
        for of_width, of_unit in zip(layout.of_width(width).shapes, unit.shapes, strict=True):
            times.add(of_unit.cache.numbers / of_width.cache.numbers)
            if of_width.base_kv_heads != of_unit.base_kv_heads:
                problems.append(
                    f"fleet_widths: groups of {width} units would split {layout.model.name}'s "
                    f"{of_unit.model.num_kv_heads} KV heads otherwise than a unit of tp = "
                    f"{layout.tp}"
                )
        if len(times) > 1:
            problems.append(
                f"fleet_widths: a block of a group of {width} units would have different numbers "
                f"of tokens in layers of {layout.model.name} whose KV heads differ: its groups may "
                "be as wide as each shape of KV heads can be split without copies"
            )
    return problems


def draft_rows(drafts: DraftOptions, max_step_seqs: int) -> int:
    """Logit rows of a step of so many sequences with drafts; 0 where nothing is drafted."""
    if drafts.speculation == "none":
        return 0
    return drafts.max_draft_rows or min(4 * max_step_seqs, MOST_DRAFT_ROWS)


def check_model(config: EngineConfig, model: ModelConfig, num_devices: int) -> list[str]:
    """What is wrong with `config` for this model on a machine of `num_devices` devices."""
    parallel = config.parallel
    degree = (parallel.sp or 1) * (parallel.tp or 1)
    if parallel.devices:
        degree = parallel.devices // (parallel.dp * parallel.pp)
    used = degree * parallel.dp * parallel.pp
    problems = stage_problems(parallel.pp, model)
    problems += expert_problems(parallel, model, is_fleet=config.fleet.fleet)
    problems += context_problems(model, config.model.max_model_len)
    problems += routed_problems(config, model)
    if model.encoder is not None:
        problems.append(f"{model.name} is an encoder: it embeds texts, and generates none")
    if config.model.task == "embed":
        problems.append("task = embed is of Embedder, of embed and of serve")
    split = {"query heads": model.num_heads}
    if model.experts is not None:
        split["experts"] = model.experts.num
    if used > num_devices:
        problems.append(f"{used} devices are asked for, but this machine has {num_devices}")
    problems += (
        f"sp * tp = {degree} is more than {model.name}'s {count} {what}: "
        "some devices would hold none"
        for what, count in split.items()
        if degree > count
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
    if model.layer_input_width:
        problems.append(
            f"pp = {pp} cannot be had with {model.name}: its layers look tokens up in a table, "
            "which the first stage alone would have"
        )
    if model.num_shared_kv_layers:
        problems.append(
            f"pp = {pp} cannot be had with {model.name}: its last {model.num_shared_kv_layers} "
            "layers read the KV cache of earlier ones, which other stages would have"
        )
    return problems


def base_rule(
    num_bytes: int,
    memory_bytes_per_device: int,
    num_devices: int,
    expert_bytes: int = 0,
    per_host: int = 0,
) -> tuple[int, int]:
    """(sp, tp) by the rule: the least TP whose share of `num_bytes` fits, the rest SP.

    TP divides `num_devices`; a share fits in WEIGHT_SHARE of a device's memory, that of all devices
    in LAST_SHARE, and that of all `per_host` of a host, for a larger TP sums between hosts in every
    layer. All devices can split the experts among the weights, `expert_bytes`, whatever TP is.
    Raises ConfigError when not even TP = num_devices fits.
    """
    room = 0
    for tp in range(1, num_devices + 1):
        most = LAST_SHARE if tp in (num_devices, per_host) else WEIGHT_SHARE
        room = int(most * memory_bytes_per_device)
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
    of_experts = 0 if parallel.experts == "whole" else of_experts
    by_rule = base_rule(most, devices.total_bytes, size, of_experts, devices.per_host)
    if by_rule[0] == 1 < size and not parallel.gathers:
        logger.info(
            "the weights leave no room for SP: weights = gather stores as little, and gathers them "
            "for steps of many tokens; `shiftjax plan` says from how many that pays"
        )
    return (size, 1) if parallel.gathers else by_rule  # of which a device has 1/P, whatever SP

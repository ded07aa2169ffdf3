"""Whether devices split the positions of what they would have copies of. No JAX."""

import logging
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from shiftjax.arch.config import ModelConfig
from shiftjax.config import EngineConfig
from shiftjax.deploy.deployment import Deployment, Devices
from shiftjax.options import ConfigError

logger = logging.getLogger(__name__)


def with_positions(config: EngineConfig, deployment: Deployment, devices: Devices) -> Deployment:
    """The deployment by the setting `kv_split`; a block is then a stripe, as large on a device.

    Raises ConfigError where it asks for what cannot be had.
    """
    wanted, layout = config.cache.kv_split, deployment.layout
    if wanted == "replicate" or (wanted == "auto" and deployment.of_numerics.is_strict):
        return deployment
    split = split_of(deployment)
    if split is None:
        if wanted == "auto":
            return deployment
        if _ways_of(deployment) == {(1,)}:
            words = "kv_split = position changes nothing: no devices cache the same of %s"
            logger.warning(words, layout.model.name)
            return deployment
        words = "has layers that differ in how many devices cache the same"
        raise ConfigError([f"kv_split = position: {layout.model.name} {words}: use replicate"])
    if wanted == "auto" and not _is_needed(deployment, split, devices):
        return deployment
    if split.layout.normalisers is None:
        layout = replace(split.layout, normalisers=config.cache.normalisers)
        split = replace(split, layout=layout)
    _check_blocks(config, split)
    words = "%d devices split the positions of what they cache: KV blocks of %d tokens, %d on each"
    for each in split.by_width.values():
        if (ways := each.layout.position_ways) > 1:
            logger.info(words, ways, each.block_size, each.block_size // ways)
    return split


def split_of(deployment: Deployment) -> Deployment | None:
    """The same deployment, whose devices split positions; None: they cannot, or have no copies.

    Neighbours must be the same in all layers. Of a fleet, in each of its widths, some of which may
    have no copies.
    """
    ways = _ways_of(deployment)
    if ways == {(1,)} or any(len(each) > 1 for each in ways):
        return None
    size = deployment.block_size * deployment.layout.copies
    # A row's bits depend on what travels, and so on the size of its step; and there must be views.
    may_choose = deployment.weights == "alias" and not deployment.is_deterministic
    own = {"by_position": True} | ({} if may_choose else {"normalisers": False})
    split = replace(deployment.layout, **own)
    hashed = size if deployment.hash_size else 0
    return replace(deployment, layout=split, block_size=size, hash_size=hashed)


def _ways_of(deployment: Deployment) -> set[tuple[int, ...]]:
    """Of each width, how many devices cache the same, in layers of any shape."""
    layouts = [deployment.layout.of_width(width) for width in deployment.by_width]
    return {tuple({shape.copies for shape in layout.shapes}) for layout in layouts}


def on_one_stripe(deployments: Sequence[Deployment]) -> list[Deployment]:
    """The same deployments with blocks of equally many tokens, so that any reads what others wrote.

    As few tokens as all can split. Where fewer devices split them a block is larger on each, and
    there are fewer of as many bytes. Raises ConfigError where that is too few for a sequence.
    """
    stripe, found = math.lcm(*(each.block_size for each in deployments)), []
    for each in deployments:
        num = each.num_blocks and (each.num_blocks - 1) * each.block_size // stripe + 1
        found.append(own := replace(each, block_size=stripe, num_blocks=num))
        before, after = (it.longest_sequence(it.num_blocks - 1) for it in (each, own))
        if num and after < each.max_model_len <= before:
            words = f"{num} blocks of {stripe} tokens, which all can split, hold no sequence"
            raise ConfigError([f"{each.name}: {words} of max_model_len = {each.max_model_len}"])
    return found


class ByRule(NamedTuple):
    """What `auto` does whatever costs say, and why."""

    splits: bool
    words: str


def why_by_rule(model: ModelConfig, num_blocks: int | None) -> ByRule | None:
    """What `auto` does with what may split, by the settings; None: that is left to costs."""
    if num_blocks:
        return ByRule(False, "num_blocks says how many blocks there are")
    if model.latent is not None:
        return ByRule(True, "of latents every device would hold a copy")
    return None


def _is_needed(whole: Deployment, split: Deployment, devices: Devices) -> bool:
    """Whether the rule splits, or copies hold no sequence as long as may be, as parts do."""
    rule = why_by_rule(whole.layout.model, whole.num_blocks)
    if rule is None:
        widest = (each.of_width(max(each.by_width)) for each in (whole, split))
        held = [each.longest_in(each.memory(devices)) for each in widest]
        longest = whole.max_model_len
        words = f"copies hold {held[0]} tokens, parts {held[1]}, and a sequence has {longest}"
        rule = ByRule(held[0] < longest <= held[1], words)
    does = "split positions" if rule.splits else "hold copies"
    logger.info("kv_split = auto: devices %s: %s", does, rule.words)
    return rule.splits


def _check_blocks(config: EngineConfig, split: Deployment) -> None:
    given = config.model.max_model_len
    if split.widths:  # the widest groups have to
        split = split.of_width(split.widest)
    capacity = split.longest_sequence(split.num_blocks - 1) if split.num_blocks else None
    if given is None or capacity is None or capacity >= given:
        return
    words = f"blocks of {split.block_size} tokens hold {capacity} tokens (block 0 is reserved)"
    raise ConfigError(
        [f"num_blocks = {config.cache.num_blocks} {words}, less than max_model_len = {given}"]
    )

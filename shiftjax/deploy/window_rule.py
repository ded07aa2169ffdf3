"""Whether KV blocks behind windows are freed: where that saves memory, and can be had. No JAX."""

import logging
from dataclasses import replace

from shiftjax.arch.cache import CacheGroup, blocks_kept
from shiftjax.arch.config import ModelConfig
from shiftjax.config import CacheOptions, EngineConfig
from shiftjax.costs.memory import kv_token_bytes
from shiftjax.deploy.deployment import Deployment

logger = logging.getLogger(__name__)
SHOWN_TOKENS = 131_072  # of a sequence, if one may be so long


def with_freed_blocks(config: EngineConfig, model: ModelConfig, longest: int) -> ModelConfig:
    """The model, which frees blocks if a context of `longest` tokens takes less then.

    Where it would and cannot, the log says why.
    """
    freeing = replace(model, frees_blocks=True)
    size, layers = config.cache.block_size, sum(len(cache.layers) for cache in model.caches)
    kept = num_kept(freeing.cache_groups, longest, size)
    if not config.cache.frees_blocks or kept >= layers * -(-longest // size):
        return model
    reason = _why_not(config, model)
    if reason is None:
        return freeing
    _log_kept(model, reason)
    return model


def keeping_blocks(cache: CacheOptions, model: ModelConfig, reason: str) -> CacheOptions:
    """Options of a cache that frees no blocks, for what this reason keeps from it."""
    if cache.frees_blocks and any(model.windows):
        _log_kept(model, reason)
    return replace(cache, frees_blocks=False)


def _log_kept(model: ModelConfig, reason: str) -> None:
    logger.info("KV blocks behind the windows of %s are kept: %s", model.name, reason)


def num_kept(groups: tuple[CacheGroup, ...], num_tokens: int, block_size: int) -> int:
    """The most blocks that a sequence keeps, each counted for every layer that it has room for."""
    places = max(len(group.layers) for group in groups)
    return places * sum(blocks_kept(num_tokens, group.window, block_size) for group in groups)


def freed_in_words(deployment: Deployment) -> str:
    """What a long sequence keeps of its KV, and would keep of it all; "" where none is freed."""
    num_tokens, layout = min(SHOWN_TOKENS, deployment.max_model_len), deployment.layout
    if not any(deployment.windows):
        return ""
    kept = deployment.blocks_of(num_tokens) * deployment.host_block_bytes
    each = kv_token_bytes(layout, deployment.formats) * layout.num_devices
    unit, word = (1e9, "GB") if kept > 1e9 else (1e6, "MB")
    return (
        f"{num_tokens:,} tokens keep {kept / unit:,.1f} {word} on all devices, of "
        f"{num_tokens * each / unit:,.1f}: blocks behind windows are freed"
    )


def _why_not(config: EngineConfig, model: ModelConfig) -> str | None:
    """Why blocks cannot be freed behind windows; None: they can."""
    if config.fleet.fleet:
        return "moves of a fleet carry whole blocks"
    if config.parallel.pp > 1:
        return "the stages of a pipeline have other windows"
    if len(model.caches) > 1:
        return "its layers differ in what they keep of a token"
    return None

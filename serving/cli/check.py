"""What an engine would be on this machine, from settings and model headers alone."""

from typing import Any

import jax

from shiftjax.arch.formats import Formats, dtype_of, formats_of
from shiftjax.arch.weights import num_parameters
from shiftjax.build import kv_dtype, max_model_len
from shiftjax.config import EngineConfig, check_model, choose_degrees
from shiftjax.costs.memory import shift_copy_bytes, weight_bytes
from shiftjax.device.pool import block_bytes
from shiftjax.device.sizing import device_memory, num_blocks_for
from shiftjax.options import ConfigError
from shiftjax.parallel.layout import Layout
from shiftjax.text.tokenizer import load_tokenizer
from shiftjax.weights.resolve import open_source, resolve_model
from shiftjax.weights.source import TensorSource, check_complete


def make_plan(config: EngineConfig) -> dict[str, Any]:
    """Rows of a table; bytes are per device, and estimates until a model is really loaded.

    Raises ConfigError and CheckpointError like the start of an engine does.
    """
    location = resolve_model(config.model.model)
    source = open_source(location, seed=config.model.seed)
    check_complete(source)
    tokenizer = config.model.tokenizer or location.path
    vocab_size = load_tokenizer(tokenizer).vocab_size if tokenizer else None
    devices = jax.devices()[: config.parallel.devices]
    problems = check_model(config, source.config, len(devices))
    if problems:
        raise ConfigError(problems)
    total, _ = device_memory(devices[0], len(devices))
    dtype = dtype_of(config.model.dtype)
    formats = formats_of(str(dtype), str(kv_dtype(config, dtype)))
    whole = weight_bytes(Layout(source.config, 1, 1), formats)
    degrees = choose_degrees(config.parallel, source.config, len(devices), whole, total)
    layout = Layout(source.config, *degrees)
    kind = f"{len(devices)} x {devices[0].device_kind}"
    return (
        _model_rows(source, config, str(dtype))
        | {"tokenizer": f"{vocab_size} tokens" if vocab_size else "none"}
        | _mesh_rows(layout, config, kind)
        | _memory_rows(layout, config, formats, *device_memory(devices[0], len(devices)))
    )


def _model_rows(source: TensorSource, config: EngineConfig, dtype: str) -> dict[str, Any]:
    model = source.config
    return {
        "model": f"{model.name} ({model.architecture})",
        "from": source.location,
        "parameters": f"{num_parameters(model) / 1e6:,.1f} million in {model.num_layers} layers",
        "computed in": dtype,
        "longest sequence": f"{max_model_len(config, model)} tokens",
    }


def _mesh_rows(layout: Layout, config: EngineConfig, kind: str) -> dict[str, Any]:
    model, size = layout.model, layout.num_devices
    padded = f"{layout.num_heads} / {layout.num_kv_heads}"
    return {
        "devices": kind,
        "groups (dp)": config.parallel.dp,
        "base mode": f"sp {layout.sp}, tp {layout.tp}",
        "shift mode": f"sp 1, tp {size}",
        "query / KV heads": f"{model.num_heads} / {model.num_kv_heads}, padded to {padded}",
    }


def _memory_rows(
    layout: Layout, config: EngineConfig, formats: Formats, total: int, free: int
) -> dict[str, Any]:
    cache = config.cache
    weights = weight_bytes(layout, formats)
    weights += shift_copy_bytes(layout, formats, config.parallel.weights)
    each = block_bytes(layout, cache.block_size, formats.kv)
    fits = num_blocks_for(free - weights, total, cache.memory_fraction, 0, each)
    longest = -(-max_model_len(config, layout.model) // cache.block_size)
    num_blocks = cache.num_blocks or min(fits, 1 + config.scheduler.max_num_seqs * longest)
    if num_blocks < 2:
        raise ConfigError(["no memory is left for KV blocks: use more devices or a smaller model"])
    return {
        "memory of a device": _mebibytes(total),
        "weights": _mebibytes(weights),
        "a KV block": f"{cache.block_size} tokens, {each / 1024:,.1f} KiB",
        "KV blocks": f"about {num_blocks:,}, {_mebibytes(num_blocks * each)}",
        "KV tokens": f"about {(num_blocks - 1) * cache.block_size:,}",
    }


def _mebibytes(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.1f} MiB"

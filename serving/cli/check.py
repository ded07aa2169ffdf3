"""What an engine would be on this machine, from settings and model headers alone."""

from typing import Any

import jax

from serving.server.options import ServerOptions, check_server
from shiftjax.arch.weights import num_parameters
from shiftjax.config import EngineConfig
from shiftjax.control.deployment import Deployment, resolve
from shiftjax.costs.memory import Memory
from shiftjax.device.sizing import measure
from shiftjax.text.tokenizer import load_tokenizer
from shiftjax.weights.resolve import open_source, resolve_model
from shiftjax.weights.source import check_complete


def make_plan(config: EngineConfig, server: ServerOptions | None = None) -> dict[str, Any]:
    """Rows of a table; bytes are per device, and estimates until a model is really loaded.

    Raises ConfigError and CheckpointError like the start of an engine does.
    """
    location = resolve_model(config.model.model)
    source = open_source(location, seed=config.model.seed, drafts=config.drafts)
    check_complete(source)
    check_server(server or ServerOptions(), source.config)
    tokenizer = config.model.tokenizer or location.path
    vocab_size = load_tokenizer(tokenizer).vocab_size if tokenizer else None
    devices = jax.devices()[: config.parallel.devices]
    here = measure(devices)
    deployment = resolve(config, source.config, here)
    memory = deployment.memory(here)
    deployment = deployment.sized(memory)
    kind = f"{here.num_devices} x {devices[0].device_kind}"
    return (
        _model_rows(deployment, source.location)
        | {"tokenizer": f"{vocab_size} tokens" if vocab_size else "none", "devices": kind}
        | _mesh_rows(deployment)
        | {"memory of a device": _mebibytes(here.total_bytes)}
        | _memory_rows(deployment, memory)
    )


def _model_rows(deployment: Deployment, location: str) -> dict[str, Any]:
    model = deployment.layout.model
    return {
        "model": f"{model.name} ({model.architecture})",
        "from": location,
        "parameters": f"{num_parameters(model) / 1e6:,.1f} million in {model.num_layers} layers",
        "computed in": deployment.formats.activations,
        "longest sequence": f"{deployment.max_model_len} tokens",
    }


def _mesh_rows(deployment: Deployment) -> dict[str, Any]:
    layout, model = deployment.layout, deployment.layout.model
    padded = f"{layout.num_heads} / {layout.num_kv_heads}"
    return {
        "groups (dp)": deployment.dp,
        "base mode": f"sp {layout.sp}, tp {layout.tp}",
        "shift mode": f"sp 1, tp {layout.num_devices}",
        "query / KV heads": f"{model.num_heads} / {model.num_kv_heads}, padded to {padded}",
    }


def _memory_rows(deployment: Deployment, memory: Memory) -> dict[str, Any]:
    size, each = deployment.block_size, deployment.block_bytes
    num_blocks = deployment.num_blocks
    return {
        "weights": _mebibytes(memory.weight_bytes + memory.shift_weight_bytes),
        "a step's temporaries": f"about {_mebibytes(memory.workspace_bytes)}",
        "a KV block": f"{size} tokens, {each / 1024:,.1f} KiB",
        "KV blocks": f"about {num_blocks:,}, {_mebibytes(num_blocks * each)}",
        "KV tokens": f"about {(num_blocks - 1) * size:,}",
    }


def _mebibytes(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.1f} MiB"

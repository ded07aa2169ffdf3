"""What an engine would be on this machine, from settings and model headers alone."""

from collections.abc import Sequence
from typing import Any

import jax

from shiftjax.arch.config import ModelConfig
from shiftjax.arch.formats import Formats, formats_of
from shiftjax.arch.pooling import Pooling
from shiftjax.arch.weights import num_parameters
from shiftjax.config import EngineConfig
from shiftjax.costs.memory import Memory, weight_bytes
from shiftjax.deploy.deployment import Deployment, Devices
from shiftjax.deploy.window_rule import freed_in_words
from shiftjax.device.choosers import describe_width, wanted_by_width
from shiftjax.device.groups import define_steps
from shiftjax.device.sizing import measure
from shiftjax.embed.embed_settings import (
    check_embedding,
    embed_dtype,
    embed_shape,
    num_devices_of,
)
from shiftjax.fleet.setup import first_arrangement
from shiftjax.fleet.state import shown_arrangement
from shiftjax.local_deployment import deploy, host_copy_bytes
from shiftjax.model_files import ModelFiles
from shiftjax.parallel.grid import Device
from shiftjax.parallel.layout import Layout
from shiftjax.phases.resharding import PHASES
from shiftjax.weights.source import TensorSource


def make_plan(config: EngineConfig, files: ModelFiles) -> dict[str, Any]:
    """Rows of a table; bytes are per device, and estimates until a model is really loaded.

    Raises ConfigError like the start of an engine does.
    """
    source, tokenizer = files.source, files.tokenizer
    words = "none" if tokenizer is None else f"{tokenizer.vocab_size} tokens"
    rows = _model_rows(source) | {"tokenizer": words}
    if files.pooling is not None:
        return rows | _encoder_rows(config, source.config, files.pooling)
    devices, deployments = deploy(config, source.config, files.cache_dir)
    here, deployment = measure(devices), deployments[0]
    rows |= {
        "computed in": _formats(deployment.formats),
        "sizes of steps": f"{', '.join(map(str, deployment.token_buckets))} tokens",
        "longest sequence": f"{deployment.max_model_len} tokens",
        **_device_rows(here),
    }
    has_phases = len(deployments) > 1
    if has_phases:
        num_bytes = host_copy_bytes(source.config, deployment.formats)
        rows["weights on the host"] = f"{_mebibytes(num_bytes)}, out of which each phase is loaded"
    for phase, each in zip(PHASES, deployments, strict=False):
        of_phase = _deployment_rows(each, devices, here)
        label = f"{phase}: " if has_phases else ""
        rows |= {f"{label}{name}": value for name, value in of_phase.items()}
    return rows


def _formats(formats: Formats) -> str:
    if formats.weights == formats.activations:
        return formats.activations
    which = "experts" if formats.dense == formats.activations else "matrices"
    return f"{formats.activations}, {which} in {formats.weights}"


def _deployment_rows(
    deployment: Deployment, devices: Sequence[Device], here: Devices
) -> dict[str, Any]:
    """What the devices are in one configuration, and what they hold."""
    chosen = (step.attention for step in define_steps(deployment, devices).values())
    attention = {each.name: each.reason for each in chosen}
    memory = deployment.memory(here)
    deployment = deployment.sized(memory)
    return (
        {"attention": "; ".join(f"{name} ({reason})" for name, reason in attention.items())}
        | (_fleet_rows(deployment) if deployment.widths else _mesh_rows(deployment))
        | _stage_rows(deployment, here)
        | _memory_rows(deployment, memory)
        | _sum_rows(deployment, devices[0])
    )


def _model_rows(source: TensorSource) -> dict[str, Any]:
    model = source.config
    return {
        "model": f"{model.name} ({model.architecture})",
        "from": source.location,
        "parameters": f"{num_parameters(model) / 1e6:,.1f} million in {model.num_layers} layers",
    }


def _device_rows(here: Devices) -> dict[str, Any]:
    kind = jax.devices()[0].device_kind
    return {
        "devices": f"{here.num_devices} x {kind}",
        "memory of a device": _mebibytes(here.total_bytes),
    }


def _encoder_rows(config: EngineConfig, model: ModelConfig, pooling: Pooling) -> dict[str, Any]:
    """Every device holds all of the weights, and computes rows of its own."""
    here = measure(jax.devices())
    check_embedding(config, model, here)
    num_devices = num_devices_of(config, here.num_devices)
    shape = embed_shape(config, model, pooling.max_length, here)
    counts = (shape.most_rows(width) // num_devices for width in shape.widths)
    rows = (f"{n} of {width} tokens" for n, width in zip(counts, shape.widths, strict=True))
    dtype = embed_dtype(config)
    num_bytes = weight_bytes(Layout(model, 1, 1), formats_of(dtype))
    return {
        "computed in": dtype,
        "longest text": f"{shape.widths[-1]} tokens",
        "pooling": f"{pooling.kind}, {'to length 1' if pooling.normalize else 'not normalised'}",
        **_device_rows(here._replace(num_devices=num_devices)),
        "weights": f"{_mebibytes(num_bytes)}, whole on every device",
        "rows of a device": f"up to {' or '.join(rows)} in a step",
        "texts of a device": f"up to {shape.max_texts // num_devices} in a step",
    }


def _mesh_rows(deployment: Deployment) -> dict[str, Any]:
    layout, model = deployment.layout, deployment.layout.model
    padded = f"{layout.num_heads} / {layout.num_kv_heads}"
    return {
        "groups (dp)": deployment.dp,
        "base mode": f"sp {layout.sp}, tp {layout.tp}{', weights gathered' * layout.gathers}",
        "shift mode": f"sp 1, tp {layout.num_devices}",
        "query / KV heads": f"{model.num_heads} / {model.num_kv_heads}, padded to {padded}",
    }


def _fleet_rows(deployment: Deployment) -> dict[str, Any]:
    """The groups of each width, what is compiled for them, and what is padded for the widest."""
    wanted = wanted_by_width(deployment, jax.devices()[0])
    model, unit = deployment.layout.model, deployment.of_width(1).layout
    alone = Layout(model, 1, deployment.tp)
    rows: dict[str, Any] = {
        "units of a fleet": f"{deployment.grid.units} of tp {deployment.tp}",
        "groups at the start": shown_arrangement(first_arrangement(deployment)),
    }
    for width, modes in wanted.items():
        of_width = deployment.of_width(width)
        tokens = (deployment.num_blocks - 1) * of_width.block_size
        rows[f"groups of {width}"] = (
            f"{describe_width(of_width, modes)}, about {tokens:,} in a group"
        )
    bytes_alone, num_bytes = (weight_bytes(one, deployment.formats) for one in (alone, unit))
    counts = {
        f"{model.num_heads} query heads to {unit.num_heads}": unit.num_heads / alone.num_heads,
        f"{model.num_kv_heads} KV heads to {unit.num_kv_heads}": (
            unit.num_kv_heads / alone.num_kv_heads
        ),
        "weights": num_bytes / bytes_alone,
    }
    paddings = ", ".join(f"{name} ({ratio - 1:+.0%})" for name, ratio in counts.items())
    return rows | {"padding": f"{paddings} beside a unit alone"}


def _stage_rows(deployment: Deployment, here: Devices) -> dict[str, Any]:
    """What the devices of each stage hold; none where the layers are not in stages."""
    rows: dict[str, Any] = {}
    if deployment.pp == 1:
        return rows
    for number, stage in enumerate(deployment.stages, 1):
        model, held = stage.layout.model, stage.memory(here)
        assert model.stage is not None
        parts = [f"layers {model.stage.first} to {model.stage.first + model.num_layers - 1}"]
        parts += ["embedding"] * model.is_first_stage + ["LM head"] * model.is_last_stage
        parts += ["speculator"] * (model.is_last_stage and model.speculator is not None)
        weights = _mebibytes(held.weight_bytes + held.shift_weight_bytes)
        block = f"{stage.block_bytes / 1024:,.1f} KiB a KV block"
        rows[f"stage {number} of {deployment.pp}"] = f"{', '.join(parts)}: {weights}, {block}"
    return rows


def _host_rows(deployment: Deployment) -> dict[str, Any]:
    """How much the host tier holds; none without it."""
    if not deployment.host_bytes:
        return {}
    num_tokens = deployment.host_bytes // deployment.host_block_bytes * deployment.block_size
    return {"KV on the host": f"{_mebibytes(deployment.host_bytes)}, {num_tokens:,} tokens"}


def _memory_rows(deployment: Deployment, memory: Memory) -> dict[str, Any]:
    size, each = deployment.block_size, deployment.block_bytes
    num_blocks, freed = deployment.num_blocks, freed_in_words(deployment)
    of_longest = f", of sequences of {deployment.max_model_len:,}" if freed else ""
    rows = _host_rows(deployment) | {
        "weights": _mebibytes(memory.weight_bytes + memory.shift_weight_bytes),
        "a step's temporaries": f"about {_mebibytes(memory.workspace_bytes)}",
        "a KV block": f"{size} tokens, {each / 1024:,.1f} KiB",
        "KV blocks": f"about {num_blocks:,}, {_mebibytes(num_blocks * each)}",
        "KV tokens": f"about {deployment.num_kv_tokens:,}{of_longest}",
    }
    return rows | ({"KV of a sequence": freed} if freed else {})


def _sum_rows(deployment: Deployment, device: Device) -> dict[str, Any]:
    """What sums hold on GPUs; none elsewhere, or where there are no sums."""
    num_bytes = deployment.sum_buffer_bytes(wanted_by_width(deployment, device))
    if not num_bytes or device.platform != "gpu":
        return {}
    words = "outside of JAX's share, with NVLink: shiftjax doctor says how large that may be"
    return {"buffers of sums": f"{_mebibytes(num_bytes)} {words}"}


def _mebibytes(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.1f} MiB"

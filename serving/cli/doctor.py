"""`shiftjax doctor`: what is here, what an engine would choose and why, and what to do about it.

It works anywhere, also on a CPU, and loads no weights. The attention kernels are tried anew,
whatever an earlier start has found; what comes out replaces that.
"""

import argparse
import json
import math
import re
import subprocess
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.measure import Calls, Effort, chain_seconds, measure_ceilings
from serving.run.progress import print_table
from shiftjax.arch.config import ModelConfig
from shiftjax.arch.presets import PRESETS
from shiftjax.config import SETTINGS, EngineConfig
from shiftjax.core.request import SamplingParams
from shiftjax.deploy.deployment import Devices
from shiftjax.deploy.resolve import check_hosts, resolve
from shiftjax.device.attention_check import KernelCheck, Verdict, find_verdict
from shiftjax.device.choosers import wanted_by_width
from shiftjax.device.groups import attention_of
from shiftjax.device.mesh import named, replicated_spec, rows_mesh
from shiftjax.device.sizing import measure
from shiftjax.models import gpu_software
from shiftjax.models.attention_backend import KERNEL_CAPABILITY
from shiftjax.parallel.grid import Device
from shiftjax.settings import compile_cache_dir, environ_beside
from shiftjax.weights.locate import hub_of, open_source, resolve_model

STAND_IN = "llama-8b"  # whose shapes are tried where no model is named
REDUCED_BYTES = tuple(1 << power for power in range(14, 23))  # 16 KB to 4 MB
ON_GPU = Effort()
ELSEWHERE = Effort(repeats=3, calls=4, copy_bytes=64 << 20, gemm_width=512)  # a second or two
CUDA_13_DRIVER = (580,)  # the first branch that runs CUDA 13 (CUDA 13.0 release notes, table 3)
# Of a GPU's memory: for JAX at most, until one has been measured; for graphs, NCCL and modules.
MOST_SHARE, BESIDE_SHARE = 0.90, 0.05
LESS, MORE = 0.05, 0.02  # than what is recommended, about which nothing is said
Found = dict[str, Any]


def run_doctor(
    arguments: argparse.Namespace, config: EngineConfig, sampling: SamplingParams
) -> int:
    """Look, measure, print; 1 where a GPU or a setting cannot be used, or kernels are wrong."""
    model = model_of(config, arguments.model)
    try:
        devices = jax.devices()
    except Exception as error:  # a RuntimeError, or an assertion of JAX's: no backend starts
        found = without_devices(error)
        print_table("doctor", found["software"], stderr=False)
    else:
        found = examine(config, model, devices[: config.parallel.devices])
        print_table("doctor", shown(found), stderr=False)
    for line in found["advice"]:
        print(f"-> {line}")
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    if "error" in found:
        return 1
    is_wrong = any(each["problem"] or each["name"] == "none" for each in found["attention"])
    return int(is_wrong or has_idle_gpu(found))


def model_of(config: EngineConfig, named: str | None) -> ModelConfig:
    """The model whose shapes are tried. Raises CheckpointError for one that is not here."""
    name = config.model.model
    if named is None and name == SETTINGS["model"].default:
        return PRESETS[STAND_IN]
    hub = hub_of(config.model)
    found = resolve_model(name, hub)
    return open_source(found, drafts=config.drafts, folder=hub.folder).config


def without_devices(error: Exception) -> Found:
    """What can be said where JAX has no devices at all."""
    words = " ".join(str(error).split()) or "it finds none of the platforms that it may use"
    line = f"JAX does not start: {words}; unset JAX_PLATFORMS, or set it to cpu for no GPU"
    return {"software": gpu_software.versions(), "error": words, "advice": [line]}


def examine(config: EngineConfig, model: ModelConfig, devices: Sequence[Device]) -> Found:
    """Everything that the command says, for programs."""
    is_gpu = devices[0].platform == "gpu"
    effort = ON_GPU if is_gpu else ELSEWHERE
    found: Found = {
        "devices": [describe_device(device) for device in devices],
        "nvlinks": nvlinks(),
        "software": gpu_software.versions(),
        "assemblers": [
            each._asdict() | {"version": ".".join(map(str, each.version))}
            for each in gpu_software.assemblers()
        ],
        "model": model.name,
        "attention": list(attention(config, model, devices)),
        "ceilings": {
            **measure_ceilings(effort)._asdict(),
            "copy_bytes": effort.copy_bytes,
            "gemm_width": effort.gemm_width,
        },
        "all_reduce": [
            {"bytes": size, "seconds": all_reduce_seconds(devices, size, effort)}
            for size in (REDUCED_BYTES if len(devices) > 1 else ())
        ],
    }
    found["sum_buffer_bytes"] = 0
    if is_gpu and any((found["nvlinks"] or {}).values()):
        found["sum_buffer_bytes"] = bytes_of_sums(config, model, devices)
    return found | {"advice": list(advice(found, config))}


def bytes_of_sums(config: EngineConfig, model: ModelConfig, devices: Sequence[Device]) -> int:
    """What sums of all programs hold on each device, outside of JAX's share."""
    deployment = resolve(config, model, _room_for(model, devices))
    return deployment.sum_buffer_bytes(wanted_by_width(deployment, devices[0]))


def _room_for(model: ModelConfig, devices: Sequence[Device]) -> Devices:
    """The memory of the devices; enough for a model of which shapes alone count."""
    here = measure(devices)
    if model is PRESETS[STAND_IN]:
        here = here._replace(total_bytes=1 << 40, free_bytes=1 << 40)
    return here


def describe_device(device: Device) -> Found:
    """What JAX says of a device; None for what it does not know."""
    stats = device.memory_stats() or {}
    capability = getattr(device, "compute_capability", None)
    return {
        "id": device.id,
        "platform": device.platform,
        "kind": device.device_kind,
        "compute_capability": None if capability is None else str(capability),
        "multiprocessors": getattr(device, "core_count", None),
        "memory_bytes_for_jax": stats.get("bytes_limit"),
        "memory_bytes": total_memory().get(device.id) if device.platform == "gpu" else None,
    }


# ------------------------------------------------------------------ attention


def attention(
    config: EngineConfig, model: ModelConfig, devices: Sequence[Device]
) -> Iterator[Found]:
    """What would be chosen for groups of each width, why, and what the check found."""
    check_hosts(config)
    here = _room_for(model, devices)
    check = KernelCheck(environ_beside(), compile_cache_dir(config), reads_kept=False)
    for width, deployment in resolve(config, model, here).by_width.items():
        verdicts: list[Verdict] = []

        def tried(shape: Any, verdicts: list[Verdict] = verdicts) -> str | None:
            verdicts.append(find_verdict(check, devices, shape))
            return verdicts[-1].problem

        try:
            name, reason = (
                (chosen := attention_of(deployment, devices[0], tried)).name,
                chosen.reason,
            )
        except ValueError as error:  # a setting that cannot be had: the reason is the answer
            name, reason = "none", str(error)
        verdict = verdicts[0] if verdicts else None
        yield {
            "width": width,
            "mesh": deployment.mesh,
            "name": name,
            "reason": reason,
            "checked": verdict is not None,
            "seconds": verdict.seconds if verdict else None,
            "problem": verdict.problem if verdict else None,
            "detail": verdict.detail if verdict else "",
        }


# ------------------------------------------------------------------ measured


def all_reduce_seconds(devices: Sequence[Device], num_bytes: int, effort: Effort) -> float:
    """Time one sum over all devices of `num_bytes` of bfloat16 on each, in a chain of them."""
    mesh, everywhere = rows_mesh(devices), replicated_spec()
    share = jnp.bfloat16(1 / len(devices))  # so that the chain does not grow
    summed = jax.shard_map(
        lambda x: jax.lax.psum(x * share, mesh.axis_names),
        mesh=mesh,
        in_specs=everywhere,
        out_specs=everywhere,
        check_vma=False,
    )
    ones = jax.device_put(jnp.ones(num_bytes // 2, jnp.bfloat16), named(mesh, everywhere))
    return chain_seconds(Calls(summed, ones, [()]), effort)


# ------------------------------------------------------------------ NVIDIA's own tool


def _nvidia_smi(*arguments: str) -> str | None:
    """What it prints; None where it is missing or fails."""
    try:
        run = subprocess.run(
            ["nvidia-smi", *arguments], capture_output=True, text=True, timeout=30, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return run.stdout


def nvlinks(ask: Callable[..., str | None] = _nvidia_smi) -> dict[int, int] | None:
    """Active NVLink links by GPU, as the driver counts GPUs; None: it cannot be known."""
    text = ask("nvlink", "--status")
    if text is None:
        return None
    parts = re.split(r"^GPU (\d+):", text, flags=re.MULTILINE)[1:]
    pairs = zip(parts[::2], parts[1::2], strict=True)
    return {int(gpu): len(re.findall(r"Link \d+: [\d.]+ GB/s", part)) for gpu, part in pairs}


def total_memory(ask: Callable[..., str | None] = _nvidia_smi) -> dict[int, int]:
    """Bytes of memory by GPU; nothing where it cannot be known."""
    text = ask("--query-gpu=index,memory.total", "--format=csv,noheader,nounits") or ""
    rows = (line.split(",") for line in text.splitlines() if line.count(",") == 1)
    return {int(index): int(mebibytes) << 20 for index, mebibytes in rows}


# ------------------------------------------------------------------ for people


def has_idle_gpu(found: Found) -> bool:
    """Whether NVIDIA's driver runs here, and JAX uses no GPU."""
    has_driver = found["software"]["driver"] != "none"
    return has_driver and found["devices"][0]["platform"] != "gpu"


def advice(found: Found, config: EngineConfig) -> Iterator[str]:
    """What to install or set, a sentence each."""
    first, software = found["devices"][0], found["software"]
    if has_idle_gpu(found):
        yield _to_reach_the_gpu(software)
    if first["platform"] != "gpu":
        if not has_idle_gpu(found):
            yield "nothing: there is no NVIDIA driver here, and XLA's loops are right for a CPU"
        return
    if not found["assemblers"]:
        yield "no ptxas was found: pip install 'jax[cuda12]', or 'jax[cuda13]', brings one"
    if reason := gpu_software.why_not_assembled():
        yield reason
    if any(each["problem"] for each in found["attention"]):
        yield (
            "the attention kernels are not used, since they are wrong here: update driver, JAX and "
            "CUDA wheels, and report it with the file of --json; attention = xla skips the check"
        )
    elif not str(first["compute_capability"]).startswith(f"{KERNEL_CAPABILITY}."):
        yield f"nothing to install: {first['kind']} has no attention kernels, and runs XLA's loops"
    if config.compile.cache_dir == "none":
        yield "cache_dir = none: every start compiles, and tries the kernels, anew"
    yield from _about_memory(first, found["sum_buffer_bytes"])
    links = found["nvlinks"]
    if len(found["devices"]) > 1 and links is not None and not any(links.values()):
        yield "no NVLink between the GPUs: all-reduces cross PCIe; use as little tp as fits, and dp"


def _to_reach_the_gpu(software: dict[str, str]) -> str:
    if software["plugin"] == "none":
        is_new = gpu_software.parse_version(software["driver"]) >= CUDA_13_DRIVER
        return f"JAX uses no GPU: pip install 'shiftjax[{'cuda13' if is_new else 'cuda12'}]'"
    return (
        "JAX uses no GPU, though its CUDA plugin is installed: unset JAX_PLATFORMS; "
        "python -c 'import jax; jax.devices(\"cuda\")' says what is wrong"
    )


def _about_memory(device: Found, sum_bytes: int) -> Iterator[str]:
    for_jax, total = device["memory_bytes_for_jax"], device["memory_bytes"]
    if not for_jax or not total:
        return
    share, best = for_jax / total, share_for_jax(total, sum_bytes)
    if not best - LESS <= share <= best + MORE:
        sums = f", and {sum_bytes / 1e9:.1f} GB of buffers of sums," if sum_bytes else ""
        yield (
            f"JAX may use {share:.0%} of a GPU's memory: XLA_PYTHON_CLIENT_MEM_FRACTION={best:.2f} "
            f"leaves what CUDA graphs, NCCL and compiled programs{sums} need beside it"
        )


def share_for_jax(total_bytes: int, sum_bytes: int) -> float:
    """The share of a GPU's memory that JAX should take, in hundredths."""
    room = 1 - BESIDE_SHARE - sum_bytes / total_bytes
    return min(MOST_SHARE, math.floor(100 * room) / 100)


def shown(found: Found) -> Found:
    """The rows of the table."""
    first, links, ceilings = found["devices"][0], found["nvlinks"], found["ceilings"]
    rows: Found = {"devices": f"{len(found['devices'])} x {first['kind']}"}
    if first["platform"] == "gpu":
        rows["compute capability"] = first["compute_capability"]
        rows["multiprocessors"] = first["multiprocessors"]
        rows["NVLink links of a GPU"] = (
            "unknown" if links is None else ", ".join(map(str, links.values())) or "none"
        )
    rows |= found["software"]
    paths = [each["path"] for each in found["assemblers"] if each["path"]]
    rows |= {"ptxas": paths[0]} if paths else {}
    for each in found["attention"]:
        group = f", groups of {each['width']}" if len(found["attention"]) > 1 else ""
        rows[f"attention{group}"] = f"{each['name']}: {each['reason']}"
        rows[f"its check{group}"] = _shown_check(each)
    rows["shapes of"] = found["model"]
    rows["copy"] = f"{ceilings['bytes_per_second'] / 1e9:,.0f} GB/s"
    width = ceilings["gemm_width"]
    rows["GEMM"] = f"{ceilings['flops_per_second'] / 1e12:,.2f} TFLOP/s (width {width})"
    for each in found["all_reduce"]:
        rows[f"all-reduce, {each['bytes'] >> 10} KB"] = f"{each['seconds'] * 1e6:,.1f} µs"
    return rows


def _shown_check(each: Found) -> str:
    if not each["checked"]:
        return "not tried"
    return f"{each['problem'] or 'passed'}, in {each['seconds']:.1f} s"

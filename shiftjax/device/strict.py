"""What strict numerics take of a compiler, and of the implementations that a device runs.

On GPUs a product has one tile and an uncut contraction for all numbers of rows, and in all modes:
XLA's own choice is another split for 8 rows than for 1,024. XLA:GPU makes every product of numbers
by Triton, with the sizes below. What Mosaic kernels do is fixed by their own settings. Nothing else
adds up many numbers in an order that rows could change; what does is refused by name.
"""

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import NamedTuple

from shiftjax.arch.config import ModelConfig
from shiftjax.arch.formats import FORMATS, Formats
from shiftjax.arch.numerics import GPU_TILE, Numerics
from shiftjax.device.gpu_options import refusal
from shiftjax.models.attention_backend import AttentionBackend
from shiftjax.models.entry_backend import why_not_traced
from shiftjax.models.norm_backend import NormBackend
from shiftjax.models.product_backend import Products, plain_shape
from shiftjax.options import ConfigError
from shiftjax.parallel.grid import Device
from shiftjax.parallel.layout import Layout

# Of all products of XLA:GPU: rows and channels alike, because XLA exchanges operands where rows are
# few. It joins matrices inside of a product, q, k and v say, whose channels are to be whole tiles;
# of 64 it asks that by itself. Four stages of both, and of three matrices, fit in shared memory.
TILES: Mapping[int, str] = MappingProxyType(
    {
        GPU_TILE: "block_m:128 block_n:128 block_k:32 num_stages:4 num_warps:8 num_ctas:1",
        64: "block_m:64 block_n:64 block_k:64 num_stages:4 num_warps:4 num_ctas:1",
    }
)
TILE = "xla_gpu_override_gemm_autotuner"
# By platform. A program rounds where it says so: XLA would keep float32 inside of fusions, which
# programs of other modes and sizes have elsewhere.
STRICT_OPTIONS: Mapping[str, Mapping[str, str | int]] = MappingProxyType(
    {
        "cpu": {"xla_allow_excess_precision": False},
        "gpu": {
            "xla_allow_excess_precision": False,
            "xla_gpu_autotune_level": 0,
            TILE: TILES[64],
            "xla_gpu_experimental_force_split_k": 1,
            "xla_gpu_triton_gemm_any": True,
            "xla_gpu_cublas_fallback": False,
            "xla_gpu_exclude_nondeterministic_ops": True,
            # else the option above leaves Triton out
            "xla_gpu_experimental_deterministic_ops_triton": (
                "DETERMINISTIC_OPS_TRITON_MODE_UNCHECKED"
            ),
        },
    }
)


def strict_options(platform: str, layout: Layout, formats: Formats) -> dict[str, str | int]:
    """Return the compiler's options for steps of strict numerics, the same in every mode."""
    options = dict(STRICT_OPTIONS[platform])
    if TILE in options:
        options[TILE] = TILES[tile_of(layout, formats)]
    return options


def tile_of(layout: Layout, formats: Formats) -> int:
    """Return the rows and channels of a tile of XLA's products, on GPUs.

    The same in groups of other widths and in other phases: there a device has of a matrix a
    multiple of what it would have where each has one leaf.
    """
    shape = plain_shape(Layout(layout.model, 1, layout.padded_for), formats)
    outputs = [each.outputs for each in shape.matrices if not each.block] if shape else []
    return next((tile for tile in TILES if all(each % tile == 0 for each in outputs)), min(TILES))


class Chosen(NamedTuple):
    """What steps of a group run."""

    attention: AttentionBackend
    norms: NormBackend
    products: Products


def check_strict(
    device: Device, numerics: Numerics, model: ModelConfig, formats: Formats, chosen: Chosen
) -> None:
    """Raise ConfigError for what would break the promise of `numerics` on a device, by name."""
    if not numerics.is_strict or device.platform == "cpu":
        return
    words = f"numerics = {numerics.name} cannot be had on {device.device_kind} with"
    if problems := [f"{words} {each}" for each in _problems(device, model, formats, chosen)]:
        raise ConfigError([f"{problem}; use numerics = fast" for problem in problems])


def _problems(
    device: Device, model: ModelConfig, formats: Formats, chosen: Chosen
) -> Iterator[str]:
    attention, norms, products = chosen
    if device.platform not in STRICT_OPTIONS:
        yield f"products of {device.platform}: nobody knows what their order depends on"
        return
    if attention.name != "pallas":
        yield f"attention as {attention.name} ({attention.reason}): its sums depend on the bucket"
    types = FORMATS[formats.activations].dtype, FORMATS[formats.kv].dtype
    if words := why_not_traced(model, types):
        yield f"heads that XLA makes: {words}"
    if norms.name != "pallas":
        yield f"norms as {norms.name}: {norms.reason}"
    if model.experts is not None:
        yield f"the experts of {model.name}: tiles and splits follow the tokens of a step"
    if model.num_late_layers:
        yield f"the late layers of {model.name}: their rows attend in another kernel"
    has_codes = formats.has_codes_of_inputs and not FORMATS[formats.weights].of_experts
    codes = products.codes
    if has_codes and (codes.name != "pallas" or codes.reason):
        yield f"products of codes that XLA multiplies: {codes.reason}"
    for name, value in STRICT_OPTIONS[device.platform].items():
        if reason := refusal(device, name, value):
            yield f"this version of XLA: {reason}"

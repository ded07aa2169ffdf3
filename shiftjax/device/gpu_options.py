"""What XLA is told when it compiles a step for GPUs: by default, to make one CUDA graph of it.

XLA records what it launches as command buffers (CUDA graphs), but not all kinds of operations by
itself. A conditional that it leaves out, the sampler's, brings its predicate to the host and waits
there, in every step: the next one cannot be enqueued before. Collectives that it leaves out cut
the graph in pieces. With the kinds below a whole step is one launch by the host
(`tests/compile/test_steps.py`). Sorts by CUB, which XLA takes for many rows on a chip, cannot be
recorded, and so keep the sampler's conditional out: 4 ms of each step of 64 rows on an H200.
"""

import logging
from collections.abc import Mapping
from types import MappingProxyType

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

from shiftjax.options import ConfigError, xla_options
from shiftjax.parallel.grid import Device

logger = logging.getLogger(__name__)

KINDS_IN_GRAPHS = "xla_gpu_enable_command_buffer"
# All-reduces of small messages by kernels that read the peers' memory (one and two shot) ...
KERNEL_SUMS = "xla_gpu_experimental_use_collective_kernels"
KERNEL_SUMS_IN_GRAPHS = "COLLECTIVES_KERNEL"  # ... which jax 0.11 cannot record
# Lists replace XLA's own here, so they are whole; names are those of its DebugOptions (xla.proto).
ONE_GRAPH: Mapping[str, str] = MappingProxyType(
    {
        KINDS_IN_GRAPHS: "FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,"
        f"DYNAMIC_SLICE_FUSION,CONDITIONAL,WHILE,COLLECTIVES,{KERNEL_SUMS_IN_GRAPHS}",
        "xla_gpu_graph_min_graph_size": "1",
        "xla_gpu_enable_cub_radix_sort": "False",
        KERNEL_SUMS: "COLLECTIVE_KERNEL_ALL_REDUCE",
    }
)


def gpu_options(device: Device, setting: str) -> dict[str, str]:
    """Return the compiler's options for steps on `device`, as the setting `gpu_options` has them.

    None for what is no GPU. Of `auto`, what this version of XLA does not know is left out, of a
    list only the items that it does not know, with a warning for each.

    Raises:
        ConfigError: an option that was asked for by name is unknown, or its value is.
    """
    if device.platform != "gpu" or setting == "none":
        return {}
    if setting == "auto":
        return one_graph(device)
    wanted = xla_options(setting)
    reasons = [refusal(device, name, value) for name, value in wanted.items()]
    if refused := [f"gpu_options: {reason}" for reason in reasons if reason]:
        raise ConfigError(refused)
    return wanted


def one_graph(device: Device) -> dict[str, str]:
    """Return what makes one graph of a step with this XLA.

    Where kernels of sums cannot be recorded, each would cut the graph, twice in a layer: NCCL sums
    there, which can.
    """
    options = known_options(device, ONE_GRAPH)
    if KERNEL_SUMS_IN_GRAPHS not in options.get(KINDS_IN_GRAPHS, "").split(","):
        options[KERNEL_SUMS] = ""
    return options


def known_options(device: Device, options: Mapping[str, str]) -> dict[str, str]:
    """Return what this XLA knows of some options; a warning says what it does not."""
    known = {}
    for name, value in options.items():
        items = [value]
        if refusal(device, name, value):
            items = [item for item in value.split(",") if _is_known(device, name, item)]
        if items:
            known[name] = ",".join(items)
    return known


def _is_known(device: Device, name: str, item: str) -> bool:
    reason = refusal(device, name, item)
    if reason:
        logger.warning("left out for steps on GPUs: %s; a newer jax may know it", reason)
    return reason is None


def refusal(device: Device, name: str, value: str | int) -> str | None:
    """Compile nearly nothing with an option; return why XLA refuses it, None if it does not."""
    number = jax.ShapeDtypeStruct((), jnp.int32, sharding=SingleDeviceSharding(device))
    try:
        jax.jit(lambda x: x).lower(number).compile(compiler_options={name: value})
    except jax.errors.JaxRuntimeError as error:
        return f"{name}={value}: {str(error).splitlines()[0]}"
    return None

"""What XLA is told when it compiles a step for GPUs: by default, to make one CUDA graph of it.

XLA records what it launches as command buffers (CUDA graphs), but not all kinds of operations by
itself. A conditional that it leaves out, the sampler's, brings its predicate to the host and waits
there, in every step: the next one cannot be enqueued before. Collectives that it leaves out cut
the graph in pieces. With the kinds below a whole step is one launch by the host
(`tests/compile/test_steps.py`).
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

# Lists replace XLA's own here, so they are whole; names are those of its DebugOptions (xla.proto).
ONE_GRAPH: Mapping[str, str] = MappingProxyType(
    {
        "xla_gpu_enable_command_buffer": "FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,"
        "DYNAMIC_SLICE_FUSION,CONDITIONAL,WHILE,COLLECTIVES,COLLECTIVES_KERNEL",
        "xla_gpu_graph_min_graph_size": "1",
        # All-reduces of small messages by kernels that read the peers' memory (one and two shot).
        "xla_gpu_experimental_use_collective_kernels": "COLLECTIVE_KERNEL_ALL_REDUCE",
    }
)


def gpu_options(device: Device, setting: str) -> dict[str, str]:
    """Return the compiler's options for steps on `device`, as the setting `gpu_options` has them.

    None for what is no GPU. Of `auto`, what this version of XLA does not know is left out, with a
    warning: steps run without it, slower.

    Raises:
        ConfigError: an option that was asked for by name is unknown, or its value is.
    """
    if device.platform != "gpu" or setting == "none":
        return {}
    wanted = ONE_GRAPH if setting == "auto" else xla_options(setting)
    refused = refused_options(device, wanted)
    if refused and setting != "auto":
        raise ConfigError(f"gpu_options: {reason}" for reason in refused.values())
    for reason in refused.values():
        logger.warning("steps are launched in pieces: %s; a newer jax may know better", reason)
    return {name: value for name, value in wanted.items() if name not in refused}


def refused_options(device: Device, options: Mapping[str, str]) -> dict[str, str]:
    """Compile nearly nothing with each option; return why XLA refuses some, by name."""
    number = jax.ShapeDtypeStruct((), jnp.int32, sharding=SingleDeviceSharding(device))
    nothing = jax.jit(lambda x: x).lower(number)
    refused = {}
    for name, value in options.items():
        try:
            nothing.compile(compiler_options={name: value})
        except jax.errors.JaxRuntimeError as error:
            refused[name] = f"{name}={value}: {str(error).splitlines()[0]}"
    return refused

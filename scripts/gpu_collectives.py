"""All-reduces over all GPUs, by size of the message and by who does them."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from gpu_parts import Run
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pallas_kernels.measure import Calls, chain_seconds

KERNELS = "xla_gpu_experimental_use_collective_kernels"
KINDS = {"XLA's kernels": "COLLECTIVE_KERNEL_ALL_REDUCE", "NCCL": ""}
HIDDEN = 8192  # elements of a token's activations in Llama-70B
TOKENS = (1, 8, 64, 256)  # 16 KB, 128 KB, 1 MB, 4 MB


def all_reduce_rows(run: Run) -> Iterator[dict[str, Any]]:
    """Yield a row for each size and kind: seconds of one of a chain that is one program."""
    mesh = Mesh(np.array(jax.devices()), ("all",))
    is_gpu = jax.devices()[0].platform == "gpu"
    for tokens in TOKENS:
        for kind, value in KINDS.items():
            num_bytes = 2 * tokens * HIDDEN
            row: dict[str, Any] = {"row": f"{num_bytes >> 10} KB, {kind}", "bytes": num_bytes}
            try:
                calls = all_reduce_calls(mesh, tokens)
                seconds = chain_seconds(calls, run.effort, {KERNELS: value} if is_gpu else None)
                yield row | {"us": seconds * 1e6}
            except Exception as error:  # a version of XLA that has no such kernels
                yield row | {"unavailable": str(error).strip().splitlines()[0][:200]}


def all_reduce_calls(mesh: Mesh, tokens: int) -> Calls:
    """Return calls that sum the activations of `tokens` over the mesh; the sum stays the size."""
    whole = PartitionSpec()

    def call(x):
        return lax.psum(x, "all") * jnp.bfloat16(1 / mesh.size)

    reduce = jax.shard_map(call, mesh=mesh, in_specs=whole, out_specs=whole, check_vma=False)
    x = jnp.ones((tokens, HIDDEN), jnp.bfloat16)
    return Calls(reduce, jax.device_put(x, NamedSharding(mesh, whole)), [()])

"""What calling a step costs the host, by the number of arrays that it is called with.

    python scripts/bench.py call --model llama-70b --devices 8

The program is empty: it takes all arguments of a step and returns the pools and the tokens. The
arguments are the engine's own in number, kind and sharding: weights that are one array each or
joined over layers, KV pools that hold one layer each or as many as a GPU's arrays do. Every shard
has one element, since their bytes cost the host nothing. Rounds of all kinds alternate; a row is
the median of the calls of all rounds, from the call to the end of the program.
"""

import argparse
import statistics
import time
from collections.abc import Iterator
from itertools import product
from typing import Any

from shiftjax.config import EngineConfig
from shiftjax.settings import make_virtual_devices

TOKENS, ROWS, CALLS, KV_SHARE = 64, 64, 40, 0.35  # of a GPU's memory, to size the pools
OPTIONS = {
    "--model": "llama-70b",
    "--devices": 8,
    "--machine": ("h200x8", "whose memory sizes the pools"),
    "--rounds": 9,
}


def shapes_of(model: str, devices: int, machine: str) -> dict[str, tuple[Any, Any]]:
    """Return weights and pools as shapes on `devices`, by what of them is joined."""
    import jax
    import numpy as np

    from shiftjax.arch.formats import formats_of
    from shiftjax.arch.presets import PRESETS
    from shiftjax.costs.machine_files import load_machine
    from shiftjax.costs.memory import kv_token_bytes
    from shiftjax.device.mesh import make_mesh
    from shiftjax.device.mode_weights import ModeWeights
    from shiftjax.device.place import define
    from shiftjax.device.pool import abstract_pools
    from shiftjax.parallel.layout import Layout

    layout = Layout(PRESETS[model], 1, devices)
    mesh = make_mesh(jax.devices()[:devices], 1, devices)
    weights = ModeWeights(define(layout, formats_of("bfloat16")), layout, "alias")
    joined = weights._replace(is_joined=True)
    token_bytes = kv_token_bytes(layout, formats_of("bfloat16"))
    num_blocks = int(KV_SHARE * load_machine(machine).memory_bytes / (16 * token_bytes))
    pools = abstract_pools(mesh, layout, num_blocks, 16, np.dtype("bfloat16"))
    each = [pools[0]] * layout.model.num_layers
    shift = layout.shift
    apart, together = (one.abstract(shift, mesh) for one in (weights, joined))
    return {
        "one array each": (apart, each),
        "weights joined": (together, each),
        "weights and pools joined": (together, pools),
    }


def made(weights: Any, pools: Any) -> Any:
    """Return an empty program over such arguments, compiled, and arrays to call it with."""
    import jax
    import numpy as np

    everywhere = jax.sharding.NamedSharding(pools[0][0].sharding.mesh, jax.sharding.PartitionSpec())

    def small(x: jax.ShapeDtypeStruct) -> jax.Array:
        shards = x.sharding.shard_shape(x.shape)
        ways = [size // shard for size, shard in zip(x.shape, shards, strict=True)]
        return jax.device_put(np.zeros(ways, x.dtype), x.sharding)

    def step(weights: Any, pools: Any, last_tokens: Any, flat: Any) -> Any:
        return pools, last_tokens + flat[:ROWS]

    arrays = jax.tree.map(small, (weights, pools))
    tokens, flat = (jax.device_put(np.zeros(n, np.int32), everywhere) for n in (ROWS, 16 * TOKENS))
    jitted = jax.jit(step, donate_argnums=1, keep_unused=True)
    compiled = jitted.lower(*arrays, tokens, flat).compile()
    return compiled, [*arrays, tokens, flat]


def measure(asked: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield a row for each kind of arguments."""
    make_virtual_devices(EngineConfig.from_options(devices=asked.devices))
    import jax

    shapes = shapes_of(asked.model, asked.devices, asked.machine)
    programs = {name: made(*each) for name, each in shapes.items()}
    seconds: dict[str, list[float]] = {name: [] for name in programs}
    for _, (name, (step, arguments)) in product(range(asked.rounds), programs.items()):
        for _ in range(CALLS):
            begin = time.perf_counter()
            arguments[1], arguments[2] = step(*arguments)
            jax.block_until_ready(arguments[2])
            seconds[name].append(time.perf_counter() - begin)
    for name, each in seconds.items():
        count = len(jax.tree.leaves(programs[name][1]))
        yield {"arguments": name, "arrays": count, "ms": 1e3 * statistics.median(each)}

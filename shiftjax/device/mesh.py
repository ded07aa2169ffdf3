"""Where everything lives: mesh axes, head maps and every PartitionSpec of the engine.

A group of `P = SP * TP` devices is a mesh with axes `("pp", "sp", "tp")`. Heads and KV cache are
always split over all P devices in tp-major order: block `j` of the heads sits on the device
(sp = j mod SP, tp = j div SP). For (SP=3, TP=2), with device (s, t) at place s * TP + t:

    place on the mesh    0  1  2  3  4  5
    (sp, tp)            00 01 10 11 20 21
    head block j         0  3  1  4  2  5        read by j: devices 0 2 4 1 3 5

(Shift Parallelism, arXiv 2509.16495, section 3.3, prints the same order.) `KV_AXES` below is
the only place that says so; both modes and the cache use it, which is why a step of either mode
finds the cache that a step of the other has written.
"""

import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from shiftjax.parallel.mode import AXES, KV_AXES, SHARDED_AXES, WEIGHT_AXES, Device, Mode


def make_mesh(devices: list[Device], sp: int, tp: int) -> Mesh:
    """Return the mesh of one group; `devices` are taken in order, tp neighbours first."""
    grid = np.array(devices, dtype=object).reshape(1, sp, tp)
    return Mesh(grid, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def weight_spec(axes: tuple[str | None, ...], mode: Mode) -> P:
    """Return the spec of a weight with these logical axes.

    The LM head (`lm_vocab`) is split over all devices in both modes: a step samples few rows, so
    its cost is the reading of the weight, and 1/P of it is least.
    """
    split = {name: WEIGHT_AXES[mode] for name in SHARDED_AXES} | {"lm_vocab": KV_AXES}
    return P(*(split.get(axis) if axis else None for axis in axes))


def pool_spec() -> P:
    """Return the spec of a KV pool `[blocks, kv_heads, block_size, head_dim]`, in all modes."""
    return P(None, KV_AXES)


def payload_spec() -> P:
    """Return the spec of a block of all layers, `[2 * layers, kv_heads, block_size, head_dim]`."""
    return P(None, KV_AXES)


def rows_spec() -> P:
    """Return the spec of arrays whose first dimension is logit rows, split for sampling."""
    return P(KV_AXES)


def replicated_spec() -> P:
    """Return the spec of an array that every device holds whole."""
    return P()


def named(mesh: Mesh, spec: P) -> NamedSharding:
    """Bind a spec of this file to a mesh."""
    return NamedSharding(mesh, spec)

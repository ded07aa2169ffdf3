"""Decodes at split positions: queries and parts that travel, or normalisers alone.

    python scripts/bench.py kv_normalisers --machine h200x8

A device that projects the queries of all its neighbours' heads needs none of theirs. Its share of
`o` may be as wide, too, and multiply what it has found at its own positions: the all-reduce after
`o` adds up the rest. Then neighbours tell each other the maximum and the sum of each softmax, and
nothing else. For it q and o are read `ways` times as wide, as the mode between stores them.

One layer's attention with q and o is compiled in SHIFT on 8 virtual devices, in float32, both ways.
`bytes` are those of its collectives, the all-reduce after o included; `error` is between what both
give. `us` are predicted for the machine in bfloat16, of what the two ways have apart: exchanges,
products with q and o, launches.
"""

import argparse
from collections.abc import Generator
from typing import Any

from shiftjax.config import EngineConfig
from shiftjax.settings import make_virtual_devices

DEVICES, CONTEXT = 8, 16  # tokens of context on each device: its length moves nothing
MODELS = ("qwen3-30b-a3b", "qwen3-235b-a22b")
ROWS = (1, 64, 256)
LAUNCHES = 2  # of combining: normalisers, and the gains of parts
OPTIONS = {"--machine": "h200x8"}


def measure(asked: argparse.Namespace) -> Generator[dict[str, Any], None, dict[str, Any]]:
    """Yield a row for each model and number of rows; return the models for which it pays."""
    make_virtual_devices(EngineConfig.from_options(devices=DEVICES))
    from shiftjax.arch.presets import PRESETS
    from shiftjax.parallel.layout import Layout

    least: dict[str, float] = {}
    for name in MODELS:
        layout = Layout(PRESETS[name], DEVICES, 1, by_position=True)
        for rows in ROWS:
            moved, error = compiled(layout, rows)
            seconds = predicted(layout, rows, asked.machine)
            yield {
                **{"model": name, "ways": layout.position_ways, "rows": rows, "error": error},
                **{f"{way}_bytes": sum(moved[way].values()) for way in moved},
                **{f"{way}_collectives": len(moved[way]) for way in moved},
                **{f"{way}_us": 1e6 * seconds[way] for way in seconds},
            }
            saved = layout.model.num_layers * (seconds["parts"] - seconds["normalisers"])
            least[name] = min(least.get(name, saved), saved)
    return {f"least ms a step saved, {name}": 1e3 * saved for name, saved in least.items()}


def compiled(layout: Any, rows: int) -> tuple[dict[str, dict], float]:
    """Return the collectives of both ways, by kind and bytes, and how far they differ."""
    from functools import partial

    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import PartitionSpec as P

    from serving.bench.hlo import collectives
    from shiftjax.device.mesh import make_mesh
    from shiftjax.models.neighbours import neighbours_of
    from shiftjax.parallel.grid import ALL_AXES

    model, own, ways = layout.model, layout.heads_per_device, layout.position_ways
    hidden, width = model.hidden_size, model.head_dim
    neighbours = neighbours_of(layout, 16 * ways)
    assert neighbours is not None
    mesh = make_mesh(jax.devices()[:DEVICES], 1, DEVICES)
    random = np.random.default_rng(0)

    def draw(*shape: int) -> np.ndarray:
        return random.standard_normal(shape, np.float32) / shape[-1] ** 0.5

    x, k, v = draw(rows, hidden), *(draw(DEVICES, CONTEXT, width) for _ in "kv")
    q, o = (draw(DEVICES, own, width, hidden) for _ in "qo")
    wide = (
        np.stack([w[at - at % ways : at - at % ways + ways] for at in range(DEVICES)])
        for w in (q, o)
    )
    wide_q, wide_o = (w.reshape(DEVICES, own * ways, width, hidden) for w in wide)
    groups = [list(range(n, n + ways)) for n in range(0, DEVICES, ways)]

    def found(q, k, v):
        scores = jnp.einsum("mhd,cd->mhc", q, k) * width**-0.5
        top = scores.max(-1)
        weights = jnp.exp(scores - top[..., None])
        return jnp.einsum("mhc,cd->mhd", weights, v), weights.sum(-1), top

    def parts(x, q, o, k, v):
        asked = neighbours.gather_queries(jnp.einsum("mn,hdn->mhd", x, q[0]))
        sums, total, top = found(asked, k[0], v[0])
        packed = jnp.concatenate([sums, total[..., None], top[..., None]], -1)[:, None]
        packed = neighbours.exchange_parts(packed)[:, :, 0]
        gain = jnp.exp(packed[..., -1] - packed[..., -1].max(0)[None])[..., None]
        out = (packed[..., :-2] * gain).sum(0) / (packed[..., -2:-1] * gain).sum(0)
        return jax.lax.psum(jnp.einsum("mhd,hdn->mn", out, o[0]), ALL_AXES)

    def normalisers(x, q, o, k, v):
        sums, total, top = found(jnp.einsum("mn,hdn->mhd", x, q[0]), k[0], v[0])
        both = jnp.stack([total, top])
        both = jax.lax.all_gather(both, ALL_AXES, axis_index_groups=groups)
        highest = both[:, 1].max(0)
        whole = (both[:, 0] * jnp.exp(both[:, 1] - highest[None])).sum(0)
        out = sums * (jnp.exp(top - highest) / whole)[..., None]
        return jax.lax.psum(jnp.einsum("mhd,hdn->mn", out, o[0]), ALL_AXES)

    moved, results = {}, []
    split = {"in_specs": (P(), *(P(ALL_AXES),) * 4), "out_specs": P(), "check_vma": False}
    for way, arrays in ((parts, (x, q, o)), (normalisers, (x, wide_q, wide_o))):
        run = jax.jit(partial(jax.shard_map, mesh=mesh, **split)(way))
        text = run.lower(*arrays, k, v).compile().as_text()
        moved[way.__name__] = {
            key: key[1] * count for key, count in collectives(text or "").items()
        }
        results.append(np.asarray(run(*arrays, k, v)))
    return moved, float(np.abs(results[0] - results[1]).max() / np.abs(results[0]).max())


def predicted(layout: Any, rows: int, machine: str) -> dict[str, float]:
    """Return seconds of a layer for what the two ways have apart, in bfloat16."""
    from shiftjax.arch.formats import formats_of
    from shiftjax.costs.collectives import row_exchanges
    from shiftjax.costs.machine_files import load_engine, load_machine
    from shiftjax.costs.step_costs import CostModel

    formats = formats_of("bfloat16")
    costs = CostModel(layout, load_machine(machine), load_engine("shiftjax"), formats)
    model, ways, own = layout.model, layout.position_ways, layout.heads_per_device
    gather, exchange = row_exchanges(layout, rows, formats.activation_bytes)
    normalisers = gather._replace(num_bytes=2 * rows * own * ways * 4 * ways)

    def products(heads: int) -> float:
        q = costs.kernels.product(rows, model.hidden_size, heads * model.head_dim)
        return q + costs.kernels.product(rows, heads * model.head_dim, model.hidden_size)

    launch = costs.machine.kernel_seconds
    return {
        "parts": costs.layers.move([gather, exchange]) + products(own) + launch,
        "normalisers": costs.layers.move([normalisers]) + products(own * ways) + LAUNCHES * launch,
    }

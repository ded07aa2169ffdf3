"""Products of adapters on a CPU: all slots at once, tiles of tokens sorted by adapter, or batches.

    python scripts/labs/lora_products.py [--tokens 32] [--dtype float32] [--rank 16]

Layers of SmolLM2's sizes, their matrices alone, without adapters and with as many adapters as slots
that tokens have in turn. Rounds interleave; a row has milliseconds and the ratio to no adapters,
medians.

    together   x a of all slots, zeros for all but a token's own, then b: what the engine does
    tiles      a loop over tiles of tokens of one adapter (arXiv 2310.18547, 2311.03285)
    batches    a loop over rounds, in which every slot has a batch of its tokens
"""

import functools
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

if __name__ == "__main__":  # scripts are imported from where they lie
    import sys

    sys.path.insert(0, str(Path(__file__).parents[1]))

from option_table import parsed

from pallas_kernels.grouped_work import divide_rows, sort_pairs
from shiftjax.device.step import COMPILER_OPTIONS

HIDDEN, KV, INNER, LAYERS = 576, 192, 1536, 4
OPTIONS = {
    "--tokens": 32,
    "--dtype": "float32",
    "--rank": 16,
    "--slots": [1, 8, 32],
    "--rounds": 30,
}
Add = Callable[[jax.Array, jax.Array, Sequence[jax.Array]], Sequence[jax.Array]]


def together(x: jax.Array, a: jax.Array, bs: Sequence[jax.Array], slot: jax.Array) -> list:
    """Return what adapters add to the products of one input; a [slots, n, rank, in]."""
    slots, n, rank, _ = a.shape
    middle = jnp.einsum("ti,ci->tc", x, a.reshape(-1, a.shape[-1])).reshape(-1, slots, n, rank)
    own = (slot[:, None] == jnp.arange(slots)[None])[:, :, None, None]
    middle = jnp.where(own, middle, 0)
    flat = [middle[:, :, j].reshape(len(x), -1) for j in range(n)]
    return [h @ b.reshape(len(b), -1).T for h, b in zip(flat, bs, strict=True)]


def tiles(x: jax.Array, a: jax.Array, bs: Sequence[jax.Array], slot: jax.Array, rows: int) -> tuple:
    """The same by tiles of so many rows."""
    slots, n, rank, _ = a.shape
    routed = sort_pairs(slot[:, None], slots)
    cut = divide_rows(routed.sizes, len(x), rows)

    def add(tile: jax.Array, outs: tuple) -> tuple:
        nth = jnp.arange(rows)
        at = routed.row[jnp.minimum(cut.first[tile] + nth, len(x) - 1)]
        at = jnp.where(nth < cut.rows[tile], at, len(x))
        own = x[jnp.minimum(at, len(x) - 1)]
        middle = (own @ a[cut.expert[tile]].reshape(n * rank, -1).T).reshape(rows, n, rank)
        added = (middle[:, j] @ b[:, cut.expert[tile]].T for j, b in enumerate(bs))
        return tuple(o.at[at].set(y, mode="drop") for o, y in zip(outs, added, strict=True))

    empty = tuple(jnp.zeros((len(x), len(b)), x.dtype) for b in bs)
    return jax.lax.fori_loop(0, cut.num_tiles, add, empty)


def batches(x: jax.Array, a: jax.Array, bs: Sequence[jax.Array], slot: jax.Array) -> tuple:
    """The same by rounds of a batch for each slot."""
    slots, n, rank, _ = a.shape
    size = len(x) if slots == 1 else max(4, min(len(x), 2 * len(x) // slots))
    routed = sort_pairs(slot[:, None], slots)
    starts, nth = jnp.cumsum(routed.sizes) - routed.sizes, jnp.arange(-(-len(x) // size) * size)
    places = routed.row[jnp.minimum(starts[:, None] + nth[None], len(x) - 1)]
    places = jnp.where(nth[None] < routed.sizes[:, None], places, len(x))

    def add(number: jax.Array, outs: tuple) -> tuple:
        at = jax.lax.dynamic_slice_in_dim(places, number * size, size, 1).reshape(-1)
        own = x[jnp.minimum(at, len(x) - 1)].reshape(slots, size, -1)
        middle = jnp.einsum("sci,sri->scr", own, a.reshape(slots, n * rank, -1))
        middle = middle.reshape(slots, size, n, rank)
        added = (jnp.einsum("scr,osr->sco", middle[:, :, j], b) for j, b in enumerate(bs))
        flat = (y.reshape(len(at), -1) for y in added)
        return tuple(o.at[at].set(y, mode="drop") for o, y in zip(outs, flat, strict=True))

    empty = tuple(jnp.zeros((len(x), len(b)), x.dtype) for b in bs)
    return jax.lax.fori_loop(0, -(-routed.sizes.max() // size), add, empty)


def layer(x: jax.Array, weights: Sequence[jax.Array], factors: Sequence, add: Add) -> jax.Array:
    """Return what the matrices of a layer make of x; attention is left out."""
    q, k, v, o, gate, up, down = weights
    added = add(x, *factors[0])
    heads = [x @ w.T + more for w, more in zip((q, k, v), added, strict=True)]
    attended = heads[0] + jnp.tile(heads[1] + heads[2], (1, HIDDEN // KV))
    x = x + jnp.tanh(attended @ o.T + add(attended, *factors[1])[0])
    added = add(x, *factors[2])
    inner = jax.nn.silu(x @ gate.T + added[0]) * (x @ up.T + added[1])
    return x + jnp.tanh(inner @ down.T + add(inner, *factors[3])[0])


def main() -> None:
    """Print a row for each way and number of slots."""
    arguments = parsed(__doc__, OPTIONS)
    num, rng, dtype = arguments.tokens, np.random.default_rng(0), jnp.dtype(arguments.dtype)

    def draw(*shape: int) -> jax.Array:
        return jnp.asarray(0.02 * rng.standard_normal(shape), dtype)

    shapes = (HIDDEN, HIDDEN), (KV, HIDDEN), (KV, HIDDEN), (HIDDEN, HIDDEN)
    shapes += (INNER, HIDDEN), (INNER, HIDDEN), (HIDDEN, INNER)
    weights = [[draw(*shape) for shape in shapes] for _ in range(LAYERS)]
    sites = (HIDDEN, (HIDDEN, KV, KV)), (HIDDEN, (HIDDEN,))
    sites += (HIDDEN, (INNER, INNER)), (INNER, (HIDDEN,))

    def compiled(slots: int, make: Callable[[jax.Array], Add]) -> Callable[[], jax.Array]:
        rank = arguments.rank
        factors = [
            [(draw(slots, len(o), rank, i), [draw(n, slots, rank) for n in o]) for i, o in sites]
            for _ in range(LAYERS)
        ]

        def run(x: jax.Array, weights: list, factors: list, slot: jax.Array) -> jax.Array:
            for own, of_layer in zip(weights, factors, strict=True):
                x = layer(x, own, of_layer, make(slot))
            return x

        given = draw(num, HIDDEN), weights, factors, jnp.arange(num, dtype=jnp.int32) % slots
        options = COMPILER_OPTIONS["cpu"]
        step = jax.jit(run).lower(*given).compile(compiler_options=options)
        return lambda: step(*given)

    rows = 8 if num <= 64 else 64
    ways: dict[str, Callable[[jax.Array], Add]] = {
        "together": lambda slot: functools.partial(together, slot=slot),
        "tiles": lambda slot: functools.partial(tiles, slot=slot, rows=rows),
        "batches": lambda slot: functools.partial(batches, slot=slot),
    }
    cases = {"none": compiled(1, lambda _: lambda x, a, bs: [jnp.zeros((), x.dtype)] * len(bs))}
    for slots in arguments.slots:
        cases |= {f"{name}, {slots}": compiled(slots, make) for name, make in ways.items()}
    spent = {name: [] for name in cases}
    for number in range(-1, arguments.rounds):
        for name, run in cases.items():
            begin = time.perf_counter()
            run().block_until_ready()
            spent[name] += [time.perf_counter() - begin] if number >= 0 else []
    for name, seconds in spent.items():
        ratio = np.median(np.array(seconds) / np.array(spent["none"]))
        print(f"{name:14} {1e3 * np.median(seconds):8.2f} ms {ratio:6.2f}")


if __name__ == "__main__":
    main()

"""Layers whose weights are stored in SHIFT's shards, made whole one layer ahead.

While a layer computes, the weights of the next one are on their way: its gathers depend on nothing
but the output of the layer before, so a compiler can start them when that is there, and end them
behind this layer's products.

    layer       0    1    2    3
    gathers     1    2    3              begin with the layer above them; those of 0 before the step
                                         has anything else to do

They do depend on that output, by a barrier: with nothing to wait for, all gathers of a step could
come first, and the weights of the whole model be held at once. So those of two layers are.
"""

from collections.abc import Iterator, Sequence

import jax
from flax import nnx

from shiftjax.models.exchange import Parallel
from shiftjax.models.stream import Stream


def whole_layers[Layer: nnx.Module](
    layers: Sequence[Layer], streams: Sequence[Stream], parallel: Parallel
) -> Iterator[Layer]:
    """Yield layers with the weights that a step of this mode multiplies by.

    `streams` grows as they run: what the first is given, then the output of each.
    """
    if not parallel.gathers:
        yield from layers
        return
    ahead = _whole(layers[0], parallel) if layers else None
    for index, _ in enumerate(layers):
        layer = ahead
        if index + 1 < len(layers):
            ahead = _whole(_behind(streams[-1], layers[index + 1]), parallel)
        assert layer is not None
        yield layer


def _behind[Layer: nnx.Module](output: Stream, layer: Layer) -> Layer:
    """Return a layer whose shards are there when `output` is, and not before."""
    graphdef, shards = nnx.split(layer)
    _, shards = jax.lax.optimization_barrier((output, shards))
    return nnx.merge(graphdef, shards)


def _whole[Layer: nnx.Module](layer: Layer, parallel: Parallel) -> Layer:
    """Gather every weight of a layer that a mode splits in its own way."""
    graphdef, shards = nnx.split(layer)

    def gather(param: nnx.Variable) -> nnx.Variable:
        axis = param.get_metadata("gathered")
        return param if axis is None else param.replace(parallel.whole(param[...], axis))

    params = jax.tree.map(gather, shards, is_leaf=lambda x: isinstance(x, nnx.Variable))
    return nnx.merge(graphdef, params)

"""The sums of one program by a switch, where they are open: what layers ask for their norms.

In one shot (`pallas_kernels/sum_norm.py`) every device has the whole stream. In two
(`pallas_kernels/sum_rows.py`) it has that of its own rows, from behind the first norm on.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from shiftjax.arch.config import ModelConfig
from shiftjax.models.products import Activations, Codes
from shiftjax.models.stream import Stream
from shiftjax.parallel.grid import ALL_AXES

Norms = dict[str, Float[Array, " layers_hidden"]]  # by their names in a layer


class OneShot(NamedTuple):
    """Devices have met, and counters are zero."""

    counters: Any
    nothing: Float[Array, "tokens hidden"]  # in the place of partial sums before the first
    norms: Norms  # where those of all layers are one array
    nth: Int32[Array, ""] | None = None  # the layer

    def of_layer(self, index: int) -> "OneShot":
        """The same in a layer."""
        return self._replace(nth=jnp.int32(index))

    def begun(self, embedded: Float[Array, "tokens hidden"]) -> Stream:
        """Return the stream before the first layer."""
        return Stream(embedded, before=self.nothing)

    def kept(self, stream: Stream) -> Stream:
        """Return what stays of a stream that was normed without a sum."""
        return stream

    def closed(self, stream: Stream, config: ModelConfig) -> Stream:
        """Return the last stream, of all rows."""
        del config
        return stream

    def add_norm(
        self,
        stream: Stream,
        name: str,
        weight: Float[Array, " hidden"],
        config: ModelConfig,
        *,
        codes: bool = False,
    ) -> tuple[Stream, Activations]:
        """Return the new stream, with the sum of what is partial, and its norm: one launch.

        `name` is the norm's in its layer. With `codes` it comes as codes.
        """
        from pallas_kernels.sum_norm import Meeting, sum_norm

        assert stream.addend is not None and stream.before is not None
        partial = stream.addend.values
        given = _given(self.norms.get(name), self.nth, weight)
        meeting = Meeting(ALL_AXES, self.counters, stream.before)
        x, *normed = sum_norm(partial, stream.x, given, _kind(config, codes=codes), meeting)
        return Stream(x, before=partial), Codes(*normed) if codes else normed[0]


class TwoShots(NamedTuple):
    """Devices have met, counters are zero, and each device has its rows of the embedding."""

    counters: Any
    own: Float[Array, "own_tokens hidden"]
    norms: Norms
    nth: Int32[Array, ""] | None = None

    def of_layer(self, index: int) -> "TwoShots":
        """The same in a layer."""
        return self._replace(nth=jnp.int32(index))

    def begun(self, embedded: Float[Array, "tokens hidden"]) -> Stream:
        """Return the stream before the first layer: its first norm reads all rows."""
        return Stream(embedded)

    def kept(self, stream: Stream) -> Stream:
        """Return this device's rows of the embedding: nothing else is normed without a sum."""
        assert stream.addend is None and stream.x.shape != self.own.shape
        return Stream(self.own)

    def closed(self, stream: Stream, config: ModelConfig) -> Stream:
        """Return the last stream, of all rows: the last sum stores them on all devices."""
        from pallas_kernels.sum_rows import Group, sum_whole

        assert stream.addend is not None
        group, kind = Group(ALL_AXES, self.counters), _kind(config, codes=False)
        return Stream(sum_whole(stream.addend.values, stream.x, kind, group))

    def add_norm(
        self,
        stream: Stream,
        name: str,
        weight: Float[Array, " hidden"],
        config: ModelConfig,
        *,
        codes: bool = False,
    ) -> tuple[Stream, Activations]:
        """As of `OneShot`; the stream is of this device's rows, the norm of all."""
        from pallas_kernels.sum_rows import Group, sum_norm_rows

        assert stream.addend is not None
        given = _given(self.norms.get(name), self.nth, weight)
        kind, group = _kind(config, codes=codes), Group(ALL_AXES, self.counters)
        x, *normed = sum_norm_rows(stream.addend.values, stream.x, given, kind, group)
        return Stream(x), Codes(*normed) if codes else normed[0]


OpenSums = OneShot | TwoShots


def is_summed(stream: Stream) -> bool:
    """Whether what is added to a stream is a sum that goes to a norm as it is."""
    addend = stream.addend
    return addend is not None and addend.is_partial and addend.bias is None


def _given(whole: Array | None, nth: Array | None, weight: Array) -> tuple[Array, Array | None]:
    return (weight, None) if whole is None else (whole, nth)


def _kind(config: ModelConfig, *, codes: bool) -> Any:
    from pallas_kernels.norm_codes import NormKind

    own = config.norm_offset, config.norm_in_float32, config.residual_scale
    return NormKind(config.rms_norm_eps, *own, codes=codes)

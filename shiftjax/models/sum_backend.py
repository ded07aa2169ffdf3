"""How the sums of a layer over its devices run: a table, chosen at build time.

    xla        an all-reduce, then what is added and the norm: every platform and mode
    multimem   one Mosaic kernel for all three (`pallas_kernels/sum_norm.py`), of small steps in
               SHIFT, where a switch with multicast joins all devices and has passed its check

A switch adds up what all devices of a mesh have: Mosaic makes multicast groups of nothing less, and
of devices 0 to P - 1 (`multimem_load_reduce` of jax 0.12). So the sums of BASE and of modes
between, over the devices that split a weight, are XLA's, and so are those of groups of a fleet
that are not all of its devices.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh
from jaxtyping import Array, Float, Int32

from shiftjax.arch.config import ModelConfig
from shiftjax.arch.formats import FORMATS, Formats
from shiftjax.models.exchange import Parallel
from shiftjax.models.products import Activations, Codes
from shiftjax.models.stream import Stream
from shiftjax.parallel.grid import ALL_AXES, Device
from shiftjax.parallel.layout import Layout

logger = logging.getLogger(__name__)
SUMMED_NORMS = "input_norm", "mlp_norm"  # of a layer, which may follow a sum
Norms = dict[str, Float[Array, " layers_hidden"]]  # by their names in a layer


class SumShape(NamedTuple):
    """What the kernel is compiled for, and tried with."""

    hidden: int
    dtype: str  # of activations; a name of `arch.formats`


class OpenSums(NamedTuple):
    """Sums of one program, by the switch: devices have met, and counters are zero."""

    counters: Any
    nothing: Float[Array, "tokens hidden"]  # in the place of partial sums before the first
    norms: Norms  # where those of all layers are one array
    nth: Int32[Array, ""] | None = None  # the layer

    def of_layer(self, index: int) -> "OpenSums":
        """The same in a layer."""
        return self._replace(nth=jnp.int32(index))

    def has(self, stream: Stream) -> bool:
        """Whether what is added to a stream is such a sum."""
        addend = stream.addend
        return addend is not None and addend.is_partial and addend.bias is None

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
        from pallas_kernels.norm_codes import NormKind
        from pallas_kernels.sum_norm import Meeting, sum_norm

        assert stream.addend is not None and stream.before is not None
        partial, whole = stream.addend.values, self.norms.get(name)
        given = (weight, None) if whole is None else (whole, self.nth)
        own = config.norm_offset, config.norm_in_float32, config.residual_scale
        kind = NormKind(config.rms_norm_eps, *own, codes=codes)
        meeting = Meeting(ALL_AXES, self.counters, stream.before)
        x, *normed = sum_norm(partial, stream.x, given, kind, meeting)
        return Stream(x, before=partial), Codes(*normed) if codes else normed[0]


class SumBackend(NamedTuple):
    """Which of the table, and why."""

    name: str
    reason: str = ""

    def open(
        self, parallel: Parallel, x: Float[Array, "tokens hidden"], norms: Norms
    ) -> OpenSums | None:
        """Return the sums of a program whose stream begins with `x`; None: they are XLA's."""
        if self.name == XLA_SUMS.name or parallel.splits_tokens:
            return None
        from pallas_kernels.sum_norm import most_rows, open_meetings, wrong_sum

        (rows, width), devices = x.shape, parallel.layout.num_devices
        if devices == 1 or rows > most_rows(devices, width) or wrong_sum(rows, width, x.dtype):
            return None
        meeting = open_meetings(ALL_AXES, rows, width)
        return OpenSums(meeting.counters, meeting.before, norms)

    def mesh(self, mesh: Mesh) -> Mesh | AbstractMesh:
        """Return the mesh that a step is traced for.

        With kernels that talk, Mosaic takes a mesh of devices in the order of their ids, or one
        that does not say which devices it has. A switch does not ask for their order.
        """
        return mesh if self.name == XLA_SUMS.name else mesh.abstract_mesh


XLA_SUMS = SumBackend("xla")


class SumNeeds(NamedTuple):
    """What decides beside the model."""

    devices: Sequence[Device]  # of the only group; none: there are several
    attention: str  # the name of what was chosen
    deterministic: bool = False
    # Tries the kernel on the devices, and says what is wrong with it; None: it is not tried.
    check: Callable[[SumShape], str | None] | None = None


def choose_sums(layout: Layout, formats: Formats, needs: SumNeeds) -> SumBackend:
    """Return the kernel where all allow it and it has passed its check; on GPUs, log why not."""
    if layout.num_devices == 1:
        return XLA_SUMS._replace(reason="one device has nothing to sum")
    reason = next(_why_not(layout, formats, needs), None)
    if reason is None:
        return SumBackend("multimem", "passed its check")
    if "pallas" in needs.attention:
        logger.info("sums over %d devices are XLA's: %s", layout.num_devices, reason)
    return XLA_SUMS._replace(reason=reason)


def _why_not(layout: Layout, formats: Formats, needs: SumNeeds) -> Iterator[str]:
    """Yield what keeps the kernel from being used; the last thing that is asked is its check."""
    model, devices = layout.model, needs.devices
    shape = SumShape(model.hidden_size, formats.activations)
    if "pallas" not in needs.attention:
        yield f"attention runs as {needs.attention}"
    elif not devices:
        yield "several groups share the devices"
    else:
        if needs.deterministic:
            yield "no switch is known to add in one order, as deterministic asks"
        if {device.id for device in devices} != set(range(layout.num_devices)):
            yield f"they are not devices 0 to {layout.num_devices - 1} of their process"
        if len({device.process_index for device in devices}) > 1:
            yield "the devices are of several hosts"
        if model.norm_centred:
            yield "the model's norms subtract the mean"
        yield from wrong_software(shape)
        if needs.check is None:
            yield "the kernel was not tried"
        elif words := needs.check(shape):
            yield words


def wrong_software(shape: SumShape) -> Iterator[str]:
    """Yield what this jax, or the kernel, cannot do.

    Before 0.12, counters cannot outlive a launch, and XLA moves all operands of such a kernel, the
    norm's weight too, to memory that peers may read.
    """
    from jax.experimental.pallas import mosaic_gpu as plgpu

    if not hasattr(plgpu, "alloc_semaphore"):
        yield f"jax {jax.__version__} has no counters that outlive a launch, 0.12 has"
        return
    from pallas_kernels.sum_norm import wrong_sum

    if words := wrong_sum(1, shape.hidden, FORMATS[shape.dtype].dtype):
        yield words

"""How the sums of a layer over its devices run: a table, chosen at build time.

    xla        an all-reduce, then what is added and the norm: every platform and mode
    multimem   one Mosaic kernel for all three, of steps in SHIFT, where a switch with multicast
               joins all devices and has passed its check: in one shot the smallest
               (`pallas_kernels/sum_norm.py`), in two the others (`sum_rows.py`)

A switch adds up what all devices of a mesh have: Mosaic makes multicast groups of nothing less, and
of devices 0 to P - 1 (`multimem_load_reduce` of jax 0.12). So the sums of BASE and of modes
between, over the devices that split a weight, are XLA's, and so are those of groups of a fleet
that are not all of its devices.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import jax
from jax.sharding import AbstractMesh, Mesh
from jaxtyping import Array, Float

from pallas_kernels.sum_sizes import LEAST_DEVICES, shots
from shiftjax.arch.formats import FORMATS, Formats
from shiftjax.costs.switch_sums import splits_rows
from shiftjax.models.exchange import Parallel
from shiftjax.models.open_sums import Norms, OneShot, OpenSums, TwoShots
from shiftjax.parallel.grid import ALL_AXES, Device
from shiftjax.parallel.layout import Layout

logger = logging.getLogger(__name__)
SUMMED_NORMS = "input_norm", "mlp_norm"  # of a layer, which may follow a sum


class SumShape(NamedTuple):
    """What the kernel is compiled for, and tried with."""

    hidden: int
    dtype: str  # of activations; a name of `arch.formats`
    splits_rows: bool = True  # each device may keep its rows of the stream: two shots


class SumBackend(NamedTuple):
    """Which of the table, and why."""

    name: str
    reason: str = ""
    splits_rows: bool = True

    def open(
        self, parallel: Parallel, x: Float[Array, "tokens hidden"], norms: Norms
    ) -> OpenSums | None:
        """Return the sums of a program whose stream begins with `x`; None: they are XLA's."""
        if self.name == XLA_SUMS.name or parallel.splits_tokens:
            return None
        from pallas_kernels.sum_norm import open_meetings
        from pallas_kernels.sum_rows import open_rows

        (rows, width), devices = x.shape, parallel.layout.num_devices
        num_shots = shots(rows, devices, width, splits_rows=self.splits_rows)
        if num_shots == 2:
            group, own = open_rows(ALL_AXES, x)
            return TwoShots(group.counters, own, norms)
        if num_shots == 1:
            meeting = open_meetings(ALL_AXES, rows, width)
            return OneShot(meeting.counters, meeting.before, norms)
        return None

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
        return SumBackend("multimem", "passed its check", splits_rows(layout.model))
    if "pallas" in needs.attention:
        logger.info("sums over %d devices are XLA's: %s", layout.num_devices, reason)
    return XLA_SUMS._replace(reason=reason)


def _why_not(layout: Layout, formats: Formats, needs: SumNeeds) -> Iterator[str]:
    """Yield what keeps the kernel from being used; the last thing that is asked is its check."""
    model, devices = layout.model, needs.devices
    shape = SumShape(model.hidden_size, formats.activations, splits_rows(model))
    if "pallas" not in needs.attention:
        yield f"attention runs as {needs.attention}"
    elif not devices:
        yield "several groups share the devices"
    elif layout.num_devices < LEAST_DEVICES:
        yield f"fewer than {LEAST_DEVICES} read each other's memory sooner"
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
        words = "without them devices would meet anew, by XLA, before each sum"
        yield f"jax {jax.__version__} has no counters that outlive a launch, 0.12 has: {words}"
        return
    from pallas_kernels.sum_norm import wrong_sum

    if words := wrong_sum(1, shape.hidden, FORMATS[shape.dtype].dtype):
        yield words

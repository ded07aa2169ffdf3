"""Memory that XLA's own all-reduces hold, outside of JAX's share of a GPU. No JAX.

XLA (jax 0.12) sums by kernels that read the memory of their peers (`device/all_reduces.py`). Every
such sum of every program has buffers of its own, for as long as the program is loaded: twice its
operand, so that a call need not wait for the one before, and flags (XLA's
`collective_kernel_thunk.cc`). A driver hands out memory that peers may read in pieces of 2 MiB.
"""

from collections.abc import Iterable, Mapping

from pallas_kernels.sum_sizes import NUMBER_BYTES, shots
from shiftjax.arch.formats import Formats
from shiftjax.costs.buckets import Bucket
from shiftjax.costs.collectives import sampling_collectives, step_collectives
from shiftjax.costs.expert_modes import ExpertModes, by_bytes
from shiftjax.costs.switch_sums import splits_rows
from shiftjax.parallel.grid import Mode, Use
from shiftjax.parallel.layout import Layout, round_up

PIECE_BYTES = 2 << 20
MOST_BYTES = 32 << 20  # of a sum, on all of its devices together: larger ones are NCCL's


def buffer_bytes(num_devices: int, num_bytes: int) -> int:
    """Bytes on each device for one sum of `num_bytes`; 0 for one that NCCL does."""
    is_power_of_two = num_devices & (num_devices - 1) == 0
    if num_devices == 1 or not is_power_of_two or num_devices * num_bytes > MOST_BYTES:
        return 0
    return round_up(2 * num_bytes, PIECE_BYTES) + PIECE_BYTES


def switch_buffer_bytes(layout: Layout, wanted: Mapping[Bucket, Iterable[Mode]]) -> int:
    """Bytes on each device for all sums by a switch, in memory that programs share.

    Two arrays of the rows of a step, and counters. In one shot these are partial sums in turn, in
    two shots partial sums and their norm. They replace those of XLA's sums in a layer, for which
    there must be room all the same: a switch has to pass its check first.
    """
    model, devices = layout.model, layout.num_devices
    split = splits_rows(model)
    rows = [
        bucket.tokens
        for bucket, modes in wanted.items()
        if layout.shift in modes
        and shots(bucket.tokens, devices, model.hidden_size, splits_rows=split)
    ]
    if not rows or model.norm_centred:
        return 0
    return round_up(2 * max(rows) * model.hidden_size * NUMBER_BYTES, PIECE_BYTES) + PIECE_BYTES


def sum_buffer_bytes(
    layout: Layout, formats: Formats, wanted: Mapping[Bucket, Iterable[Mode]]
) -> int:
    """Bytes on each device for the sums of all programs, if NVLink joins the devices."""
    experts = ExpertModes(layout, by_bytes(formats))
    return sum(
        move.num_times * buffer_bytes(move.num_devices, move.num_bytes)
        for bucket, modes in wanted.items()
        for mode in modes
        for move in (
            *step_collectives(
                layout, mode, *bucket[:2], formats, Use(experts(mode, bucket.tokens))
            ),
            *sampling_collectives(layout, bucket.rows, sums=formats.sums),
        )
        if move.kind == "all-reduce"
    )

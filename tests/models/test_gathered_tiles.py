"""What devices that split positions gather for tiles: pages of contexts, in rounds."""

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from pallas_kernels.rows import Sequences
from shiftjax.device.mesh import make_mesh
from shiftjax.models.attention_work import CPU_SIZES, GatheredWork, divide_attention
from shiftjax.models.gathered_tiles import gather_pages, rounds_of
from shiftjax.models.neighbours import Neighbours
from shiftjax.parallel.grid import ALL_AXES
from shiftjax.parallel.positions import Positions

DEVICES, SPLIT = 4, Positions(2, 4)
NUM_BLOCKS, WIDTH = 12, 3
SIZES = CPU_SIZES._replace(gathered=16, gathers=2)  # rounds of two exchanges of two blocks
# A row of each: a chunk of 9 tokens behind 17, a decode, a whole prompt of 13.
LENS, CHUNKS = np.array([26, 20, 13], np.int32), (9, 1, 13)
TABLES = np.array([[3, 1, 4, 11], [5, 9, 2, 0], [7, 8, 0, 0]], np.int32)


def work_of(window: int | None = None):
    starts = np.cumsum([0, CHUNKS[1], CHUNKS[0], CHUNKS[2]]).astype(np.int32)
    order = [1, 0, 2]  # decodes come first
    sequences = Sequences(LENS[order], starts, 1)
    divided = divide_attention(
        TABLES[order],
        sequences,
        num_tokens=32,
        block_size=SPLIT.stripe,
        window=window,
        sizes=SIZES,
        positions=SPLIT,
    )
    assert divided.gathered is not None
    return TABLES[order], divided.gathered


@pytest.mark.parametrize(
    ("window", "first", "begin", "num_blocks"),
    [
        (None, [0, 0, 0], [0, 0, 4], 6),
        (5, [0, 1, 0], [0, 0, 3], 5),  # position 17 sees 13 to 17: what is before 8 is not read
    ],
)
def test_blocks_that_tiles_see_lie_one_after_the_other(window, first, begin, num_blocks):
    work = work_of(window)[1]
    assert work.seq_first.tolist() == first
    assert work.seq_begin.tolist() == begin
    assert work.num_blocks == num_blocks


def gathered(window: int | None, dtype=jnp.float32) -> list[np.ndarray]:
    """Pages of all rounds, by `page_of`; an entry is the slot of its block and its place there."""
    tables, work = work_of(window)
    rounds = rounds_of(jnp.asarray(tables), Neighbours(SPLIT, DEVICES), SIZES)
    assert (rounds.piece, rounds.gathers) == (2, 2)
    slots = np.arange(NUM_BLOCKS * SPLIT.stripe).reshape(NUM_BLOCKS, SPLIT.ways, 1, -1, 1)
    slots = np.broadcast_to(slots, (*slots.shape[:-1], WIDTH)).astype(dtype)
    by_device = jnp.stack([slots[:, place % SPLIT.ways] for place in range(DEVICES)])

    @jax.jit
    @partial(
        jax.shard_map,
        mesh=make_mesh(jax.devices()[:DEVICES], 1, DEVICES),
        in_specs=(P(ALL_AXES), P(), P(), P()),
        out_specs=P(ALL_AXES),
        check_vma=False,
    )
    def gather(pools, tables, work, first):
        pool = pools[0], pools[0][..., :1] * 2  # of two widths
        k, v = gather_pages(pool, tables, GatheredWork(*work), first, rounds)
        ids = rounds.page_of(jnp.arange(rounds.blocks * SPLIT.ways, dtype=jnp.int32))
        return jnp.concatenate([k, v], axis=-1)[ids][None]

    count = math.ceil(int(work.num_blocks) / rounds.blocks)
    first = (jnp.int32(n * rounds.blocks) for n in range(count))
    found = [np.asarray(gather(by_device, tables, tuple(work), at)) for at in first]
    for each in found:
        assert (each == each[:1]).all()  # on all devices, those of other heads too
    return [each[0] for each in found]


@pytest.mark.parametrize("window", [None, 5])
def test_pages_of_neighbours_are_contexts_again(window):
    tables, work = work_of(window)
    pages = np.concatenate(gathered(window)).reshape(-1, WIDTH + 1)
    for row in (1, 2):
        first, begin = work.seq_first[row], work.seq_begin[row]
        end = -(-LENS[[1, 0, 2]][row] // SPLIT.stripe)
        blocks = tables[row, first:end]
        slots = (blocks[:, None] * SPLIT.stripe + np.arange(SPLIT.stripe)).ravel()
        at = pages[begin * SPLIT.stripe : (begin + end - first) * SPLIT.stripe]
        np.testing.assert_array_equal(at[:, 0], slots)
        np.testing.assert_array_equal(at[:, -1], 2 * slots)


def test_a_buffer_is_no_longer_than_all_contexts():
    neighbours = Neighbours(SPLIT, DEVICES)
    for sizes, gathers in ((SIZES, 2), (SIZES._replace(gathers=9), 6), (CPU_SIZES, 1)):
        rounds = rounds_of(jnp.asarray(TABLES), neighbours, sizes)
        assert rounds.gathers == gathers and rounds.are_one is (gathers != 2)

"""A row's attention has the same bits whatever the other rows, where jobs have fixed rounds.

Where rows are tiles, it has those of its token in a chunk of a prompt, too.
"""

import numpy as np
import pytest
from attention_cases import Case, Step, decodes, interpreted, make_step, options_of

from pallas_kernels.decode import decode_attention
from pallas_kernels.decode_work import DecodeConfig, divide_decode
from pallas_kernels.paged_attention import ragged_paged_attention
from pallas_kernels.prefill_work import PrefillConfig
from pallas_kernels.rows import Sequences, rows_of
from pallas_kernels.step_work import KernelConfig, divide_step

pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered in matmul")

CASE = decodes((700, 300, 33), padding=1)
EQUAL = DecodeConfig(64, 5, 45_000)
FIXED = EQUAL._replace(fixed_rounds=2)


def attend(step: Step, num_rows: int, config: DecodeConfig) -> np.ndarray:
    """Run the decode kernel for the first `num_rows` sequences, one row each."""
    kv = step.kv._replace(
        block_tables=step.kv.block_tables[:num_rows], seq_lens=step.kv.seq_lens[:num_rows]
    )
    starts = step.query_start_loc[: num_rows + 1]
    work = divide_decode(
        rows_of(kv.seq_lens, starts, num_rows), num_rows, kv_heads=1, config=config
    )
    options = options_of(CASE)
    return interpreted(
        lambda *arrays: decode_attention(*arrays, options, config), step.q[:num_rows], kv, work
    )


@pytest.mark.thorough
def test_a_row_alone_has_the_bits_that_it_has_among_others():
    step = make_step(CASE)
    np.testing.assert_array_equal(attend(step, 1, FIXED)[0], attend(step, 3, FIXED)[0])


@pytest.mark.thorough
def test_without_fixed_rounds_they_differ():
    step = make_step(CASE)
    assert (attend(step, 1, EQUAL)[0] != attend(step, 3, EQUAL)[0]).any()


CHUNKS = Case(((21, 150), (1, 40)))  # of the first the tile of 32 tokens is not full
IN_TILES = KernelConfig(PrefillConfig(64, 2, 2, fixed_rounds=0), FIXED, in_tiles=True)


def attend_some(
    step: Step, new: list[int], contexts: list[int], config: KernelConfig, case: Case = CHUNKS
) -> np.ndarray:
    """Run a step of the first sequences' tokens before `contexts`; `new` of them are decodes if 1.

    Returns [tokens, heads, head_dim], those of a sequence after those of the one before.
    """
    ends = step.query_start_loc[1:][: len(new)] - (step.kv.seq_lens[: len(new)] - contexts)
    picked = np.concatenate([np.arange(end - n, end) for n, end in zip(new, ends, strict=True)])
    lens = np.array(contexts, np.int32)
    kv = step.kv._replace(block_tables=step.kv.block_tables[: len(new)], seq_lens=lens)
    starts = np.concatenate([[0], np.cumsum(new)]).astype(np.int32)
    num_decodes = new.count(1) if new[0] == 1 else 0
    heads = case.q_per_kv * case.kv_heads, case.kv_heads
    tokens = -(-len(picked) // 8) * 8
    own = {"num_tokens": tokens, "heads": heads, "window": case.window}
    work = divide_step(Sequences(lens, starts, num_decodes), **own, config=config)
    q = np.zeros((tokens, *step.q.shape[1:]), step.q.dtype)
    q[: len(picked)] = np.asarray(step.q)[picked]

    def run(*arrays):
        return ragged_paged_attention(*arrays, options_of(case), config)

    return interpreted(run, q, kv, work)[: len(picked)]


@pytest.mark.costs(12)
@pytest.mark.parametrize("window", [None, pytest.param(70, marks=pytest.mark.thorough)])
def test_in_tiles_a_decode_has_the_bits_of_its_token_in_a_chunk(window):
    """The 13th token before the end of a chunk: in it, at the end of a shorter one, decoded.

    With a window a tile begins with tokens that the later of its rows do not see.
    """
    case = CHUNKS._replace(window=window)
    step = make_step(case)
    whole = attend_some(step, [21, 1], [150, 40], IN_TILES, case)
    for new in (3, 1):
        part = attend_some(step, [new, 1], [138, 40], IN_TILES, case)
        np.testing.assert_array_equal(part[new - 1], whole[21 - 13])
        np.testing.assert_array_equal(part[-1], whole[-1])


@pytest.mark.thorough
def test_a_decode_kernel_gives_other_bits():
    step = make_step(CHUNKS)
    config = IN_TILES._replace(in_tiles=False)
    chunk = attend_some(step, [3, 1], [138, 40], config)
    row = attend_some(step, [1, 1], [138, 40], config)
    assert (chunk[2] != row[0]).any()

"""A row's attention has the same bits whatever the other rows, where jobs have fixed rounds."""

import numpy as np
import pytest
from attention_cases import Step, decodes, interpreted, make_step, options_of

from pallas_kernels.decode import decode_attention
from pallas_kernels.decode_work import DecodeConfig, divide_decode
from pallas_kernels.rows import rows_of

pytestmark = [
    pytest.mark.filterwarnings("ignore:invalid value encountered in matmul"),
    pytest.mark.thorough,
]

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


def test_a_row_alone_has_the_bits_that_it_has_among_others():
    step = make_step(CASE)
    np.testing.assert_array_equal(attend(step, 1, FIXED)[0], attend(step, 3, FIXED)[0])


def test_without_fixed_rounds_they_differ():
    step = make_step(CASE)
    assert (attend(step, 1, EQUAL)[0] != attend(step, 3, EQUAL)[0]).any()

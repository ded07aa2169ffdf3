"""A plan becomes padded arrays: the host side of a step, in NumPy. No JAX.

sequence        0    1    2         3            padding
tokens          d    d    c c c c   c c c        0 0 0       decodes first, then chunks
query_start_loc 0    1    2         6            9 9 9
slot_mapping    the block and offset of each token; padding writes to the null block 0
"""

from typing import NamedTuple

import numpy as np

from shiftjax.control.request import StepPlan


class PackedTokens(NamedTuple):
    """The arrays of a step that follow from its plan alone; shapes are the bucket's."""

    token_ids: np.ndarray  # [tokens] int32; -1 - r: row r of the previous step's output
    positions: np.ndarray  # [tokens] int32
    slot_mapping: np.ndarray  # [tokens] int32
    block_tables: np.ndarray  # [seqs, blocks_per_seq] int32, padded with the null block
    seq_lens: np.ndarray  # [seqs] int32, 0 for padding
    query_start_loc: np.ndarray  # [seqs + 1] int32
    sample_rows: np.ndarray  # [rows] int32: the token of each logit row
    sample_positions: np.ndarray  # [rows] int32: the position that the row's token will have


def pack_tokens(
    plan: StepPlan, num_tokens: int, num_rows: int, blocks_per_seq: int, block_size: int
) -> PackedTokens:
    """Lay out a plan in a bucket of `num_tokens` and `num_rows` (also its number of sequences)."""
    scheduled = plan.scheduled
    count = len(scheduled)
    starts = np.fromiter((s.start for s in scheduled), np.int32, count)
    lens = np.fromiter((s.num_tokens for s in scheduled), np.int32, count)
    rows = np.fromiter((s.num_rows for s in scheduled), np.int32, count)
    query_start_loc = np.full(num_rows + 1, plan.num_tokens, np.int32)
    query_start_loc[0] = 0
    np.cumsum(lens, out=query_start_loc[1 : count + 1])
    seq_lens = np.zeros(num_rows, np.int32)
    seq_lens[:count] = starts + lens
    block_tables = np.zeros((num_rows, blocks_per_seq), np.int32)
    for table, item in zip(block_tables, scheduled, strict=False):
        ids = item.sequence.block_table
        table[: len(ids)] = ids
    owner = np.repeat(np.arange(count), lens)
    positions = np.zeros(num_tokens, np.int32)
    positions[: plan.num_tokens] = _ranges(starts, lens)
    used = positions[: plan.num_tokens]
    slot_mapping = np.zeros(num_tokens, np.int32)
    blocks = block_tables[owner, used // block_size]
    slot_mapping[: plan.num_tokens] = blocks * block_size + used % block_size
    sample_rows = np.zeros(num_rows, np.int32)
    sample_rows[: plan.num_rows] = _ranges(query_start_loc[1 : count + 1] - rows, rows)
    sample_positions = positions[sample_rows] + 1
    token_ids = np.zeros(num_tokens, np.int32)
    token_ids[: plan.num_tokens] = _token_ids(plan)
    return PackedTokens(
        token_ids,
        positions,
        slot_mapping,
        block_tables,
        seq_lens,
        query_start_loc,
        sample_rows,
        sample_positions,
    )


def _ranges(starts: np.ndarray, lens: np.ndarray) -> np.ndarray:
    """Concatenate `arange(start, start + len)` of every pair."""
    ends = np.cumsum(lens)
    return np.arange(ends[-1] if len(ends) else 0) + np.repeat(starts - (ends - lens), lens)


def _token_ids(plan: StepPlan) -> list[int]:
    ids: list[int] = []
    for item in plan.scheduled:
        if item.previous_row >= 0:
            stop = item.start + item.num_tokens - 1
            ids += item.sequence.token_ids[item.start : stop]
            ids.append(-1 - item.previous_row)
        elif item.num_tokens == 1:
            ids.append(item.sequence.token_ids[item.start])
        else:
            ids += item.sequence.token_ids[item.start : item.start + item.num_tokens]
    return ids

"""A plan becomes padded arrays: the host side of a step, in NumPy.

sequence        0    1    2         3            padding
tokens          d    d    g g g g   c c c        0 0 0       decodes first, drafts, then chunks
query_start_loc 0    1    2         6            9 9 9
slot_mapping    the block and offset of each token; padding writes to the null block 0
"""

from collections.abc import Sequence

import numpy as np

from pallas_kernels.rows import Rows
from shiftjax.arch.config import ModelConfig
from shiftjax.core.request import StepPlan
from shiftjax.costs.buckets import Bucket
from shiftjax.device.pool import PoolOptions
from shiftjax.device.step import GuessInputs, StepInputs
from shiftjax.models.attention import AttentionMetadata, RowMetadata
from shiftjax.models.attention_backend import AttentionBackend

NO_SLOT = -1  # of padding, which has no adapter


def suits(
    bucket: Bucket, plan: StepPlan, backend: AttentionBackend, *, has_adapters: bool = False
) -> bool:
    """Whether a bucket holds a plan, and its chunks do not read too much there.

    `has_adapters`: sequences of the plan have such.
    Where all tokens attend as rows, a chunk of n tokens after s reads n s + n (n + 1) / 2 tokens of
    context, its tiles would s + n for some tokens each.
    """
    if not bucket.holds(plan.num_tokens, plan.num_rows, len(plan.scheduled)):
        return False
    if bucket.has_adapters != has_adapters:
        return False
    if not bucket.rows_alone or backend.most_row_reads is None:
        return True
    chunks = plan.chunks
    reads = sum(c.num_tokens * c.start + c.num_tokens * (c.num_tokens + 1) // 2 for c in chunks)
    return reads <= backend.most_row_reads


def step_inputs(
    plan: StepPlan,
    bucket: Bucket,
    pool: PoolOptions,
    backend: AttentionBackend,
    scalars: dict[str, np.ndarray],
    key: np.ndarray,
    *,
    model: ModelConfig,
    adapters: Sequence[int] = (),
) -> StepInputs:
    """Lay out a plan and its attention work in a bucket; `scalars` are those of `RowInputs`.

    A model with late layers needs the work of logit rows alone, too, one with a speculator the
    rows of each sequence. `adapters` are the slots of the sequences', where the bucket has such.
    """
    scheduled, count = plan.scheduled, len(plan.scheduled)
    starts = np.fromiter((s.start for s in scheduled), np.int32, count)
    lens = np.fromiter((s.num_tokens for s in scheduled), np.int32, count)
    rows = np.fromiter((s.num_rows for s in scheduled), np.int32, count)
    query_start_loc = np.full(bucket.seqs + 1, plan.num_tokens, np.int32)
    query_start_loc[0] = 0
    ends = np.cumsum(lens, out=query_start_loc[1 : count + 1])
    positions = _ranges(starts, lens)
    num_groups = len(model.cache_groups)
    tables = _block_tables(plan, num_groups, bucket.seqs, pool.blocks_per_seq)
    blocks = tables[:, np.repeat(np.arange(count), lens), positions // pool.block_size]
    slots = np.zeros((num_groups, bucket.tokens), np.int32)
    slots[:, : len(positions)] = blocks * pool.block_size + positions % pool.block_size
    picked = _ranges(ends - rows, rows)
    late = guessing = None
    if model.num_late_layers:
        row_seqs = np.repeat(np.arange(count, dtype=np.int32), rows)
        late_work = backend.divide_rows(Rows(row_seqs, positions[picked] + 1), bucket.rows)
        late = RowMetadata(np.asarray(len(picked), np.int32), late_work)
    if model.speculator is not None:
        row_start_loc = np.full(bucket.seqs + 1, plan.num_rows, np.int32)
        row_start_loc[0] = 0
        np.cumsum(rows, out=row_start_loc[1 : count + 1])
        guessing = GuessInputs(row_start_loc, np.asarray(plan.num_guesses, np.int32))
    positions = _padded(positions, bucket.tokens)
    sample_rows = _padded(picked, bucket.rows)
    contexts = tables[0], _padded(starts + lens, bucket.seqs), query_start_loc
    num_decodes, num_tokens = plan.num_rowwise, bucket.tokens
    if bucket.rows_alone and backend.most_row_reads is not None:
        num_decodes, num_tokens = count, None
    work = backend.divide(*contexts, num_decodes, num_tokens=num_tokens, num_rows=bucket.rows)
    if num_groups == 1:
        slots, tables = slots[0], tables[0]
    attention = AttentionMetadata(
        slots, tables, *contexts[1:], np.asarray(num_decodes, np.int32), work
    )
    return StepInputs(
        token_ids=_padded(_token_ids(plan), bucket.tokens),
        positions=positions,
        sample_rows=sample_rows,
        attention=attention,
        late=late,
        guessing=guessing,
        adapters=_padded(np.repeat(adapters, lens), bucket.tokens, NO_SLOT)
        if bucket.has_adapters
        else None,
        sampling=scalars | {"positions": positions[sample_rows] + 1},
        key=key,
    )


def _padded(values: np.ndarray | list[int], size: int, filler: int = 0) -> np.ndarray:
    """Fill up with zeros: token 0, position 0, the null block's first slot."""
    padded = np.full(size, filler, np.int32)
    padded[: len(values)] = values
    return padded


def _block_tables(
    plan: StepPlan, num_groups: int, num_seqs: int, blocks_per_seq: int
) -> np.ndarray:
    """The tables of each cache group; what a group has lost or never had is the null block."""
    tables = np.zeros((num_groups, num_seqs, blocks_per_seq), np.int32)
    for row, item in enumerate(plan.scheduled):
        sequence = item.sequence
        firsts = sequence.first_blocks or (0,)  # what comes before is lost: long, and zeros
        for table, ids, first in zip(tables, sequence.tables, firsts, strict=False):
            table[row, first : len(ids)] = ids[first:]
    return tables


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
            ids += item.proposed_ids
    return ids

"""TEMPORARY greedy rows until sampling_inputs is complete."""

from typing import NamedTuple

import numpy as np


class RowInputs(NamedTuple):
    """x."""

    scalars: dict
    tables: tuple | None
    wants_top: bool


def neutral_rows(rows: int, vocab: int):
    """x."""
    f = lambda v: np.full(rows, v, np.float32)
    i = lambda v: np.full(rows, v, np.int32)
    scalars = dict(
        temperature=f(0),
        top_k=i(0),
        top_p=f(1),
        min_p=f(0),
        repetition_penalty=f(1),
        presence_penalty=f(0),
        frequency_penalty=f(0),
        seeds=np.zeros((rows, 2), np.uint32),
        positions=i(0),
        target_ids=i(-1),
        num_logprobs=i(-1),
    )
    tables = (
        np.full((rows, -(-vocab // 32)), 0xFFFFFFFF, np.uint32),
        np.full((rows, 300), -1, np.int32),
        np.zeros((rows, 300), np.float32),
        np.zeros((rows, vocab), np.uint16),
    )
    return scalars, tables


def build_rows(plan, rows, vocab):
    """x."""
    return RowInputs(neutral_rows(rows, vocab)[0], None, False)

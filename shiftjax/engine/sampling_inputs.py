"""What the sampler has to know about each logit row, and how the host builds it. No JAX.

    sequence -> RowParams (once) -> RowInputs (every step) -> SamplingInputs (inside the step)

A greedy row that asks for nothing costs neither the host nor the step anything: it keeps the
neutral values of `neutral_rows`.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float32, Int32, UInt16, UInt32

from shiftjax.engine.request import ScheduledSequence, Sequence, StepPlan
from shiftjax.engine.sampling_params import MAX_LOGIT_BIAS

ALL_ALLOWED = 0xFFFFFFFF
IN_PROMPT = 0x8000  # bit 15 of a token count
MAX_COUNT = 0x7FFF  # where the count in the other bits saturates


class SamplingInputs(NamedTuple):
    """Parameters of a step, one entry per logit row: NumPy outside the step, `jax.Array` inside.

    First the scalars, which travel to the device every step; then the tables, which stay there
    neutral until a request needs them.
    """

    # 0: greedy; the logits are divided by anything else
    temperature: Float32[Any, " rows"]
    # only the k most likely tokens; 0: all, 1: greedy
    top_k: Int32[Any, " rows"]
    # only the smallest set of most likely tokens that has this probability; 1: all
    top_p: Float32[Any, " rows"]
    # only tokens at least this many times as likely as the most likely one; 0: all
    min_p: Float32[Any, " rows"]
    # positive logits of tokens seen in prompt or output are divided by it, negative multiplied
    repetition_penalty: Float32[Any, " rows"]
    # subtracted from the logits of generated tokens, once
    presence_penalty: Float32[Any, " rows"]
    # and once per time that they were generated
    frequency_penalty: Float32[Any, " rows"]
    # the sequence's 64-bit seed, low word first
    seeds: UInt32[Any, "rows 2"]
    # of the token to be sampled; with the seed it names the random number
    positions: Int32[Any, " rows"]
    # -1: choose a token; else the known next token, of which only the log-probability is asked
    target_ids: Int32[Any, " rows"]
    # -1: no log-probabilities, 0: the chosen token's, k: also those of the k most likely tokens
    num_logprobs: Int32[Any, " rows"]
    # a generated token that the host could not count yet because it was in flight; -1: none
    pending_ids: Int32[Any, " rows"]
    # bit t % 32 of word t // 32: token t is allowed
    token_bitmask: UInt32[Any, "rows words"]
    # distinct tokens whose logits get a bias, padded with -1, and the biases
    bias_ids: Int32[Any, "rows entries"]
    bias_values: Float32[Any, "rows entries"]
    # bit 15: the token is in the prompt; the others: how often it was generated, saturating
    token_counts: UInt16[Any, "rows vocab"]


class RowTables(NamedTuple):
    """The tables of `SamplingInputs`; None stands for the neutral table."""

    token_bitmask: np.ndarray | None = None  # [rows, words] uint32
    bias_ids: np.ndarray | None = None  # [rows, MAX_LOGIT_BIAS] int32
    bias_values: np.ndarray | None = None  # [rows, MAX_LOGIT_BIAS] float32
    token_counts: np.ndarray | None = None  # [rows, vocab] uint16


class RowInputs(NamedTuple):
    """`SamplingInputs` of a plan, less `positions` and `pending_ids`, which follow from its tokens."""

    scalars: dict[str, np.ndarray]
    tables: RowTables | None  # None: all neutral
    wants_top: bool  # whether some row asks for the most likely tokens


class RowParams(NamedTuple):
    """What does not change while a sequence runs; made once per sequence by `row_params`."""

    is_neutral: bool  # greedy and nothing else asked: its rows keep the neutral values
    scalars: tuple[float, ...]  # in the order of `_FLOATS`
    top_k: int
    seed: tuple[int, int]
    num_logprobs: int
    num_prompt_logprobs: int
    allowed: np.ndarray | None  # [words] uint32; None: all tokens
    allowed_at_first: np.ndarray | None  # the same while `min_tokens` bans the stop ids
    bias_ids: np.ndarray | None  # [entries] int32
    bias_values: np.ndarray | None
    prompt_flags: np.ndarray | None  # [vocab] uint16, set where penalties need counts


_FLOATS = (
    "temperature",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)

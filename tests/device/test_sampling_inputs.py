"""The host side of sampling: from requests to arrays, against the plain meaning of each field."""

import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from shiftjax.core.proposal import Claims, Proposal
from shiftjax.core.request import (
    Request,
    SamplingParams,
    ScheduledSequence,
    SequenceState,
    StepPlan,
)
from shiftjax.device.sampling_inputs import (
    ALL_ALLOWED,
    IN_PROMPT,
    MAX_COUNT,
    RowInputs,
    VocabSplit,
    build_rows,
    neutral_rows,
    refresh_params,
)

VOCAB_SIZE = 70  # three words, the last with six tokens
VOCAB = VocabSplit(VOCAB_SIZE, VOCAB_SIZE)
PROMPT = [1, 2, 3, 2]
NEUTRAL, NEUTRAL_TABLES = neutral_rows(1, VOCAB)


def make_sequence(output: list[int] | None = None, seed: int = 0, **sampling) -> SequenceState:
    request = Request("r", PROMPT, SamplingParams(**sampling))
    return SequenceState(
        request=request,
        index=0,
        seed=seed,
        order=(0, 0.0, 0, 0),
        token_ids=PROMPT + (output or []),
        num_prompt_tokens=len(PROMPT),
        max_length=100,
        stop_ids=frozenset({0, 69}),
        siblings=[],
    )


def decode(sequence: SequenceState, pending: bool = False) -> ScheduledSequence:
    start = len(sequence.token_ids) - (not pending)
    return ScheduledSequence(sequence, start, 1, 1, 0 if pending else -1)


def build(*items: ScheduledSequence, rows: int = 0, vocab: VocabSplit = VOCAB) -> RowInputs:
    num_rows = sum(item.num_rows for item in items)
    num_tokens = sum(item.num_tokens for item in items)
    plan = StepPlan(list(items), num_tokens, num_rows, 0, [], [], step_id=0)
    params = refresh_params(plan, {}, VOCAB_SIZE)
    return build_rows(plan, params, rows or num_rows, vocab)


def allowed_tokens(words: np.ndarray) -> list[int]:
    return [t for t in range(VOCAB_SIZE) if words[t // 32] >> np.uint32(t % 32) & 1]


def test_greedy_rows_stay_neutral():
    greedy = make_sequence(temperature=0.0, top_k=7, top_p=0.5, min_p=0.1)
    only_best = make_sequence(temperature=2.0, top_k=1, seed=5)
    rows = build(decode(greedy), decode(only_best), rows=4)
    assert rows.tables is None and not rows.wants_top
    for name, values in neutral_rows(4, VOCAB)[0].items():
        np.testing.assert_array_equal(rows.scalars[name], values)


@pytest.mark.parametrize(
    ("asked", "field", "value"),
    [
        ({"temperature": 0.7}, "temperature", np.float32(0.7)),
        ({"top_k": 5}, "top_k", 5),
        ({"top_k": -1}, "top_k", 0),
        ({"top_p": 0.9}, "top_p", np.float32(0.9)),
        ({"min_p": 0.1}, "min_p", np.float32(0.1)),
        ({"repetition_penalty": 1.2}, "repetition_penalty", np.float32(1.2)),
        ({"presence_penalty": -1.0}, "presence_penalty", -1.0),
        ({"frequency_penalty": 0.5}, "frequency_penalty", 0.5),
        ({"logprobs": 0}, "num_logprobs", 0),
        ({"logprobs": 9}, "num_logprobs", 9),
    ],
)
def test_scalars_reach_their_row_and_no_other(asked: dict, field: str, value: float):
    greedy = make_sequence(temperature=0.0)
    chunk = ScheduledSequence(make_sequence(), 0, 2, 0, -1)  # has no row
    rows = build(decode(greedy), chunk, decode(make_sequence(**asked)), rows=4)
    neutral = NEUTRAL[field][0]
    assert rows.scalars[field].tolist() == [neutral, value, neutral, neutral]
    assert rows.wants_top == (asked.get("logprobs", 0) > 0)


def test_seeds_are_split_low_word_first():
    sequence = make_sequence(seed=0xDEADBEEF_00C0FFEE)
    assert build(decode(sequence)).scalars["seeds"].tolist() == [[0x00C0FFEE, 0xDEADBEEF]]


def test_every_default_request_is_sampled():
    rows = build(decode(make_sequence(seed=3)))
    assert rows.scalars["temperature"] == 1.0 and rows.tables is None


def test_allowed_token_ids():
    rows = build(
        decode(make_sequence(temperature=0.0)),
        decode(make_sequence(allowed_token_ids=[31, 32, 69])),
    )
    assert (rows.tables.token_bitmask[0] == ALL_ALLOWED).all()
    assert allowed_tokens(rows.tables.token_bitmask[1]) == [31, 32, 69]
    assert rows.tables.bias_ids is None and rows.tables.token_counts is None


@pytest.mark.parametrize("pending", [False, True])
def test_min_tokens_bans_stop_ids_until_enough_are_out(pending: bool):
    """A pending token is out, though the host does not know it."""
    for num_output in range(5):
        sequence = make_sequence([9] * num_output, temperature=0.0, min_tokens=3)
        tables = build(decode(sequence, pending)).tables
        if num_output + pending < 3:
            assert allowed_tokens(tables.token_bitmask[0]) == [*range(1, 69)]
        else:
            assert tables is None


def test_min_tokens_and_allowed_token_ids_together():
    asked = {"min_tokens": 2, "allowed_token_ids": [0, 5, 69]}
    rows = build(decode(make_sequence([9], **asked)), decode(make_sequence([9, 9], **asked)))
    assert [allowed_tokens(words) for words in rows.tables.token_bitmask] == [[5], [0, 5, 69]]


def bits(*tokens: int) -> np.ndarray:
    words = np.zeros(3, np.uint32)
    for token in tokens:
        words[token // 32] |= np.uint32(1 << token % 32)
    return words


def test_a_constraint_and_allowed_token_ids_together():
    sequence = make_sequence(allowed_token_ids=[6, 40, 69])
    sequence.constraint = SimpleNamespace(mask=bits(5, 6, 40))
    rows = build(decode(sequence), decode(make_sequence()))
    first, second = rows.tables.token_bitmask
    assert allowed_tokens(first) == [6, 40] and (second == ALL_ALLOWED).all()


def test_logit_bias():
    bias = {5: 1.5, 69: -100.0}
    rows = build(decode(make_sequence(temperature=0.0)), decode(make_sequence(logit_bias=bias)))
    np.testing.assert_array_equal(rows.tables.bias_ids[0], NEUTRAL_TABLES.bias_ids[0])
    assert rows.tables.bias_ids[1, :3].tolist() == [5, 69, -1]
    assert rows.tables.bias_values[1, :3].tolist() == [1.5, -100.0, 0.0]
    assert (rows.tables.bias_ids[1, 2:] == -1).all()


def test_counts_of_prompt_and_output():
    output = [2, 9, 9, 9]
    sequence = make_sequence(output, temperature=0.0, frequency_penalty=0.1)
    counts = build(decode(make_sequence()), decode(sequence)).tables.token_counts
    assert not counts[0].any()
    expected = {1: IN_PROMPT, 2: IN_PROMPT + 1, 3: IN_PROMPT, 9: 3}
    assert {t: int(c) for t, c in enumerate(counts[1]) if c} == expected


def test_rows_of_a_draft_count_its_tokens_up_to_theirs():
    sequence = make_sequence([9], presence_penalty=0.1)
    drafted = Proposal([9, 7, 9], [1.0] * 3, "ngram", Claims("own", 1, [1.0] * 3))
    item = ScheduledSequence(sequence, len(sequence.token_ids) - 1, 4, 4, -1, drafted)
    counts = build(item).tables.token_counts
    assert counts[:, [9, 7]].tolist() == [[1, 0], [2, 0], [2, 1], [3, 1]]
    assert (counts[:, 1] == IN_PROMPT).all()


def test_devices_that_split_the_vocabulary_have_the_words_of_their_tokens():
    """9 tokens each, so that a word is several devices'; 2 tokens of the last are padding."""
    sequence = make_sequence([9], presence_penalty=0.1, allowed_token_ids=[8, 9, 31, 32, 69])
    tables = build(decode(sequence), vocab=VocabSplit(VOCAB_SIZE, 9, 8)).tables
    words = tables.token_bitmask[0].reshape(8, -1)
    for device, own in enumerate(words):
        shift = 9 * device // 32 * 32
        tokens = [t for t in range(9 * device, min(9 * device + 9, VOCAB_SIZE))]
        allowed = [t for t in tokens if own[(t - shift) // 32] >> np.uint32(t % 32) & 1]
        assert allowed == [t for t in tokens if t in (8, 9, 31, 32, 69)]
    assert tables.token_counts.shape == (1, 72) and tables.token_counts[0, 9] == 1


def test_counts_saturate_below_the_prompt_flag():
    sequence = make_sequence([5] * (MAX_COUNT + 9), presence_penalty=0.1)
    assert build(decode(sequence)).tables.token_counts[0, 5] == MAX_COUNT


def test_prompt_logprobs_score_the_known_tokens_and_sample_after_the_last():
    sequence = make_sequence(prompt_logprobs=2, logprobs=4, temperature=0.5, allowed_token_ids=[7])
    first = ScheduledSequence(sequence, 0, 3, 3, -1)
    rows = build(decode(make_sequence(temperature=0.0)), first)
    assert rows.scalars["target_ids"].tolist() == [-1, 2, 3, 2]
    assert rows.scalars["num_logprobs"].tolist() == [-1, 2, 2, 2]
    rest = ScheduledSequence(sequence, 3, 1, 1, -1)
    rows = build(rest)
    assert rows.scalars["target_ids"].tolist() == [-1]
    assert rows.scalars["num_logprobs"].tolist() == [4]
    whole = build(ScheduledSequence(sequence, 0, 4, 4, -1))
    assert whole.scalars["target_ids"].tolist() == [2, 3, 2, -1]
    assert whole.scalars["temperature"].tolist() == [0, 0, 0, 0.5]
    assert [len(allowed_tokens(w)) for w in whole.tables.token_bitmask] == [70, 70, 70, 1]


def test_params_are_computed_once_and_dropped_with_their_sequence():
    first, second = make_sequence(logit_bias={1: 2.0}), make_sequence()
    plan = StepPlan([decode(first)], 1, 1, 1, [], [], step_id=0)
    known = refresh_params(plan, {}, VOCAB_SIZE)
    both = StepPlan([decode(first), decode(second)], 2, 2, 2, [], [], step_id=1)
    later = refresh_params(both, known, VOCAB_SIZE)
    assert later[first] is known[first] and set(later) == {first, second}
    last = StepPlan([decode(second)], 1, 1, 1, [], [], step_id=2)
    assert set(refresh_params(last, later, VOCAB_SIZE)) == {second}


def test_no_jax_on_the_host():
    code = "import sys, shiftjax.device.sampling_inputs; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

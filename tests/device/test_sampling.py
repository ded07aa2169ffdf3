"""The sampler against a float64 oracle, token by token, and against its own promises.

The oracle computes the noise of every token from the random words of (seed, position) and draws
with it from its own probabilities: what is compared is the very token.
"""

import json
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec
from oracle.numpy_sampling import log_softmax, noise, probabilities, processed_logits, winners
from scipy import stats
from spent import thorough

from shiftjax.arch.presets import PRESETS
from shiftjax.device.mesh import make_mesh, mesh_of
from shiftjax.device.sampling import (
    DIGIT_BITS,
    DIGIT_BITS_ON_CPU,
    MAX_LOGPROBS,
    MAX_VOCAB,
    SampleOutput,
    _digits_of_threshold,
    _Split,
    _unpack_bits,
    sample,
)
from shiftjax.device.sampling_inputs import IN_PROMPT, SamplingInputs, VocabSplit, neutral_rows
from shiftjax.models.exchange import Parallel
from shiftjax.parallel.grid import ALL_AXES
from shiftjax.parallel.layout import Layout

VOCAB_SIZE, PADDED = 997, 1024  # neither a multiple of 32 nor of a part of argmax
ROWS = 8
KEY = jax.random.key(1234)
TOLERANCE = 1e-4  # of p / noise, relatively: float32 logits, divided by small temperatures
SLACKS = (0.0, 1e-6, -1e-6)  # of the thresholds
FAST = settings(deadline=None, derandomize=True, max_examples=40)


def split_of(vocab_size: int, num_devices: int = 1) -> VocabSplit:
    """With padding, but for vocabularies larger than that of most tests."""
    return VocabSplit(vocab_size, max(PADDED, vocab_size) // num_devices, num_devices)


def make_inputs(
    asked: list[dict], vocab_size: int = VOCAB_SIZE, num_devices: int = 1
) -> SamplingInputs:
    """One row per entry: scalars by name, and `allowed`, `bias`, `prompt`, `output`, `seed`."""
    vocab = split_of(vocab_size, num_devices)
    scalars, tables = neutral_rows(len(asked), vocab)
    inputs = SamplingInputs(
        **scalars,
        **tables._asdict(),
        positions=np.zeros(len(asked), np.int32),
        pending_ids=np.full(len(asked), -1, np.int32),
    )
    for row, fields in enumerate(asked):
        for name, value in fields.items():
            if name in inputs._fields:
                getattr(inputs, name)[row] = value
        fill_tables(inputs, row, fields, vocab)
    return inputs


def fill_tables(inputs: SamplingInputs, row: int, fields: dict, vocab: VocabSplit) -> None:
    seed = fields.get("seed", 0)
    inputs.seeds[row] = seed & 0xFFFFFFFF, seed >> 32
    if fields.get("allowed") is not None:
        bits = np.zeros(32 * (vocab.size // 32 + 1), np.uint8)
        bits[fields["allowed"]] = 1
        inputs.token_bitmask[row] = np.packbits(bits, bitorder="little").view("<u4")[vocab.words]
    bias = fields.get("bias", {})
    inputs.bias_ids[row, : len(bias)] = list(bias)
    inputs.bias_values[row] = 7.0  # of the padding, to be ignored
    inputs.bias_values[row, : len(bias)] = list(bias.values())
    inputs.token_counts[row, fields.get("prompt", [])] = IN_PROMPT
    np.add.at(inputs.token_counts[row], fields.get("output", []), 1)


def on_devices(sampler: Callable[..., Any], num_devices: int) -> Callable[..., Any]:
    """`sampler(logits, inputs, key, parallel)` where so many devices split the vocabulary."""
    layout = Layout(PRESETS["tiny"], 1, num_devices)
    parallel = Parallel(layout, layout.shift)
    if num_devices == 1:
        return jax.jit(partial(sampler, parallel=parallel))
    split, whole = PartitionSpec(None, ALL_AXES), PartitionSpec()
    inputs = SamplingInputs(*[whole] * len(SamplingInputs._fields))
    inputs = inputs._replace(token_bitmask=split, token_counts=split)
    return jax.jit(
        jax.shard_map(
            lambda logits, inputs, key: sampler(logits, inputs, key, parallel),
            mesh=mesh_of(make_mesh(jax.devices()[:num_devices], 1, num_devices), layout.shift),
            in_specs=(split, inputs, whole),
            out_specs=whole,
            check_vma=False,
        )
    )


@cache
def compiled(vocab_size: int, num_devices: int = 1, **kind: bool):
    return on_devices(partial(sample, vocab_size=vocab_size, **kind), num_devices)


def run(
    logits: np.ndarray, asked: list[dict], vocab_size: int = VOCAB_SIZE, num_devices: int = 1
) -> SampleOutput:
    """Sample on arrays as the step has them; the padding of the vocabulary is the largest."""
    inputs = make_inputs(asked, vocab_size, num_devices)
    output = compiled(vocab_size, num_devices)(padded(logits, vocab_size), inputs, KEY)
    return SampleOutput(*map(np.asarray, output))


def padded(logits: np.ndarray, vocab_size: int = VOCAB_SIZE) -> np.ndarray:
    padding = ((0, 0), (0, split_of(vocab_size).padded - vocab_size))
    return np.pad(logits.astype(np.float32), padding, constant_values=1e6)


@jax.jit
@jax.vmap
def random_words(seed: jax.Array, position: jax.Array) -> jax.Array:
    key = jax.random.fold_in(jax.random.fold_in(KEY, seed[0]), seed[1])
    return jax.random.bits(jax.random.fold_in(key, position), (2,), dtype=jnp.uint32)


def row_words(asked: list[dict]) -> np.ndarray:
    """Two words per row, from (key, seed, position): all that is random in a draw."""
    inputs = make_inputs([{k: f[k] for k in ("seed", "positions") if k in f} for f in asked])
    return np.asarray(random_words(inputs.seeds, inputs.positions))


def assert_sampled(logits: np.ndarray, asked: list[dict], vocab_size: int = VOCAB_SIZE) -> None:
    """Every row's token is the one that the oracle draws with the row's noise."""
    output = run(logits, asked, vocab_size)
    assert output.is_finite.all()
    words = row_words(asked)
    for x, fields, token, word in zip(logits, asked, output.token_ids, words, strict=True):
        drawn = noise(word, len(x))
        expected = [winners(probabilities(x, fields, slack), drawn, TOLERANCE) for slack in SLACKS]
        assert any(int(token) in tokens for tokens in expected), (fields, token, expected)


def draw_logits(seed: int, kind: str, rows: int = ROWS, vocab_size: int = VOCAB_SIZE) -> np.ndarray:
    rng = np.random.default_rng(seed)
    logits = rng.normal(0, 3, (rows, vocab_size))
    if kind == "ties":
        logits = np.round(logits)
    elif kind == "flat":
        logits *= 0.01
    elif kind == "peaked":
        logits[np.arange(rows), rng.integers(0, vocab_size, rows)] += 12
    return (logits + rng.normal(0, 20)).astype(np.float32)


# --- the distribution -----------------------------------------------------------------------------


tokens = st.integers(0, VOCAB_SIZE - 1)
asked_rows = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([1e-3, 0.3, 0.7, 1.0, 1.3, 2.0]),
        "seed": st.integers(0, 2**64 - 1),
        "positions": st.integers(0, 2**31 - 1),
    },
    optional={
        "top_k": st.sampled_from([2, 3, 10, 50, 500, VOCAB_SIZE - 1, VOCAB_SIZE, 2**31 - 1]),
        "top_p": st.sampled_from([1e-6, 0.1, 0.5, 0.9, 0.99, 0.9999]),
        "min_p": st.sampled_from([1e-6, 0.01, 0.1, 0.5, 0.999]),
        "repetition_penalty": st.sampled_from([0.5, 1.1, 3.0]),
        "presence_penalty": st.sampled_from([-2.0, 0.5, 2.0]),
        "frequency_penalty": st.sampled_from([-1.0, 0.3, 2.0]),
        "allowed": st.lists(tokens, min_size=1, max_size=40, unique=True),
        "bias": st.dictionaries(tokens, st.floats(-100, 100), max_size=20),
        "prompt": st.lists(tokens, max_size=20),
        "output": st.lists(tokens | st.integers(0, 3), max_size=20),
    },
)
kinds = st.sampled_from(["normal", "ties", "flat", "peaked"])


@FAST
@given(st.integers(0, 2**32 - 1), kinds, st.lists(asked_rows, min_size=ROWS, max_size=ROWS))
def test_sampled_tokens_are_the_oracles(seed: int, kind: str, asked: list[dict]):
    assert_sampled(draw_logits(seed, kind), asked)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"top_k": 2},
        {"top_k": 40},
        {"top_p": 0.5},
        {"top_p": 0.95},
        {"min_p": 0.05},
        {"top_k": 30, "top_p": 0.7, "min_p": 0.02},
        {"repetition_penalty": 1.5, "prompt": [*range(200)], "output": [*range(100, 300)]},
        {"frequency_penalty": 0.7, "output": [*range(0, 900, 9)] * 3},
        {"presence_penalty": 1.5, "output": [*range(0, 900, 9)] * 3},
        {"allowed": [*range(0, VOCAB_SIZE, 7)]},
        {"bias": {token: 3.0 for token in range(0, 900, 3)}},
    ],
    ids=lambda fields: "+".join(fields) or "temperature",
)
@pytest.mark.parametrize("kind", ["normal", "ties"])
def test_each_parameter_alone(fields: dict, kind: str):
    logits = draw_logits(3, kind, rows=1)
    for start in range(0, 64, ROWS):
        asked = [fields | {"temperature": 0.9, "positions": start + i} for i in range(ROWS)]
        assert_sampled(np.repeat(logits, ROWS, axis=0), asked)


def empirical(fields: dict, logits: np.ndarray, count: int) -> np.ndarray:
    """How often each token comes in `count` positions, 64 rows at a time."""
    seen = np.zeros(VOCAB_SIZE, np.int64)
    for start in range(0, count, 64):
        asked = [fields | {"positions": start + i} for i in range(64)]
        seen += np.bincount(run(logits, asked).token_ids, minlength=VOCAB_SIZE)
    return seen


def chi_square_p_value(seen: np.ndarray, p: np.ndarray) -> float:
    """Of the counts under p; tokens of less than 10 expected counts are pooled."""
    expected = p * seen.sum()
    rare = expected < 10
    seen = np.append(seen[~rare], seen[rare].sum())
    expected = np.append(expected[~rare], max(expected[rare].sum(), 1e-9))
    return stats.chi2.sf(((seen - expected) ** 2 / expected).sum(), len(seen) - 1)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("sampler", "oracle", "agree"),
    [
        ({}, {}, True),
        ({"top_k": 30}, {"top_k": 30}, True),
        ({"top_p": 0.9}, {"top_p": 0.9}, True),
        ({"temperature": 1.05}, {}, False),
        ({"top_k": 29}, {"top_k": 30}, False),
        ({"top_p": 0.85}, {"top_p": 0.9}, False),
    ],
)
def test_distribution_over_positions(sampler: dict, oracle: dict, agree: bool):
    """The test can tell: a sampler of another temperature, k or p fails the same threshold."""
    logits = np.repeat(draw_logits(11, "normal", rows=1), 64, axis=0)
    seen = empirical({"temperature": 1.0, "seed": 7} | sampler, logits, 19200)
    p_value = chi_square_p_value(seen, probabilities(logits[0], {"temperature": 1.0} | oracle))
    assert p_value > 1e-3 if agree else p_value < 1e-6


@pytest.mark.thorough
def test_the_far_tail_is_drawn_as_often_as_it_should():
    """4,096 tokens of probability 1e-6 and 12,287 of 1e-7, by the mass that they have together."""
    vocab_size, rows, count = 2**14, 512, 6144
    p = np.repeat([0.0, 1e-6, 1e-7], [1, 4096, 12287])
    p[0] = 1 - p.sum()
    logits = np.repeat(np.log(p)[None].astype(np.float32), rows, axis=0)
    seen = np.zeros(3)
    for start in range(0, count, rows):
        asked = [{"temperature": 1.0, "seed": 3, "positions": start + i} for i in range(rows)]
        tokens = run(logits, asked, vocab_size).token_ids
        seen += np.histogram(tokens, [0, 1, 4097, vocab_size])[0]
    expected = count * np.add.reduceat(p, [0, 1, 4097])
    tails = np.minimum(stats.poisson.cdf(seen, expected), stats.poisson.sf(seen - 1, expected))
    assert (tails > 1e-3).all(), (seen, expected)


@pytest.mark.costs(10)
@pytest.mark.parametrize("kind", ["flat", "equal", "peaked", "normal"])
def test_large_vocabulary(kind: str):
    """Fixed-point sums do not overflow at the largest vocabularies in use."""
    vocab_size = 262_208
    logits = draw_logits(5, kind, rows=1, vocab_size=vocab_size)
    logits = np.repeat(logits * (kind != "equal"), ROWS, axis=0)
    asked = [{"temperature": 1.0, "positions": i} for i in range(ROWS)]
    asked[-1] |= {"top_p": 0.9}
    asked[-2] |= {"top_k": 1000, "top_p": 0.5}
    assert_sampled(logits, asked, vocab_size)


# --- independent implementations ------------------------------------------------------------------


GOLDENS = json.loads((Path(__file__).parent.parent / "data" / "sampling.json").read_text())["cases"]


@pytest.mark.parametrize("case", GOLDENS, ids=lambda case: "+".join(case["asked"]))
def test_transformers_agrees(case: dict):
    """On ties transformers' top_p keeps some by sort order, and we keep all."""
    logits, asked = np.array(case["logits"], np.float32), case["asked"]
    theirs, ours = np.array(case["probabilities"]), probabilities(logits, asked)
    x = processed_logits(logits, asked)
    extra = (ours > 0) & (theirs == 0)
    assert (ours[theirs > 0] > 0).all()
    assert (x[extra] == x[theirs > 0].min()).all()
    np.testing.assert_allclose(np.where(extra, 0, ours) / ours[~extra].sum(), theirs, atol=2e-6)
    rows = [asked | {"positions": i} for i in range(ROWS)]
    assert_sampled(np.repeat(logits[None], ROWS, axis=0), rows, len(logits))


# --- greedy rows, ties, extremes ------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["normal", "ties"])
def test_greedy_rows_take_the_lowest_argmax_of_the_processed_logits(kind: str):
    logits = draw_logits(21, kind)
    edits = [
        {},
        {"bias": {5: 50.0}},
        {"allowed": [17, 3, 900]},
        {"repetition_penalty": 3.0, "prompt": [int(logits[3].argmax())]},
        {"frequency_penalty": 2.0, "output": [int(logits[4].argmax())] * 9},
        {"presence_penalty": -2.0, "output": [*range(50)]},
        {"top_k": 50, "top_p": 0.5, "min_p": 0.1},
        {"temperature": 1.0, "top_k": 1, "bias": {6: 1.0}},
    ]
    expected = [processed_logits(x, f).argmax() for x, f in zip(logits, edits, strict=True)]
    np.testing.assert_array_equal(run(logits, edits).token_ids, expected)
    asked = [row for fields in edits for row in [fields] + [{"temperature": 1.0}] * 7]
    beside_sampled = run(np.repeat(logits, 8, axis=0), asked)
    np.testing.assert_array_equal(beside_sampled.token_ids[::8], expected)


def test_top_k_keeps_every_tie_at_the_threshold():
    logits = np.full((64, VOCAB_SIZE), -5.0)
    logits[:, [10, 20]] = 2.0
    logits[:, [300, 400, 996]] = 1.0
    asked = [{"temperature": 1.0, "top_k": 3, "positions": i} for i in range(64)]
    assert set(run(logits, asked).token_ids) == {10, 20, 300, 400, 996}


def test_top_p_keeps_what_it_needs_and_no_more():
    """Probabilities 1/2, 1/4, 1/8, 1/8; a mass that is met exactly needs no further token."""
    logits = np.full((64, VOCAB_SIZE), -1e4)
    logits[:, [1, 2, 500, 600]] = np.log([0.5, 0.25, 0.125, 0.125])
    for top_p, kept in ((1e-6, {1}), (0.499, {1}), (0.501, {1, 2}), (0.749, {1, 2})):
        asked = [{"temperature": 1.0, "top_p": top_p, "positions": i} for i in range(64)]
        assert set(run(logits, asked).token_ids) == kept, top_p
    asked = [{"temperature": 1.0, "top_p": 0.76, "positions": i} for i in range(64)]
    assert set(run(logits, asked).token_ids) == {1, 2, 500, 600}  # a tie


def test_top_p_is_of_what_top_k_left():
    logits = np.full((64, VOCAB_SIZE), -1e4)
    logits[:, :4] = np.log([0.4, 0.3, 0.2, 0.1])
    asked = [
        {"temperature": 1.0, "top_k": 2, "top_p": 0.56, "positions": i} for i in range(64)
    ]  # 0.4 of 0.7 is 0.571
    assert set(run(logits, asked).token_ids) == {0}


@pytest.mark.parametrize("temperature", [1e-8, 1e-3, 1.0, 2.0, 100.0])
def test_all_mass_on_one_token(temperature: float):
    logits = draw_logits(2, "normal", rows=ROWS)
    logits[np.arange(ROWS), np.arange(ROWS) * 100] += 1e4
    asked = [{"temperature": temperature, "top_p": 0.9, "positions": i} for i in range(ROWS)]
    np.testing.assert_array_equal(run(logits, asked).token_ids, np.arange(ROWS) * 100)


@pytest.mark.parametrize("temperature", [1e-8, 1e-3, 0.01, 1.9, 2.0, 100.0])
def test_temperature_extremes(temperature: float):
    for scale in (1e-4, 1.0, 1e30):
        logits = draw_logits(31, "normal") * np.float32(scale)
        assert_sampled(logits, [{"temperature": temperature, "positions": i} for i in range(ROWS)])


def test_pending_tokens_count():
    logits = np.zeros((ROWS, VOCAB_SIZE))
    logits[:, 40], logits[:, 50] = 2.0, 1.9
    names = ["positions", "repetition_penalty", "frequency_penalty", "presence_penalty"]
    penalties = [{name: 2} for name in names] * 2
    assert (run(logits, penalties).token_ids == 40).all()
    pending = [fields | {"pending_ids": 40} for fields in penalties]
    np.testing.assert_array_equal(run(logits, pending).token_ids, [40, 50, 50, 50] * 2)


def test_a_saturated_count_is_neither_zero_nor_a_prompt_flag():
    logits = np.zeros((ROWS, PADDED), np.float32)
    fields = {"frequency_penalty": 0.001, "pending_ids": 3, "bias": {3: 32.0}}
    inputs = make_inputs([fields] * ROWS)
    inputs.token_counts[0, 3] = 0x7FFF  # 32767 + 1 times: the penalty is 32.768
    assert compiled(VOCAB_SIZE)(logits, inputs, KEY).token_ids[0] == 0
    inputs.token_counts[0, 3] = 0x7CFF  # 31999 + 1 times: 28.8
    inputs.frequency_penalty[0] = 0.0009
    assert compiled(VOCAB_SIZE)(logits, inputs, KEY).token_ids[0] == 3


# --- independence ---------------------------------------------------------------------------------


def random_asked(seed: int, rows: int) -> list[dict]:
    """Rows of all kinds, greedy ones and ones with log-probabilities among them."""
    rng = np.random.default_rng(seed)
    choices = {
        "temperature": [0.0, 0.7, 1.0, 1.5],
        "top_k": [0, 1, 5, 60],
        "top_p": [1.0, 0.5, 0.95],
        "min_p": [0.0, 0.02],
        "repetition_penalty": [1.0, 1.2],
        "num_logprobs": [-1, 0, 5],
    }
    return [
        {name: rng.choice(values) for name, values in choices.items()}
        | {"seed": int(rng.integers(2**63)), "positions": int(rng.integers(2**31))}
        | {"output": rng.integers(0, VOCAB_SIZE, 30).tolist()}
        for _ in range(rows)
    ]


def test_a_row_does_not_depend_on_the_batch():
    """Whatever the other rows ask, in batches of other sizes and in other places.

    Tokens to the bit. Log-probabilities come from a float32 sum, whose order XLA chooses by shape.
    """
    logits, asked = draw_logits(41, "normal", rows=64), random_asked(42, 64)
    together = run(logits, asked)
    for size in (1, 3, 8):
        for start in range(0, 24, size):
            rows = np.roll(np.arange(start, start + size), 1)
            part = run(logits[rows], [asked[row] for row in rows])
            np.testing.assert_array_equal(part.token_ids, together.token_ids[rows])
            asks = np.array([asked[row]["num_logprobs"] for row in rows])
            for field, least in (("logprobs", 0), ("top_ids", 1), ("top_logprobs", 1)):
                ours, theirs = getattr(part, field), getattr(together, field)[rows]
                np.testing.assert_allclose(ours[asks >= least], theirs[asks >= least], atol=4e-6)


def test_logits_that_move_by_little_change_few_draws():
    """In another batch or mode logits differ in their last bits; here, to see anything, by 3e-3.

    A draw changes with probability 2 TV / (1 + TV) at most, TV being the distance between the
    distributions (Daliri et al. 2024): 0.0022 here, 14 of 6400. With one uniform number looked up
    in the cumulative distribution, every boundary of which moves, it would be 0.05.
    """
    rng = np.random.default_rng(44)
    logits = np.repeat(draw_logits(45, "normal", rows=1), 64, axis=0)
    changed = 0
    for start in range(0, 6400, 64):
        asked = [{"temperature": 1.0, "positions": start + i} for i in range(64)]
        moved = logits + rng.normal(0, 3e-3, logits.shape)
        changed += (run(logits, asked).token_ids != run(moved, asked).token_ids).sum()
    assert 0 < changed <= 25


@pytest.mark.costs(10)
@pytest.mark.parametrize(
    ("kind", "num_devices"), [("ties", 8), *thorough(("normal", 8), ("flat", 8), ("ties", 2))]
)
def test_devices_that_split_the_vocabulary_choose_what_one_does(kind: str, num_devices: int):
    """To the bit; the last device has padding, and of 8 none but the first begins with a word.

    Log-probabilities are sums of the devices' sums.
    """
    rng = np.random.default_rng(47)
    logits, asked = draw_logits(43, kind, rows=64), random_asked(44, 64)
    for fields in asked[::3]:
        fields["bias"] = {int(token): 4.0 for token in rng.integers(0, VOCAB_SIZE, 20)}
    for fields in asked[::5]:
        fields["allowed"] = rng.choice(VOCAB_SIZE, 300, replace=False)
    logits[7, 900] = np.nan
    expected, output = (run(logits, asked, num_devices=n) for n in (1, num_devices))
    assert expected.is_finite.sum() == 63
    for field in ("token_ids", "is_finite", "top_ids"):
        np.testing.assert_array_equal(getattr(output, field), getattr(expected, field))
    for field in ("logprobs", "top_logprobs"):
        np.testing.assert_allclose(getattr(output, field), getattr(expected, field), atol=4e-6)


@pytest.mark.thorough
def test_a_device_may_have_nothing_but_padding():
    """Of 8 devices with 128 tokens each the first has all 70; words past the last are the last."""
    logits = draw_logits(46, "normal", vocab_size=70) - 50
    fields = {"allowed": [3, 40, 69], "num_logprobs": 20}
    asked = [fields | {"temperature": i % 2, "positions": i} for i in range(ROWS)]
    expected, output = (run(logits, asked, 70, num_devices=n) for n in (1, 8))
    np.testing.assert_array_equal(output.token_ids, expected.token_ids)
    np.testing.assert_array_equal(output.top_ids, expected.top_ids)
    assert set(output.token_ids.tolist()) <= {3, 40, 69}


def test_the_vocabulary_split_at_any_token_has_its_bits():
    """9 tokens a device: a word of the bitmask is several devices', and bits begin anywhere."""
    vocab = VocabSplit(70, 9, 8)
    mask = np.random.default_rng(48).integers(0, 2**32, 3, dtype=np.uint32)
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
    words = mask[vocab.words].reshape(8, -1)
    for device, own in enumerate(words):
        first = 9 * device
        count = min(9, 70 - first)
        seen = _unpack_bits(jnp.asarray(own[None]), jnp.int32(first % 32), 9)
        np.testing.assert_array_equal(seen[0, :count], bits[first : first + count])


@pytest.mark.parametrize(("digit_bits", "loop"), [(DIGIT_BITS, False), (DIGIT_BITS_ON_CPU, True)])
@pytest.mark.parametrize("by_mass", [False, True])
def test_thresholds_keep_what_is_asked_and_no_more(digit_bits: int, loop: bool, by_mass: bool):
    """By sorting; weights of all sizes, ties, and more asked than there is."""
    rng = np.random.default_rng(49)
    weights = np.exp2(rng.uniform(-4, 20.0, (64, 512))).astype(np.int32)
    weights[:32] &= ~0xFFF
    weights[:, 0] = 1 << 30
    values = weights if by_mass else np.ones_like(weights)
    target = rng.integers(1, values.sum(axis=1) * 5 // 4).astype(np.int32)
    target[:4] = 1, 1 << 30 if by_mass else 1, values[2].sum(), values[3].sum() + 1

    def find(weights, values, target, parallel):
        split = _Split(parallel, 512, weights.shape[1])
        values = weights if by_mass else values  # the same array, so that it knows
        return _digits_of_threshold(split, weights, values, target, digit_bits, loop=loop)

    layout = Layout(PRESETS["tiny"], 1, 1)
    found = np.asarray(
        jax.jit(partial(find, parallel=Parallel(layout, layout.shift)))(weights, values, target)
    )
    for row, wanted in enumerate(target):
        tried = np.unique(np.append(weights[row], 1))
        keeps = [x for x in tried if values[row][weights[row] >= x].sum() >= wanted]
        expected = max(keeps, default=1)
        kept, best = weights[row] >= found[row], weights[row] >= max(expected, 1)
        np.testing.assert_array_equal(kept, best)


@pytest.mark.parametrize(
    "change",
    [{"seed": 6}, {"seed": 5 + 2**32}, {"positions": 11}],
    ids=["seed", "high word of the seed", "position"],
)
def test_seed_and_position_change_the_token(change: dict):
    logits = np.zeros((ROWS, VOCAB_SIZE))
    fields = {"temperature": 1.0, "seed": 5, "positions": 10}
    output = run(logits, [fields, fields | change] * (ROWS // 2)).token_ids
    assert len(set(output[::2])) == len(set(output[1::2])) == 1
    assert output[0] != output[1]


def test_the_key_changes_the_token():
    logits = np.zeros((ROWS, PADDED), np.float32)
    inputs = make_inputs([{"temperature": 1.0}] * ROWS)
    tokens = {
        int(compiled(VOCAB_SIZE)(logits, inputs, jax.random.key(seed)).token_ids[0])
        for seed in range(5)
    }
    assert len(tokens) == 5


# --- rows that are not finite ---------------------------------------------------------------------


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [0, 500, VOCAB_SIZE - 1])
def test_a_bad_row_is_reported_and_spoils_no_other(bad: float, place: int):
    logits, asked = draw_logits(51, "normal"), random_asked(52, ROWS)
    asked[3] |= {"num_logprobs": 5}
    clean = run(logits, asked)
    logits[3, place] = bad
    output = run(logits, asked)
    assert output.is_finite.tolist() == [row != 3 for row in range(ROWS)]
    for field, expected in zip(output, clean, strict=True):
        np.testing.assert_array_equal(np.delete(field, 3, 0), np.delete(expected, 3, 0))
        assert not field[3].any()


def test_bad_rows_are_seen_in_greedy_steps():
    logits = np.zeros((ROWS, VOCAB_SIZE))
    logits[[1, 2, 3], [700, 0, 996]] = np.nan, np.inf, -np.inf
    output = run(logits, [{}] * ROWS)
    assert output.is_finite.tolist() == [True] + [False] * 3 + [True] * 4
    assert not output.token_ids.any()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_without_an_allowed_token_is_not_finite(temperature: float):
    asked = [{"temperature": temperature, "allowed": allowed} for allowed in ([], [7])] * 4
    output = run(np.zeros((ROWS, VOCAB_SIZE)), asked)
    assert output.is_finite.tolist() == [False, True] * 4
    assert output.token_ids.tolist() == [0, 7] * 4


# --- log-probabilities ----------------------------------------------------------------------------


def test_logprobs_are_of_the_raw_logits():
    logits = draw_logits(61, "normal")
    edits = {"temperature": 0.5, "bias": {3: 9.0}, "repetition_penalty": 2.0, "output": [1, 2, 3]}
    asked = [edits | {"positions": i, "num_logprobs": 20} for i in range(ROWS)]
    output, expected = run(logits, asked), log_softmax(logits)
    chosen = expected[np.arange(ROWS), output.token_ids]
    np.testing.assert_allclose(output.logprobs, chosen, atol=5e-6)
    order = np.argsort(-logits, axis=-1, kind="stable")[:, :MAX_LOGPROBS]
    np.testing.assert_array_equal(output.top_ids, order)
    best = np.take_along_axis(expected, order, axis=-1)
    np.testing.assert_allclose(output.top_logprobs, best, atol=5e-6)


def test_targets_are_scored_not_sampled():
    logits = draw_logits(62, "normal")
    targets = [0, 5, 996, 100, 200, 300, 400, -1]
    asked = [{"temperature": 1.0, "target_ids": t, "num_logprobs": 0} for t in targets]
    output = run(logits, asked)
    assert output.token_ids[:-1].tolist() == targets[:-1]
    chosen = log_softmax(logits)[np.arange(ROWS), output.token_ids]
    np.testing.assert_allclose(output.logprobs, chosen, atol=5e-6)
    assert not output.top_ids.any()  # nobody asked for more
    sampled = run(logits, [{"temperature": 1.0}] * ROWS)
    assert sampled.token_ids[-1] == output.token_ids[-1]


def processed_of(logits: np.ndarray, asked: list[dict], num_devices: int = 1) -> SampleOutput:
    """The same as `run`, with log-probabilities of what is drawn from."""
    output = compiled(VOCAB_SIZE, num_devices, of_processed=True)(
        padded(logits), make_inputs(asked, num_devices=num_devices), KEY
    )
    return SampleOutput(*map(np.asarray, output))


@pytest.mark.costs(10)
@pytest.mark.parametrize("num_devices", [1, 4])
def test_processed_logprobs_are_of_what_is_drawn_from(num_devices: int):
    logits = draw_logits(65, "normal")
    edits = {"bias": {3: 9.0}, "repetition_penalty": 2.0, "output": [1, 2, 3]}
    asked = [
        {"temperature": 0.7},
        {"temperature": 1.5, "top_k": 7},
        {"temperature": 1.0, "top_p": 0.6},
        {"temperature": 2.0, "min_p": 0.2},
        {"temperature": 0.5, "top_k": 50, "top_p": 0.9} | edits,
        {"temperature": 0.5, "top_k": 1},  # greedy, as the next: of temperature 1, nothing cut
        edits | {"allowed": [*range(0, VOCAB_SIZE, 3)]},
        {"temperature": 0.5, "target_ids": 5},
    ]
    asked = [each | {"num_logprobs": 20, "positions": row} for row, each in enumerate(asked)]
    output = processed_of(logits, asked, num_devices)
    np.testing.assert_array_equal(output.token_ids, run(logits, asked).token_ids)
    rows = zip(logits[:-1], asked, output.token_ids, strict=False)
    for row, (x, fields, token) in enumerate(rows):
        with np.errstate(divide="ignore"):
            is_greedy = "temperature" not in fields or fields.get("top_k") == 1
            plain = {"temperature": 1.0, "top_k": 0} if is_greedy else {}
            expected = np.log(probabilities(x, fields | plain))
        np.testing.assert_allclose(output.logprobs[row], expected[token], atol=2e-5)
        best = np.sort(expected)[::-1][:MAX_LOGPROBS]
        np.testing.assert_allclose(output.top_logprobs[row], best, atol=2e-5)
    np.testing.assert_allclose(output.logprobs[-1], log_softmax(logits[-1])[5], atol=5e-6)


def test_nothing_asked_nothing_computed():
    output = run(draw_logits(63, "normal"), [{"temperature": 1.0}] * ROWS)
    assert not (output.logprobs.any() or output.top_ids.any() or output.top_logprobs.any())


def test_small_vocabulary_has_fewer_logprobs():
    logits = draw_logits(64, "normal", vocab_size=7)
    output = run(logits, [{"num_logprobs": 5, "temperature": 1.0}] * ROWS, 7)
    assert output.top_ids.shape == (ROWS, 7)
    assert (output.token_ids < 7).all()


# --- what is refused ------------------------------------------------------------------------------


def test_a_vocabulary_over_the_limit_is_refused():
    logits = jax.ShapeDtypeStruct((1, MAX_VOCAB + 1), np.float32)
    with pytest.raises(ValueError, match="limit of 524287"):
        jax.eval_shape(compiled(MAX_VOCAB + 1), logits, make_inputs([{}], MAX_VOCAB + 1), KEY)

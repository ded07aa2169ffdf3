"""A call holds what has changed: whoever hears all of them has all inputs of every step."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shiftjax.hosts.calls import NOBODY, Recent, Step

# Of two programs: the packed vector, and tables of other types, of no even number of words.
SHAPES = [
    [((size,), np.dtype(np.int32)), ((3, size), np.dtype(np.uint16)), ((5,), np.dtype(np.float32))]
    for size in (24, 7)
]


def shapes(program: int) -> list:
    return SHAPES[program]


@st.composite
def traffic(draw) -> list[Step]:
    """Steps of either program, of which some elements change and some tables come and go."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    held = [[np.zeros(*each) for each in program] for program in SHAPES]
    steps = []
    for number in range(1, 1 + draw(st.integers(1, 12))):
        program, arrays = draw(st.integers(0, 1)), []
        for array in held[program]:
            share = draw(st.sampled_from([0.0, 0.1, 1.0]))
            changed = rng.random(array.shape) < share
            array[changed] = rng.integers(0, 60000, changed.sum()).astype(array.dtype)
            arrays.append(array.copy() if draw(st.booleans()) else None)
        follows = draw(st.sampled_from([NOBODY, number - 1]))
        steps.append(Step(number, follows, program, draw(st.integers(1, 8)), tuple(arrays)))
    return steps


@given(traffic())
@settings(max_examples=100, deadline=None)
def test_changes_rebuild_all_inputs(steps):
    leader, follower = Recent(), Recent()
    for step in steps:
        heard = follower.decode(leader.encode(step), shapes)
        assert heard[:4] == step[:4]
        for mine, theirs in zip(step.arrays, heard.arrays, strict=True):
            if mine is None:
                assert theirs is None
            else:
                assert theirs is not None and theirs.dtype == mine.dtype
                np.testing.assert_array_equal(theirs, mine)


def test_a_decode_step_takes_sixteen_bytes_a_sequence():
    """Position, slot, length and sampled position change, and a block now and then."""
    num_seqs, blocks = 256, 512
    recent, flat = Recent(), np.zeros(num_seqs * (blocks + 6), np.int32)
    sizes = []
    for number in range(1, 20):
        for first in range(0, 4 * num_seqs, num_seqs):
            flat[first : first + num_seqs] += 1
        table = flat[6 * num_seqs :].reshape(num_seqs, blocks)
        table[number::16, number // 16] = number  # a block of 16 tokens is full
        sizes.append(len(recent.encode(Step(number, NOBODY, 0, 1, (flat.copy(), None)))))
    assert max(sizes) < 18 * num_seqs < flat.nbytes / 100


@pytest.mark.parametrize("cut", [1, 20, 50, 100])
def test_bytes_that_are_no_call_are_refused(cut):
    whole = Recent().encode(Step(1, NOBODY, 0, 1, (np.arange(24, dtype=np.int32), None, None)))
    with pytest.raises(ValueError, match="no call"):
        Recent().decode(whole[:cut], shapes)


def test_a_program_that_nobody_has_is_refused():
    call = Recent().encode(Step(1, NOBODY, 9, 1, (np.arange(24, dtype=np.int32), None, None)))
    with pytest.raises(ValueError, match="no call"):
        Recent().decode(call, shapes)

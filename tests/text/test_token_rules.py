"""Rules of tokens: what may come next, by search of the whole output; drafts change nothing."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shiftjax.core.request import Request
from shiftjax.core.sampling_params import SamplingParams
from shiftjax.text.rules import rules_of
from shiftjax.text.token_rules import (
    BannedWords,
    Joined,
    all_allowed,
    allows,
    ruled,
    without,
    word_ids,
)

VOCAB = 37
tokens = st.integers(0, 3)
words = st.lists(st.lists(tokens, min_size=1, max_size=4), min_size=1, max_size=4)


def allowed(mask) -> set[int]:
    return {token for token in range(32 * len(mask)) if allows(mask, token)}


def holds(output: list[int], word: list[int]) -> bool:
    return any(output[i : i + len(word)] == word for i in range(len(output)))


def test_masks_have_a_bit_for_each_token():
    assert allowed(all_allowed(VOCAB)) == set(range(VOCAB))
    assert allowed(all_allowed(64)) == set(range(64))
    assert allowed(without(all_allowed(VOCAB), [0, 31, 32])) == set(range(VOCAB)) - {0, 31, 32}
    assert not allows(all_allowed(VOCAB), 1000)


@given(words, st.lists(tokens, max_size=12))
def test_the_last_token_of_a_word_may_not_come(banned, output):
    rule = BannedWords(banned, VOCAB)
    for place, token in enumerate(output):
        before = output[:place]
        for nxt in range(4):
            completes = any([*before, nxt][-len(word) :] == word for word in banned)
            assert allows(rule.mask, nxt) is not completes
        assert allows(rule.mask, VOCAB - 1)
        if not allows(rule.mask, token):
            break
        assert rule.accept(token)
        assert not any(holds(output[: place + 1], word) for word in banned)


@given(words, words, st.lists(tokens, max_size=4), st.lists(tokens, max_size=8), st.booleans())
def test_a_draft_is_followed_as_its_tokens_are(banned, others, output, draft, joined):
    def make():
        rule = BannedWords(banned, VOCAB)
        return Joined(rule, BannedWords(others, VOCAB)) if joined else rule

    rule, plain = make(), make()
    for each in (rule, plain):
        for token in output:
            each.accept(token)
    expected = [plain.mask.copy()]
    for token in draft:
        if not allows(plain.mask, token):
            break
        plain.accept(token)
        expected.append(plain.mask.copy())
    found = rule.masks_along(draft)
    assert [mask.tolist() for mask in found] == [mask.tolist() for mask in expected]
    again = rule.masks_along(draft)
    assert [mask.tolist() for mask in again] == [mask.tolist() for mask in expected]
    assert rule.mask.tolist() == expected[0].tolist()


def test_both_of_two_constraints_hold():
    both = Joined(BannedWords([[1]], 3), BannedWords([[2], [0, 0]], 3))
    assert allowed(both.mask) == {0}
    assert not both.accept(0), "nothing is left to follow"
    assert not both.decides_end


def test_words_are_banned_behind_a_space_too(smollm2):
    ids = word_ids(["the", " the"], smollm2)
    assert sorted(map(smollm2.decode, ids)) == [" the", "the"]
    rules = ruled(
        (), 2, lambda _: rules_of(SamplingParams(bad_words=["the"]), smollm2, 49152, [], None)
    )
    assert len(rules) == 2 and rules[0] is not rules[1]
    for word in ids:
        assert not allows(rules[0].mask, word[0])


def test_without_words_there_is_no_rule(smollm2):
    state = BannedWords([[1]], VOCAB)
    plain = SamplingParams()
    assert ruled([state], 1, lambda _: rules_of(plain, smollm2, VOCAB, [], None)) == [state]
    assert Request("a", [1], plain).constraints == ()
    asked = SamplingParams(bad_words="a")
    rules = ruled([state], 1, lambda _: rules_of(asked, smollm2, VOCAB, [], None))
    assert isinstance(rules[0], Joined)


def test_words_need_a_tokenizer():
    from shiftjax.core.limits import RequestLimits, validate_request
    from shiftjax.core.request import RequestError

    request = Request("a", [1], SamplingParams(bad_words=["x"]))
    with pytest.raises(RequestError, match="bad_words needs a tokenizer"):
        validate_request(request, RequestLimits(VOCAB, 100, 100))
    assert np.uint32 is all_allowed(VOCAB).dtype.type

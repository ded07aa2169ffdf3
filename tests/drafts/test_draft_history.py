"""Guesses against a matcher that looks at every place; the two indices against each other."""

import random
from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from suffix_oracle import guess

from shiftjax.draft_options import DraftOptions
from shiftjax.drafts import sorted_index
from shiftjax.drafts.draft_history import History
from shiftjax.drafts.search import (
    MOST_PLACES,
    SUFFIX_SIZES,
    Search,
    follow,
    make_search,
)
from shiftjax.drafts.sorted_index import SortedIndex

steady = settings(deadline=None, derandomize=True)

SUFFIX = make_search(DraftOptions(speculation="suffix", suffix_offset=0))  # the match is the length
NGRAM = make_search(DraftOptions(speculation="ngram", max_draft_tokens=6))
NGRAM_SIZES = (5, 4, 3, 2)

seeds = st.integers(0, 10**6)
token_lists = st.one_of(
    seeds.map(lambda seed: random.Random(seed).choices(range(3), k=seed % 61)),
    st.lists(st.integers(0, 2), max_size=60),
    st.lists(st.sampled_from([0, 1, 49_151, 2**31 - 1]), max_size=30),
)


def history_of(texts, sizes=SUFFIX_SIZES) -> History:
    history = History(sizes)
    for tokens in texts:
        history.index(history.add(array("i", tokens)), len(tokens) + 1)
    return history


@steady
@given(st.lists(token_lists, max_size=5), token_lists, st.integers(0, 8))
def test_a_guess_is_that_of_a_search_through_everything(texts, context, most):
    found = SUFFIX.guess(array("i", context[-32:]), history_of(texts).places, most)
    assert tuple(found) == guess(context, texts, most)


@steady
@given(
    token_lists, st.floats(0.2, 2.0), st.floats(0.0, 3.0), st.floats(0.0, 1.0), st.integers(1, 9)
)
def test_every_setting_is_obeyed(text, factor, offset, floor, max_match):
    search = Search(SUFFIX_SIZES, max_match, factor, offset, floor)
    found = search.guess(array("i", text[-max_match:]), history_of([text]).places, 16)
    settings = {"factor": factor, "offset": offset, "floor": floor, "max_match": max_match}
    assert tuple(found) == guess(text, [text], 16, **settings)


@steady
@given(token_lists, st.integers(0, 8))
def test_n_grams_are_the_same_search_with_other_lengths(text, most):
    found = NGRAM.guess(array("i", text[-5:]), history_of([text], NGRAM_SIZES).places, most)
    lengths = {"sizes": NGRAM_SIZES, "max_match": 5, "factor": 0.0, "offset": 6}
    assert tuple(found) == guess(text, [text], most, **lengths)


@steady
@given(token_lists, st.sampled_from([SUFFIX_SIZES, NGRAM_SIZES]))
def test_sorting_finds_what_the_dictionary_finds(text, sizes):
    history, index = history_of([text], sizes), SortedIndex(array("i", text), sizes)
    for size in sizes:
        for end in range(size, len(text) + 1):
            key = array("i", text[end - size : end])
            places = [place for _, place in history.places(key, MOST_PLACES)]
            assert index.ends(key, MOST_PLACES) == places


@steady
@given(token_lists, st.lists(st.integers(1, 7), max_size=20))
def test_a_history_may_grow_in_pieces(text, pieces):
    grown = History(SUFFIX_SIZES)
    entry, done = grown.add(array("i")), 0
    for piece in [*pieces, len(text)]:
        entry.tokens.extend(text[done : done + piece])
        done += piece
        grown.index(entry, len(entry.tokens) + 1)
    whole = history_of([text])
    for end in range(1, len(text) + 1):
        for size in (size for size in SUFFIX_SIZES if size <= end):
            key = text[end - size : end]
            ends = [place for _, place in grown.places(key, MOST_PLACES)]
            assert ends == [place for _, place in whole.places(key, MOST_PLACES)]


def test_tokens_whose_hashes_collide_are_no_match(monkeypatch):
    monkeypatch.setattr(sorted_index, "MULTIPLIER", 0)  # the last token is the hash
    text = array("i", [1, 2, 3, 9, 5, 6, 7, 8, 9, 4])
    index = SortedIndex(text, SUFFIX_SIZES)

    def lookup(key, most):
        return [(text, end) for end in index.ends(key, most)]

    assert SUFFIX.guess(array("i", [0, 2, 3, 9]), lookup, 4) == ([5, 6, 7], [1.0] * 3, 3)
    assert SUFFIX.guess(array("i", [0, 0, 0, 9]), lookup, 4) == ([4], [0.5], 1)

    def crowded(key, most):
        return [(text, 9)] if len(key) == 4 else lookup(key, most)

    assert SUFFIX.guess(array("i", [0, 2, 3, 9]), crowded, 4) == ([5, 6, 7], [1.0] * 3, 3)


def test_places_vote_and_the_path_ends_below_the_floor():
    texts = [array("i", text) for text in ([1, 2, 3, 4], [1, 2, 3, 5], [1, 2, 6, 7])]
    places = [(text, 1) for text in texts]
    assert follow(places, 9) == ([2, 3, 4], [1.0, 2 / 3, 0.5])
    assert follow(places[::-1], 9) == ([2, 3, 5], [1.0, 2 / 3, 0.5])  # of equals the first
    assert follow(places, 9, min_prob=0.34) == ([2, 3], [1.0, 2 / 3])
    assert follow(places, 2) == ([2, 3], [1.0, 2 / 3])
    assert follow([], 2) == ([], [])


def test_only_the_most_recent_places_vote():
    text = [5, 1] + [5, 2] * 6 + [5, 3] * 6
    found = SUFFIX.guess(array("i", [8, 5]), history_of([text]).places, 4)
    assert tuple(found) == ([3], [0.5], 1) == guess([8, 5], [text], 4)


@pytest.mark.parametrize("text", [[], [7], [7, 7], [7] * 100])
def test_short_and_dull_texts(text):
    found = SUFFIX.guess(array("i", text[-32:]), history_of([text]).places, 8)
    assert tuple(found) == guess(text, [text], 8)
    assert (
        SortedIndex(array("i", text), SUFFIX_SIZES).ends([7], 3)
        == [end for end in range(len(text) - 1, 0, -1)][:3]
    )

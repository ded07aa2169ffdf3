"""Finished texts: exact bounds, in whole texts, apart by key, and an index without remains."""

from array import array
from collections import OrderedDict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shiftjax.drafts import corpora
from shiftjax.drafts.corpora import Corpora
from shiftjax.drafts.draft_history import History
from shiftjax.drafts.search import SUFFIX_SIZES

steady = settings(deadline=None, derandomize=True)

BUDGET = 20
EVERYTHING = 10**6

texts = st.lists(st.integers(0, 2), max_size=BUDGET + 2)
adds = st.tuples(st.sampled_from("abcd"), texts, st.sampled_from([0, 1, 4, 9, 30]))


class Model:
    """What should be kept, by lists."""

    def __init__(self):
        self.kept: list[tuple[str, list[int]]] = []
        self.used: OrderedDict[str, None] = OrderedDict()

    def add(self, key, text):
        if not 0 < len(text) <= BUDGET:
            return
        if key not in self.used and len(self.used) == 3:
            gone, _ = self.used.popitem(last=False)
            self.kept = [(k, t) for k, t in self.kept if k != gone]
        self.used[key] = None
        self.used.move_to_end(key)
        self.kept.append((key, text))
        while sum(len(t) for _, t in self.kept) > BUDGET:
            del self.kept[0]

    def history(self, key) -> History:
        history = History(SUFFIX_SIZES)
        for _, tokens in (item for item in self.kept if item[0] == key):
            history.index(history.add(array("i", tokens)), len(tokens) + 1)
        return history


def keys_of(text):
    return [text[end - n : end] for n in SUFFIX_SIZES for end in range(n, len(text) + 1)]


def known(some: Corpora) -> tuple[int, int]:
    """Tokens that the dictionaries hold: of kept texts, and of texts that are gone."""
    kept = sum(text.stop - text.first for text in some._texts)
    return kept, sum(text.stop - start for _, text, start in some._leaving)


@pytest.fixture(autouse=True, scope="module")
def three_corpora():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpora, "MOST_CORPORA", 3)
        yield


@steady
@given(st.lists(adds, max_size=30))
def test_bounds_are_exact_and_nothing_remains(history):
    some, model = Corpora(SUFFIX_SIZES, BUDGET), Model()
    for key, text, work in history:
        some.add(key, text)
        model.add(key, text)
        (kept, gone), unknown = known(some), some.num_tokens - known(some)[0]
        some.work(work)
        done = known(some)[0] - kept + gone - known(some)[1]
        assert done == min(work, gone + unknown)
        assert some.num_tokens == sum(len(t) for _, t in model.kept) <= BUDGET
        assert sum(known(some)) <= BUDGET
        assert len(some) <= 3
    some.work(EVERYTHING)
    for key in model.used:
        corpus, expected = some.get(key), model.history(key)
        assert corpus is not None and len(corpus) == len(expected)
        for run in (run for _, text in model.kept for run in keys_of(text)):
            assert corpus.places(run, 12) == expected.places(run, 12)


@steady
@given(st.lists(adds, max_size=20))
def test_between_slices_only_kept_texts_of_the_key_are_found(history):
    some, model = Corpora(SUFFIX_SIZES, BUDGET), Model()
    for key, text, work in history:
        some.add(key, text)
        model.add(key, text)
        some.work(work)
        for name, corpus in list(some._corpora.items()):
            allowed = [t for k, t in model.kept if k == name]
            for token in range(3):
                for tokens, end in corpus.places([token], 12):
                    assert tokens.tolist() in allowed and tokens[end - 1] == token


def test_work_is_done_in_slices():
    some = Corpora(SUFFIX_SIZES, 100)
    some.add("a", [1, 2, 3, 4, 5, 6])
    corpus = some.get("a")
    assert corpus is not None
    assert corpus.places([2], 9) == []
    some.work(1)
    assert len(corpus.places([1], 9)) == 1 and corpus.places([2], 9) == []
    some.work(3)
    assert len(corpus.places([2, 3], 9)) == 1 and corpus.places([5], 9) == []


def test_a_corpus_in_use_stays_and_the_others_leave():
    some = Corpora(SUFFIX_SIZES, 100)
    for key in "abc":
        some.add(key, [1, 2])
    some.get("a")
    some.add("d", [1, 2])
    assert some.get("b") is None and some.get("a") is not None
    assert some.num_tokens == 6


def test_many_keys_leave_nothing_behind():
    some = Corpora(SUFFIX_SIZES, 100)
    for key in range(50):
        some.add(key, [1, 2, 3])
        some.work(8)
    assert (len(some), some.num_tokens, len(some._texts)) == (3, 9, 3)
    assert not some._leaving and not some._entering


def test_a_text_larger_than_all_is_not_kept():
    some = Corpora(SUFFIX_SIZES, 3)
    some.add("a", [1, 2, 3])
    some.add("a", [1, 2, 3, 4])
    assert some.num_tokens == 3
    none = Corpora(SUFFIX_SIZES, 0)
    none.add("a", [1])
    assert none.get("a") is None and none.num_tokens == 0

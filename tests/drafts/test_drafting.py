"""Sequences that draft: what they copy from, what they may not see, and odd input."""

import random
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shiftjax.core.proposal import ModelGuess
from shiftjax.draft_options import DraftOptions
from shiftjax.drafts.drafting import EXTEND_WORK, INLINE_TOKENS, START_WORK, Drafting

short = settings(deadline=None, derandomize=True, max_examples=40)

SUFFIX = DraftOptions(speculation="suffix")
ANSWER = [11, 12, 13, 14, 15, 16, 17, 18]

seeds = st.integers(0, 10**6)
token_lists = seeds.map(lambda seed: random.Random(seed).choices(range(3), k=seed % 41))


@pytest.fixture
def busy():
    """(drafting, release): the thread that builds indices does nothing until released."""
    drafting, gate = Drafting(SUFFIX), threading.Event()
    drafting._indexer.submit(gate.wait, 60)

    def release():
        gate.set()
        drafting._indexer.submit(int).result()  # what came before is done

    yield drafting, release
    gate.set()
    drafting.close()


def tokens_of(drafting, name, most=16):
    draft = drafting.draft(name, most)
    return draft.tokens if draft else []


def finish(drafting, name, output, corpus=None, finished=True):
    drafting.start(name, [1, 2], corpus)
    drafting.extend(name, output)
    drafting.end(name, finished)


@pytest.mark.parametrize("method", ["suffix", "ngram"])
@pytest.mark.parametrize("num_prompt", [0, 1, 3, 30, 200])
@pytest.mark.parametrize("num_symbols", [2, 4])
def test_a_prompt_and_an_output_are_one_text(method, num_prompt, num_symbols):
    """The prompt is sorted, the output is chained; drafts are those of one chained text."""
    rng = random.Random(num_prompt)
    prompt = rng.choices(range(num_symbols), k=num_prompt)
    drafting = Drafting(DraftOptions(speculation=method))
    drafting.start("split", prompt, None)
    drafting.start("whole", [], None)
    drafting.extend("whole", prompt)
    for token in rng.choices(range(num_symbols), k=60):
        drafting.extend("split", [token])
        drafting.extend("whole", [token])
        assert drafting.draft("split", 9) == drafting.draft("whole", 9)


def test_drafts_are_at_most_as_long_as_asked():
    drafting = Drafting(DraftOptions(speculation="suffix", max_draft_tokens=3))
    drafting.start("a", ANSWER * 2, None)
    assert tokens_of(drafting, "a") == [11, 12, 13]
    assert tokens_of(drafting, "a", 2) == [11, 12]
    assert drafting.draft("a", 0) is None and drafting.draft("a", -1) is None


@pytest.mark.parametrize(("match", "length"), [(1, 9), (3, 11), (8, 16)])
def test_a_draft_is_eight_tokens_longer_than_its_match(match, length):
    drafting = Drafting(SUFFIX)
    drafting.start("a", [*range(40), 99, *range(5, 5 + match)], None)
    assert tokens_of(drafting, "a") == list(range(5 + match, 5 + match + length))


def test_a_finished_output_drafts_for_the_next_request():
    drafting = Drafting(SUFFIX)
    finish(drafting, "a", ANSWER)
    drafting.start("b", [3, 4], None)
    drafting.extend("b", ANSWER[:4])
    draft = drafting.draft("b", 16)
    assert draft is not None and draft.tokens == ANSWER[4:] and draft.proposer == "suffix"
    assert drafting.num_corpus_tokens == len(ANSWER)


def test_prompts_never_enter_the_corpus():
    drafting = Drafting(SUFFIX)
    drafting.start("a", ANSWER, None)
    drafting.extend("a", [5])
    drafting.end("a", finished=True)
    drafting.start("b", ANSWER[:4], None)
    assert tokens_of(drafting, "b") == [] and drafting.num_corpus_tokens == 1


def test_an_aborted_output_never_enters_the_corpus():
    drafting = Drafting(SUFFIX)
    finish(drafting, "a", ANSWER, finished=False)
    drafting.start("b", ANSWER[:4], None)
    assert tokens_of(drafting, "b") == [] and drafting.num_corpus_tokens == 0


def test_a_running_output_is_seen_by_nobody_else():
    drafting = Drafting(SUFFIX)
    drafting.start("a", [1, 2], None)
    drafting.extend("a", ANSWER)
    drafting.start("b", ANSWER[:4], None)
    assert tokens_of(drafting, "b") == []


@short
@given(st.lists(st.tuples(st.integers(0, 2), token_lists), max_size=12), token_lists)
def test_texts_of_another_key_never_draft(finished, prompt):
    """Drafts for one key are the same, token for token, whatever the others said."""
    shared, alone = Drafting(SUFFIX), Drafting(SUFFIX)
    for name, (key, output) in enumerate(finished):
        finish(shared, name, output, corpus=key)
        if key == 0:
            finish(alone, name, output, corpus=key)
    for drafting in (shared, alone):
        drafting._corpora.work(10**6)
        drafting.start("last", prompt, 0)
    assert shared.draft("last", 9) == alone.draft("last", 9)


def test_a_prediction_is_followed_from_its_first_token_and_found_again():
    drafting = Drafting(SUFFIX)
    expected = [*ANSWER, 21, 22, 23, 24, 25]
    drafting.start("a", [1, 2], None, prediction=expected)
    draft = drafting.draft("a", 4)
    assert draft is not None and draft.tokens == ANSWER[:4] and draft.proposer == "prediction"
    drafting.extend("a", ANSWER[:2])
    assert tokens_of(drafting, "a", 3) == ANSWER[2:5]
    drafting.extend("a", [99])  # not as predicted
    assert tokens_of(drafting, "a") == []
    drafting.extend("a", ANSWER[3:7])
    assert tokens_of(drafting, "a") == [18, 21, 22, 23, 24, 25]
    drafting.extend("a", expected[7:])
    assert tokens_of(drafting, "a") == []


def test_a_prediction_is_of_one_request_alone():
    drafting = Drafting(SUFFIX)
    drafting.start("a", [1, 2], None, prediction=ANSWER)
    drafting.start("b", [1, 2], None)
    assert tokens_of(drafting, "a") and tokens_of(drafting, "b") == []


def test_continuations_of_a_request_see_each_other():
    drafting = Drafting(SUFFIX)
    for name in ("a0", "a1"):
        drafting.start(name, [1, 2, 3, 4], None, parent="a")
    drafting.start("b", [1, 2, 3, 4], None, parent="b")
    drafting.extend("a0", ANSWER)
    assert tokens_of(drafting, "a1") == ANSWER  # the prompt is the match
    drafting.extend("a1", ANSWER[:2])
    assert tokens_of(drafting, "a1") == ANSWER[2:]
    assert tokens_of(drafting, "b") == []
    drafting.end("a0", finished=False)
    assert tokens_of(drafting, "a1") == ANSWER[2:]
    drafting.start("a2", [1, 2, 3, 4], None, parent="a")
    assert tokens_of(drafting, "a2") == ANSWER
    for name in ("a1", "a2"):
        drafting.end(name, finished=False)
    drafting.start("a3", [1, 2, 3, 4], None, parent="a")
    assert tokens_of(drafting, "a3") == []
    assert set(drafting._families) == {"a", "b"}


def test_a_long_prompt_is_indexed_elsewhere_and_used_when_that_is_done(busy):
    drafting, release = busy
    prompt = [*range(100, 100 + INLINE_TOKENS), *ANSWER]
    drafting.start("a", prompt, None)
    drafting.extend("a", [110, 111])
    assert drafting.draft("a", 8) is None
    drafting.extend("a", [7, 8, 9, 7, 8])
    assert tokens_of(drafting, "a") == [9, 7, 8]  # from the output
    release()
    index = drafting._sequences["a"].family.prompt.result()
    assert index.ends([7], 9) == []  # of the prompt alone, whatever was said since
    drafting.extend("a", ANSWER[:4])
    assert tokens_of(drafting, "a", 4) == ANSWER[4:]


def test_a_long_prediction_is_followed_before_it_is_indexed(busy):
    drafting, release = busy
    expected = [*range(100, 100 + INLINE_TOKENS), *ANSWER]
    drafting.start("a", [1, 2], None, prediction=expected)
    assert tokens_of(drafting, "a", 2) == [100, 101]
    drafting.extend("a", ANSWER[:4])
    assert drafting.draft("a", 8) is None
    release()
    assert tokens_of(drafting, "a") == ANSWER[4:]


def test_what_ends_before_its_index_is_made_costs_none(busy):
    drafting, _ = busy
    drafting.start("a", range(10_000), None)
    prompt = drafting._sequences["a"].family.prompt
    drafting.end("a", finished=True)
    assert prompt.cancelled()


def test_a_long_output_is_indexed_in_slices():
    drafting = Drafting(SUFFIX)
    output = [*range(100, 100 + 3 * START_WORK), *ANSWER]
    finish(drafting, "a", output)
    drafting.start("b", ANSWER[:4], None)
    drafting.start("c", [], None)
    assert tokens_of(drafting, "b") == []
    for _ in range(3 * START_WORK // EXTEND_WORK):
        drafting.extend("c", [5])
    assert tokens_of(drafting, "b") == ANSWER[4:]


def test_what_the_drafts_of_a_sequence_are_worth_is_learned():
    drafting = Drafting(SUFFIX)
    for name in ("good", "bad"):
        drafting.start(name, ANSWER * 3, None)
        draft = drafting.draft(name, 8)
        assert draft is not None
        assert draft.survivals == pytest.approx([(16 / 18) ** n for n in range(1, 9)])
    for _ in range(30):
        for name, accepted in (("good", 8), ("bad", 0)):
            draft = drafting.draft(name, 8)
            assert draft is not None
            drafting.learn(name, draft, offered=8, accepted=accepted)
    good, bad = drafting.draft("good", 8), drafting.draft("bad", 8)
    assert good is not None and bad is not None
    assert drafting.record("good") > 1 > drafting.record("bad")
    assert good.survivals[0] > 2 * bad.survivals[0]


def test_the_source_that_was_right_is_taken():
    """Own text and corpus disagree; after some steps the better one is known."""
    drafting = Drafting(SUFFIX)
    finish(drafting, "old", [11, 12, 13, 14, 77, 78])
    drafting.start("a", [*ANSWER[:6], *ANSWER[:4]], None)
    draft = drafting.draft("a", 2)
    assert draft is not None and draft.tokens == [15, 16]
    for _ in range(12):
        drafting.learn("a", draft, offered=2, accepted=0)
    assert tokens_of(drafting, "a", 2) == [77, 78]


def test_drafts_made_elsewhere_are_rated_and_learned():
    drafting = Drafting(DraftOptions())
    drafting.start("a", ANSWER * 2, None)
    assert drafting.draft("a", 8) is None
    draft = drafting.rated("a", [5, 6], [0.5, 0.5], "model")
    assert draft.survivals == [0.5, 0.25] and draft.proposer == "model"
    for _ in range(50):
        drafting.learn("a", draft, offered=2, accepted=2)
    assert drafting.rated("a", [5, 6], [0.5, 0.5], "model").survivals[1] > 0.6
    drafting.end("a", finished=True)
    assert drafting.num_corpus_tokens == 0


def test_a_model_guesses_what_follows_the_tokens_that_it_has_seen():
    drafting = Drafting(DraftOptions(speculation="model", draft_model="directory"))
    drafting.start("a", ANSWER * 2, None)
    assert drafting.draft("a", 8) is None
    drafting.extend("a", [5], ModelGuess([6, 7, 8], [0.9, 0.5, 0.5]))
    draft = drafting.draft("a", 2)
    assert draft is not None and (draft.tokens, draft.proposer) == ([6, 7], "model")
    assert draft.survivals == pytest.approx([0.9, 0.45])
    drafting.extend("a", [6])
    assert drafting.draft("a", 8) is None, "the guess was of another place"


def test_a_hybrid_takes_the_draft_that_promises_most():
    drafting = Drafting(DraftOptions(speculation="hybrid", draft_model="directory"))
    drafting.start("a", [*ANSWER, *ANSWER[:3]], None)
    drafting.extend("a", ANSWER[3:4], ModelGuess([70, 71], [0.9, 0.1]))
    draft = drafting.draft("a", 8)
    assert draft is not None and draft.proposer == "suffix"
    for _ in range(50):
        drafting.learn("a", draft, offered=4, accepted=0)
    assert tokens_of(drafting, "a") == [70, 71]


def test_n_grams_keep_no_corpus():
    drafting = Drafting(DraftOptions(speculation="ngram"))
    finish(drafting, "a", ANSWER)
    drafting.start("b", [*ANSWER, 11, 12], None)
    draft = drafting.draft("b", 4)
    assert draft is not None and (draft.tokens, draft.proposer) == ([13, 14, 15, 16], "ngram")
    assert drafting.num_corpus_tokens == 0


@pytest.mark.parametrize("method", ["none", "ngram", "suffix", "model", "hybrid"])
@pytest.mark.parametrize("prompt", [[], [7], [7] * 50, [2**31 - 1, 0]])
def test_odd_input_is_no_error(method, prompt):
    drafting = Drafting(DraftOptions(speculation=method, suffix_corpus_tokens=5))
    for name in range(3):
        drafting.start(name, prompt, ("adapter", "salt"), prediction=prompt)
        drafting.draft(name, 8)
        drafting.extend(name, [])
        for most in (-1, 0, 1, 100):
            drafting.extend(name, [7])
            drafting.draft(name, most)
        drafting.end(name, finished=True)
    assert drafting.num_corpus_tokens <= 5


def test_names_are_checked():
    drafting = Drafting(SUFFIX)
    drafting.start("a", [], None)
    with pytest.raises(ValueError, match="called 'a' already"):
        drafting.start("a", [], None)
    for call in (drafting.draft, drafting.extend, drafting.end):
        with pytest.raises(KeyError):
            call("b", [])  # pyright: ignore


def test_the_same_calls_make_the_same_drafts():
    def traffic():
        rng, drafting, made = random.Random(7), Drafting(SUFFIX), []
        for name in range(30):
            drafting.start(name, rng.choices(range(5), k=20), name % 2)
            for _ in range(15):
                drafting.extend(name, rng.choices(range(5), k=rng.randint(1, 4)))
                draft = drafting.draft(name, 8)
                made.append(draft)
                if draft:
                    drafting.learn(name, draft, len(draft.tokens), rng.randint(0, 2))
            drafting.end(name, finished=rng.random() < 0.8)
        return made

    assert traffic() == traffic()

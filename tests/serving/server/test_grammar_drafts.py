"""Drafts inside a grammar: the masks of their rows, and outputs that no draft may change."""

from collections import Counter

import llguidance
import numpy as np
import pytest
from kit import EOS, VOCAB_SIZE, byte_tokenizer, make_engine

from serving.server.grammar import Grammars, GrammarState
from serving.server.grammar_source import GrammarSource
from shiftjax.core.lookahead import Lookahead
from shiftjax.core.request import Request, SamplingParams
from shiftjax.draft_options import DraftOptions
from shiftjax.drafts.drafting import Drafting
from shiftjax.drafts.prices import Prices
from shiftjax.drafts.speculation import Speculation

SCHEMA = """{"type": "object", "additionalProperties": false, "required": ["name", "sizes"],
    "properties": {"name": {"type": "string", "maxLength": 4},
                   "sizes": {"type": "array", "items": {"type": "integer"}, "maxItems": 3}}}"""
CASES = {  # a source, and a text that it allows
    "json": (GrammarSource("json", SCHEMA), '{"name": "ab", "sizes": [1, -20]}'),
    "regex": (GrammarSource("regex", "ab*c|[x-z]{2,9}"), "abbbbbc"),
    "repeated": (GrammarSource("regex", "[{]([a-z]+;)+[}]"), "{ab;c;defg;}"),
    "choice": (GrammarSource("choice", '["north", "northern", "south"]'), "northern"),
    "lark": (GrammarSource("grammar", 'start: "(" start? ")"'), "((()))"),
}
TOKENIZER = byte_tokenizer()
LONG = GrammarSource("json", '{"type": "array", "items": {"enum": [1, 22, 333]}, "minItems": 3000}')
NEVER = TOKENIZER.encode("\x00", False)[0]  # none of the grammars has a place for it


@pytest.fixture(scope="module")
def grammars():
    grammars = Grammars(TOKENIZER, VOCAB_SIZE, timeout=30.0)
    yield grammars
    grammars.close()


@pytest.fixture(params=CASES)
def case(request, grammars) -> tuple[GrammarState, list[int]]:
    """A state at the beginning, and the tokens of a text."""
    source, text = CASES[request.param]
    return grammars.prepare(source, 1)[0], TOKENIZER.encode(text, False)


def masks_one_by_one(state: GrammarState, tokens: list[int]) -> list[list[int]]:
    """The mask before each token and after the last, by plain decoding."""
    state = state.copy()
    masks = [state.mask.tolist()]
    for token in tokens:
        assert state.accept(token)
        masks.append(state.mask.tolist())
    return masks


def as_lists(masks: list[np.ndarray]) -> list[list[int]]:
    return [mask.tolist() for mask in masks]


def test_the_masks_of_a_draft_are_those_of_plain_decoding(case):
    state, tokens = case
    expected = masks_one_by_one(state, tokens)
    for start, token in enumerate(tokens):
        for most in (1, 3, len(tokens)):
            found = as_lists(state.masks_along(tokens[start:][:most]))
            assert found == expected[start:][: most + 1]
            assert state.mask.tolist() == state._compute().tolist() == expected[start]
        assert state.accept(token)
    assert state.mask.tolist() == expected[-1]


def test_a_draft_ends_where_it_breaks_the_grammar(case):
    state, tokens = case
    expected = masks_one_by_one(state, tokens)
    for place in range(len(tokens)):
        for wrong in (NEVER, VOCAB_SIZE - 2, VOCAB_SIZE + 40):  # <s>, padding
            broken = [*tokens[:place], wrong, *tokens[place:]]
            assert as_lists(state.masks_along(broken)) == expected[: place + 1]
    assert masks_one_by_one(state, tokens) == expected


@pytest.mark.parametrize("beyond", [[EOS], [EOS, EOS], [EOS, NEVER], [NEVER], [EOS] * 300])
def test_a_draft_beyond_the_end_of_a_grammar(case, beyond):
    """What comes after the end counts for nothing, and does no harm to what came before."""
    state, tokens = case
    expected = masks_one_by_one(state, tokens)
    for start, token in enumerate(tokens):
        masks = as_lists(state.masks_along([*tokens[start:], *beyond]))
        assert masks[: len(expected) - start] == expected[start:]
        assert all(mask == [0] * 8 + [2] for mask in masks[len(expected) - start :])
        assert state.accept(token)
    state.masks_along(beyond)
    assert state.mask.tolist() == state._compute().tolist() == expected[-1]


def test_forced_tokens_are_what_must_come(grammars):
    state = grammars.prepare(CASES["choice"][0], 1)[0]
    assert state.forced_tokens(9) == []
    assert state.accept(TOKENIZER.encode("n", False)[0])
    rest = TOKENIZER.encode("orth", False)
    assert state.forced_tokens(9) == rest
    assert state.forced_tokens(2) == rest[:2]
    assert len(state.masks_along(rest)) == 5
    for token in rest:
        assert state.accept(token)
    assert state.forced_tokens(9) == []  # it may end here, or go on
    for token in TOKENIZER.encode("ern", False):
        assert state.accept(token)
    assert state.is_stopped and state.forced_tokens(9) == []


def test_a_draft_that_meets_a_limit_of_the_parser_harms_nothing(grammars):
    """The number of ways to read x, xx, xxx ... grows; ys are no trouble."""
    grammar = llguidance.LLMatcher.grammar_from_lark('start: "a" y? s\ny: "y"+\ns: s s | "x"')
    limits = llguidance.LLParserLimits(step_max_items=40)
    matcher = llguidance.LLMatcher(grammars._open_tokenizer(), grammar, log_level=0, limits=limits)
    a, x, y = (TOKENIZER.encode(text, False)[0] for text in "axy")
    state = GrammarState(matcher, num_words=9)
    afterwards = masks_one_by_one(state, [a] + [y] * 4 + [x] * 2)[-1]
    for token in (a, y, y):
        assert state.accept(token)
    plain, expected = state.copy(), [state.mask.tolist()]
    while plain.accept(x):
        expected.append(plain.mask.tolist())
    assert 2 < len(expected) < 40, "the limit is not met"
    assert as_lists(state.masks_along([x] * 40)) == expected
    assert state.mask.tolist() == state._compute().tolist() == expected[0]
    assert as_lists(state.masks_along([x, x])) == expected[:1]  # to try costs as much again
    assert state.forced_tokens(4) == []
    assert all(state.accept(token) for token in (y, y, x, x))
    assert state.mask.tolist() == afterwards


# ---------------------------------------------------------------- through an engine


class Oracle(Drafting):
    """Knows what will be said, but for the token at `wrong_at` of every draft."""

    def __init__(self, output: list[int], wrong_at: int, shift: int):
        super().__init__(DraftOptions(fixed_drafts=True, draft_max_seqs=0))
        self.output, self.wrong_at, self.shift = output, wrong_at, shift

    def draft(self, name, most):
        guesses = self.output[name.num_output_tokens :][: min(most, 8)]
        if self.wrong_at < len(guesses):
            wrong = (guesses[self.wrong_at] + self.shift) % VOCAB_SIZE if self.shift else NEVER
            guesses[self.wrong_at] = wrong
        return self.rated(name, guesses, [0.5] * len(guesses), "oracle") if guesses else None


def generate(states, speculation=None, check=True, **sampling):
    """(tokens, why it ended, number of steps) of one constrained request."""
    engine = make_engine(num_blocks=1200, max_model_len=4400, check=check)
    scheduler = engine.lanes[0].scheduler
    scheduler.lookahead = speculation or Lookahead()
    parameters = SamplingParams(seed=3, **sampling)
    engine.add_request(Request("a", [1, 2], parameters, constraints=tuple(states)))
    tokens, reason = [], None
    while engine.has_work():
        for event in engine.step(0.0):
            tokens += event.token_ids
            reason = event.finish_reason
    assert engine.stats().num_failed_steps == 0
    engine.check()
    return tokens, reason, len(engine.lanes[0].runner.modes)


def oracle(output: list[int], wrong_at: int = 99, shift: int = 0) -> Speculation:
    return Speculation(Oracle(output, wrong_at, shift), Prices((128,)), max_rows=16)


@pytest.mark.parametrize("kind", CASES)
def test_drafts_do_not_change_what_a_grammar_gives(grammars, kind):
    """Right ones, ones that the grammar refuses, and ones that it would allow."""
    source = CASES[kind][0]
    plain = generate(grammars.prepare(source, 1), max_tokens=60)
    for wrong_at in (*range(5), 99):
        for shift in (0, 1, 2):
            speculation = oracle(plain[0], wrong_at, shift)
            drafted = generate(grammars.prepare(source, 1), speculation, max_tokens=60)
            assert drafted[:2] == plain[:2]
            tokens = speculation.stats.tokens
            assert tokens["grammar", "rejected"] == 0
            if wrong_at == 99 and len(plain[0]) > 3:
                assert drafted[2] < plain[2]
                assert tokens["oracle", "rejected"] == 0 < tokens.total()


class Counted:
    """A matcher whose calls are counted, weighted with the tokens that they are about."""

    def __init__(self, matcher, counts: Counter[str]):
        self._matcher, self._counts = matcher, counts

    def __getattr__(self, name):
        function = getattr(self._matcher, name)

        def counted(*args):
            size = args[0] if name == "rollback" else 1
            self._counts[name] += size
            return function(*args)

        return counted


def test_a_long_structured_output_takes_linear_work(grammars):
    """A matcher that is copied, or rolled back and replayed, at every step would take quadratic."""
    length = 4000
    plain, reason, _ = generate(grammars.prepare(LONG, 1), check=False, max_tokens=length)
    assert (len(plain), reason) == (length, "length")
    work = []
    for most in (length // 2, length):
        (state,) = grammars.prepare(LONG, 1)
        counts: Counter[str] = Counter()
        state._matcher = Counted(state._matcher, counts)
        speculation = oracle(plain, wrong_at=6, shift=1)
        tokens, _, steps = generate([state], speculation, check=False, max_tokens=most)
        assert tokens == plain[:most] and steps < most / 3
        assert set(counts) == {
            *("consume_token", "compute_bitmask", "rollback", "compute_ff_tokens"),
            *("is_error", "is_stopped"),
        }
        work.append(counts.total() / most)
    assert max(work) < 16
    assert work[1] < 1.05 * work[0]

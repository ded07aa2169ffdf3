"""The loop that embeds: every text comes out once, whatever breaks; rows are full, none starves."""

import random

import numpy as np
import pytest
from embed_kit import SumRunner, embedding_of
from hypothesis import given, settings
from hypothesis import strategies as st

from shiftjax.embed.embed_engine import EmbedEngine, EmbedShape, Text


def texts_of(sizes: list[int]) -> list[Text]:
    return [Text(key, [key + 1] * size) for key, size in enumerate(sizes)]


def run(engine: EmbedEngine) -> dict:
    """Everything that comes out, by key; twice is an error."""
    found: dict = {}
    turns = 0
    while engine.has_work():
        for result in engine.step(0.0):
            assert result.key not in found, "a text came out twice"
            assert (result.embedding is None) != (result.error is None)
            found[result.key] = result
        turns += 1
        assert turns < 10_000
    assert engine.stats[-2:] == (0, 0)
    return found


def fill(engine: EmbedEngine) -> float:
    stats = engine.stats
    return stats.num_tokens / stats.num_computed_tokens


def test_every_text_gets_its_own_embedding_and_two_steps_are_in_flight():
    sizes = random.Random(1).choices(range(1, 33), k=500)
    engine = EmbedEngine(SumRunner())
    texts = texts_of(sizes)
    for text in texts:
        engine.add(text)
    found = run(engine)
    assert len(found) == 500
    for text in texts:
        assert np.array_equal(found[text.key].embedding, embedding_of(text.token_ids))
    assert engine.runner.most_in_flight == 2
    assert fill(engine) > 0.85


def test_nothing_waits_for_company_and_what_comes_meanwhile_makes_the_next_step():
    engine = EmbedEngine(SumRunner())
    engine.add(Text("alone", [1, 2]))
    assert [result.key for result in engine.step(0.0)] == ["alone"]
    for text in texts_of([4] * 8):
        engine.add(text)
    engine.step(0.0)
    assert [len(plan.texts) for plan in engine.runner.plans] == [1, 8]


def test_short_texts_lie_in_short_rows_where_that_is_less_work():
    """One text of 3 tokens is 16 tokens of work, not 32; three of 10 are 32, not 4 rows of 16."""
    for sizes, width, rows in (([3], 16, 1), ([10, 10, 10], 32, 1), ([16, 16, 16], 16, 3)):
        engine = EmbedEngine(SumRunner())
        for text in texts_of(sizes):
            engine.add(text)
        engine.step(0.0)
        (plan,) = engine.runner.plans
        assert (plan.width, len(plan.rows)) == (width, rows), sizes


def test_the_oldest_text_cannot_starve():
    """A short text among long ones, of which there are always enough to fill a step."""
    engine = EmbedEngine(SumRunner())
    engine.add(Text("short", [1]))
    for text in texts_of([32] * 50):
        engine.add(text)
    assert "short" in {text.key for text in _first_plan(engine).texts}


def test_a_lower_priority_runs_earlier():
    engine = EmbedEngine(SumRunner())
    for text in texts_of([32] * 8):
        engine.add(text)
    engine.add(Text("urgent", [1] * 32, priority=-1))
    assert "urgent" in {text.key for text in _first_plan(engine).texts}


def _first_plan(engine: EmbedEngine):
    engine.step(0.0)
    return engine.runner.plans[0]


def test_what_is_cancelled_never_comes_out_and_its_key_is_free():
    engine = EmbedEngine(SumRunner())
    for text in texts_of([16] * 40):
        engine.add(text)
    found = {result.key for result in engine.step(0.0)}  # a second step is in flight now
    gone = [key for key in range(40) if key not in found and key % 2]
    for key in gone:
        engine.cancel(key)
    again = Text(gone[-1], [7])
    engine.add(again)
    rest = run(engine)
    assert set(rest) == set(range(40)) - found - set(gone) | {again.key}
    assert rest[again.key].embedding.tolist() == [1, 7, 7]


@pytest.mark.parametrize("where", ["run", "fetch"])
def test_a_step_that_raises_is_tried_once_with_half_the_rows_and_then_its_texts_fail_alone(where):
    """The step fails as long as text 0 is in it."""
    runner = SumRunner(breaks=lambda plan: where if _has(plan, 0) else None)
    engine = EmbedEngine(runner)
    for text in texts_of([16] * 8):
        engine.add(text)
    found = run(engine)
    assert set(found) == set(range(8))
    failed = {key for key, result in found.items() if result.error is not None}
    sizes = [len(plan.rows) for plan in runner.plans if _has(plan, 0)]
    assert sizes == [4, 2]
    assert len(failed) == 2
    assert 0 in failed
    assert engine.stats.num_failed_steps == 2


def _has(plan, key) -> bool:
    return any(text.key == key for text in plan.texts)


def test_numbers_that_are_not_finite_are_computed_again_in_a_row_of_their_own():
    """A neighbour in the row may have made them; a text that does it alone fails."""
    runner = SumRunner(breaks=lambda plan: "nan" if plan.texts[0].key == 0 else None)
    engine = EmbedEngine(runner)
    for text in texts_of([4, 4, 4]):
        engine.add(text)
    found = run(engine)
    assert "not finite" in found[0].error
    assert [found[key].error for key in (1, 2)] == [None, None]
    runner = SumRunner(breaks=lambda plan: "nan" if len(plan.texts) > 1 else None)
    engine = EmbedEngine(runner)
    for text in texts_of([4, 4, 4]):
        engine.add(text)
    assert not [result.error for result in run(engine).values() if result.error]


def test_texts_that_no_row_holds_and_keys_in_use_are_refused():
    engine = EmbedEngine(SumRunner())
    for ids in ([], [1] * 33):
        with pytest.raises(ValueError, match="1 to 32 tokens"):
            engine.add(Text("a", ids))
    engine.add(Text("a", [1]))
    with pytest.raises(ValueError, match="in use"):
        engine.add(Text("a", [1]))


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_with_random_arrivals_cancels_and_faults_each_text_comes_out_once_or_was_cancelled(data):
    faults = data.draw(st.lists(st.sampled_from([None, None, None, "run", "fetch", "nan"])))
    pending = iter(faults)
    widths = data.draw(st.sampled_from([((16, 32), ((1, 2, 4), (1, 2))), ((8,), ((2,),))]))
    shape = EmbedShape(*widths, max_texts=data.draw(st.integers(1, 20)), hidden_size=64)
    engine = EmbedEngine(SumRunner(shape, lambda plan: next(pending, None)))
    sizes = data.draw(st.lists(st.integers(1, shape.widths[-1]), max_size=60))
    waiting, found, cancelled = texts_of(sizes), {}, set()
    while waiting or engine.has_work():
        for _ in range(data.draw(st.integers(0, 20))):
            if waiting:
                engine.add(waiting.pop())
        if data.draw(st.booleans()) and sizes:
            key = data.draw(st.integers(0, len(sizes) - 1))
            if key not in found and all(text.key != key for text in waiting):
                engine.cancel(key)
                cancelled.add(key)
        for result in engine.step(0.0):
            assert result.key not in found
            assert result.key not in cancelled
            found[result.key] = result
            if result.embedding is not None:
                text_ids = [result.key + 1] * sizes[result.key]
                assert np.array_equal(result.embedding, embedding_of(text_ids))
    assert set(found) | cancelled == set(range(len(sizes)))

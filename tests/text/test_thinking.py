"""Budgets of thinking, against a search of the text; drafts change nothing."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shiftjax.text.byte_tokenizer import byte_backend
from shiftjax.text.thinking import MARKS, ThinkingBudget, begins_inside, marks_of
from shiftjax.text.token_rules import allows
from shiftjax.text.tokenizer import Tokenizer

TOKENIZER = Tokenizer(byte_backend())
VOCAB = TOKENIZER.vocab_size
THINK, HARMONY = MARKS["think"], MARKS["openai_gptoss"]
ANALYSIS, FINAL = HARMONY.begin, "<|start|>assistant<|channel|>final<|message|>"


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text, False)


def rule_of(budget: int, marks=THINK, inside=False) -> ThinkingBudget:
    return ThinkingBudget(marks, budget, TOKENIZER, VOCAB, inside)


def said(rule: ThinkingBudget, text: str, most: int = 200) -> str:
    """What comes of a model that wants to say `text`, and says it on where it was cut off."""
    wanted, output = ids(text), []
    while wanted and len(output) < most:
        token = wanted.pop(0) if allows(rule.mask, wanted[0]) else rule.forced_tokens(1)[0]
        assert allows(rule.mask, token) and rule.accept(token)
        output.append(token)
    return TOKENIZER.decode(output)


@pytest.mark.parametrize("budget", [0, 1, 3, 7])
def test_the_end_is_forced_behind_the_budget(budget):
    expected = "abcdefg"[:budget] + THINK.forced + "abcdefg"[budget:] + " more"
    assert said(rule_of(budget, inside=True), "abcdefg more") == expected
    assert said(rule_of(budget), "<think>abcdefg more") == "<think>" + expected
    assert said(rule_of(budget), "\n\n<think>abcdefg more") == "\n\n<think>" + expected


@pytest.mark.parametrize(
    "text",
    ["abc</think>answer</think> that is long", "</think>", "abcde</think>x<think>" + 99 * "y"],
)
def test_who_ends_in_time_is_free(text):
    budget = text.index("</think>") + len("</think>")
    assert said(rule_of(budget, inside=True), text) == text
    assert said(rule_of(budget), f"<think>{text}") == f"<think>{text}"


@pytest.mark.parametrize("text", ["plain, and <think>no thought", "<thin", "a<think>"])
def test_what_is_no_thought_is_free(text):
    text = text + "x" * 50
    assert said(rule_of(2), text) == text


def test_harmony_thinks_in_several_messages():
    text = f"{ANALYSIS}ab<|end|><|start|>assistant{ANALYSIS}cd<|end|>{FINAL}said"
    assert said(rule_of(18, HARMONY), text, 999) == text
    expected = text.replace("cd", f"c{HARMONY.forced}d")
    assert said(rule_of(10, HARMONY), text, 999).startswith(expected[: expected.index("d")])


def test_harmony_may_not_turn_back_to_thinking():
    rule = rule_of(0, HARMONY)
    for token in ids(ANALYSIS) + ids(HARMONY.forced):
        assert rule.accept(token)
    assert not allows(rule.mask, ids("analysis")[0])
    assert allows(rule.mask, ids("final")[0]) and allows(rule.mask, ids("commentary")[0])
    assert rule.accept(ids("final")[0])
    assert allows(rule.mask, ids("analysis")[0])


@given(
    st.lists(
        st.sampled_from(["<think>", "</think>", "a", "<", "\n", ANALYSIS, "<|end|>"]), max_size=6
    ),
    st.lists(st.sampled_from(["</think>", "b", "<", "th", "<|end|>", THINK.forced]), max_size=4),
    st.integers(0, 12),
    st.sampled_from([THINK, HARMONY]),
    st.booleans(),
)
def test_a_draft_is_followed_as_its_tokens_are(before, draft, budget, marks, inside):
    rule, plain = rule_of(budget, marks, inside), rule_of(budget, marks, inside)
    for token in ids("".join(before)):
        for each in (rule, plain):
            forced = each.forced_tokens(1)
            each.accept(forced[0] if forced else token)
    expected, tokens = [plain.mask.tolist()], ids("".join(draft))
    for token in tokens:
        if not allows(plain.mask, token):
            break
        plain.accept(token)
        expected.append(plain.mask.tolist())
    for _ in range(2):  # the first time has changed nothing
        assert [mask.tolist() for mask in rule.masks_along(tokens)] == expected
    forced = rule.forced_tokens(99)
    assert len(rule.masks_along(forced)) == len(forced) + 1


def test_marks_of_templates():
    assert marks_of("...{{ '<|channel|>final<|message|>' }}") is HARMONY
    assert marks_of("{% if '</think>' in content %}") is THINK
    assert marks_of("{{ messages }}") is marks_of(None) is None
    assert begins_inside(ids("user: hi<think>\n"), TOKENIZER, THINK)
    assert not begins_inside(ids("user: hi<think></think>"), TOKENIZER, THINK)

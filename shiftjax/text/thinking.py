"""How much a model may think before it answers: behind a budget the end is forced. No JAX."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from shiftjax.text.token_rules import Mask, TokenRule, all_allowed, only, without
from shiftjax.text.tokenizer import Tokenizer

TAIL = 8  # tokens of a prompt in which it may begin the reasoning of its output

Phase = Literal["before", "inside", "forced", "turning", "after"]


@dataclass(frozen=True)
class ThinkingMarks:
    """How a model's thoughts are written.

    `forced` is what ends them when the budget is spent. `not_next` may not follow it: the model
    would think on. `again`: further thoughts may follow the first ones; they share a budget.
    `label`: what stands behind `begin` and is no thought. `is_first`: an output begins with
    thoughts, without a mark, unless its prompt has ended them.
    """

    begin: str
    end: str
    forced: str
    not_next: str = ""
    again: bool = False
    label: str = ""
    is_first: bool = False


# By the names of reasoning parsers. The first whose end is in a chat template is the model's.
MARKS = {
    "seed_oss": ThinkingMarks("<seed:think>", "</seed:think>", "\n</seed:think>\n\n"),
    "mistral": ThinkingMarks("[THINK]", "[/THINK]", "[/THINK]"),
    "gemma4": ThinkingMarks("<|channel>", "<channel|>", "\n<channel|>", label="thought\n"),
    "kimi": ThinkingMarks("◁think▷", "◁/think▷", "\n◁/think▷"),
    "think": ThinkingMarks("<think>", "</think>", "\n</think>\n\n"),
    "deepseek_r1": ThinkingMarks("<think>", "</think>", "\n</think>\n\n", is_first=True),
    "openai_gptoss": ThinkingMarks(
        "<|channel|>analysis<|message|>",
        "<|end|>",
        "<|end|><|start|>assistant<|channel|>",
        not_next="analysis",
        again=True,
    ),
}


def name_of_marks(template: str | None) -> str | None:
    """The name of the marks that a chat template shows; None: it shows none."""
    if template is None:
        return None
    if "<|channel|>" in template and "<|message|>" in template:
        return "openai_gptoss"
    rows = ((name, marks) for name, marks in MARKS.items() if not marks.again)
    return next((name for name, marks in rows if marks.end in template), None)


def marks_of(template: str | None) -> ThinkingMarks | None:
    """The marks that a chat template shows; None: it shows none."""
    name = name_of_marks(template)
    return None if name is None else MARKS[name]


def begins_inside(prompt: Sequence[int], tokenizer: Tokenizer, marks: ThinkingMarks) -> bool:
    """Whether a prompt ends where thoughts begin."""
    tail = tokenizer.decode(prompt[-TAIL:], skip_special_tokens=False).rstrip()
    return tail.endswith(marks.begin) or (marks.is_first and not tail.endswith(marks.end))


class Place(NamedTuple):
    """Where an output is: how much has been thought, and the text that may hold half a mark."""

    phase: Phase
    num_thought: int = 0
    tail: bytes = b""
    num_forced: int = 0


class ThinkingBudget(TokenRule[Place]):
    """At most `budget` tokens between the marks of thinking; then the end comes, token by token.

    What a model says without thinking is free.
    """

    def __init__(
        self, marks: ThinkingMarks, budget: int, tokenizer: Tokenizer, vocab_size: int, inside: bool
    ):
        def ids(text: str) -> list[int]:
            return tokenizer.encode(text, add_special_tokens=False)

        assert tokenizer.token_bytes is not None, "no text can be made token by token"
        self._budget, self._again, self._pieces = budget, marks.again, tokenizer.token_bytes
        self._begin, self._end = marks.begin.encode(), marks.end.encode()
        self._forced = [token for token in ids(marks.forced) if token < vocab_size]
        self._all = all_allowed(vocab_size)
        self._turning = without(self._all, ids(marks.not_next)[:1] if marks.not_next else [])
        self._only = [only(token, vocab_size) for token in self._forced]
        super().__init__(self._begun(0, b"") if inside else Place("before"))

    def _mask_of(self, state: Place) -> Mask:
        if state.phase == "forced":
            return self._only[state.num_forced]
        return self._turning if state.phase == "turning" else self._all

    def _after(self, state: Place, token: int) -> Place:
        match state.phase:
            case "before":
                return self._looking(state, state.tail + self._pieces.piece(token))
            case "inside":
                return self._thinking(state, state.tail + self._pieces.piece(token))
            case "forced" if state.num_forced + 1 < len(self._forced):
                return state._replace(num_forced=state.num_forced + 1)
            case "forced":
                return Place("turning", state.num_thought)
            case _:
                return self._ended(state.num_thought)

    def _looking(self, state: Place, text: bytes) -> Place:
        """Behind text that is no thought; one that has to begin an output may not come later."""
        found = text.find(self._begin)
        if found >= 0:
            return self._begun(state.num_thought, text[found + len(self._begin) :])
        if not self._again and not self._begin.startswith(text.strip()):
            return Place("after", state.num_thought)
        return state._replace(tail=text[-len(self._begin) :])

    def _thinking(self, state: Place, text: bytes) -> Place:
        num_thought = state.num_thought + 1
        if self._end in text:
            return self._ended(num_thought)
        return self._begun(num_thought, text[-len(self._end) :])

    def _begun(self, num_thought: int, text: bytes) -> Place:
        if num_thought >= self._budget and self._forced:
            return Place("forced", num_thought)
        return Place("inside", num_thought, text)

    def _ended(self, num_thought: int) -> Place:
        return Place("before" if self._again else "after", num_thought)

    def forced_tokens(self, most: int) -> list[int]:
        """The tokens that end the thoughts, if they come next."""
        state = self._state
        return self._forced[state.num_forced :][:most] if state.phase == "forced" else []

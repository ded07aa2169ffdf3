"""The rules that the sampling parameters of a request set for the texts of its output. No JAX."""

from collections.abc import Sequence

from shiftjax.core.request import TokenConstraint
from shiftjax.core.sampling_params import SamplingParams
from shiftjax.text.thinking import ThinkingBudget, ThinkingMarks, begins_inside
from shiftjax.text.token_rules import BannedWords, word_ids
from shiftjax.text.tokenizer import Tokenizer


def rules_of(
    sampling: SamplingParams,
    tokenizer: Tokenizer | None,
    vocab_size: int,
    prompt: Sequence[int],
    marks: ThinkingMarks | None,
) -> list[TokenConstraint]:
    """The rules of one continuation of a prompt; without a tokenizer none.

    The engine then refuses bad words. `marks`: of thoughts; None: a budget has nothing to bound.
    """
    if tokenizer is None:
        return []
    rules: list[TokenConstraint] = []
    if sampling.thinking_token_budget is not None and marks is not None:
        inside = begins_inside(prompt, tokenizer, marks)
        budget = sampling.thinking_token_budget
        rules.append(ThinkingBudget(marks, budget, tokenizer, vocab_size, inside))
    if sampling.bad_words:
        rules.append(BannedWords(word_ids(sampling.bad_words, tokenizer), vocab_size))
    return rules

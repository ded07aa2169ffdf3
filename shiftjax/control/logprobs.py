"""Log-probabilities from the rows of a step to the requests that asked for them. No JAX."""

from shiftjax.control.request import (
    ScheduledSequence,
    StepOutput,
    StepPlan,
    TokenLogprobs,
)


def check_output(plan: StepPlan, output: StepOutput) -> None:
    """Refuse an output that does not fit its plan before anything is committed."""
    if not len(output.token_ids) == len(output.is_finite) == plan.num_rows:
        raise ValueError(
            f"The plan has {plan.num_rows} rows, the runner returned {len(output.token_ids)} "
            f"tokens and {len(output.is_finite)} flags."
        )
    if output.logprobs is None or output.top_ids is None or output.top_logprobs is None:
        asking = (item for item in plan.scheduled if _asks(item))  # few; this runs every step
        most = max(map(num_top, asking), default=-1)
        if most > 0 or (most == 0 and output.logprobs is None):
            raise ValueError("The runner returned no log-probabilities, the plan asks for them.")


def _asks(item: ScheduledSequence) -> bool:
    sampling = item.sequence.request.sampling
    return sampling.logprobs is not None or sampling.prompt_logprobs is not None


def num_top(item: ScheduledSequence) -> int:
    """How many of the most likely tokens the rows of an item want; 0: their own alone; -1: nothing.

    Rows whose next token is given are there for the log-probabilities of the prompt, the row that
    samples for those of the output; an item may have either, or both.
    """
    sampling, end = item.sequence.request.sampling, item.start + item.num_tokens
    num_given = len(item.sequence.token_ids[end - item.num_rows + 1 : end + 1])
    of_prompt = sampling.prompt_logprobs if num_given else None
    of_output = sampling.logprobs if num_given < item.num_rows else None
    return max(-1 if number is None else number for number in (of_prompt, of_output))


def token_logprobs(output: StepOutput, row: int, most: int) -> TokenLogprobs:
    """The entry of one row with `most` of the likeliest tokens; `output` has been checked."""
    assert output.logprobs is not None
    top_ids, top_logprobs = output.top_ids, output.top_logprobs
    return TokenLogprobs(
        int(output.token_ids[row]),
        float(output.logprobs[row]),
        top_ids[row, :most].tolist() if top_ids is not None else [],
        top_logprobs[row, :most].tolist() if top_logprobs is not None else [],
    )


def collect_prompt_logprobs(item: ScheduledSequence, output: StepOutput, last_row: int) -> None:
    """Row of position p tells about prompt token p + 1; rows seen before a preemption are known."""
    sequence = item.sequence
    collected, most = sequence.prompt_logprobs, sequence.request.sampling.prompt_logprobs
    assert collected is not None and most is not None
    end = min(item.start + item.num_tokens, sequence.num_prompt_tokens - 1)
    for position in range(len(collected) - 1, end):
        row = last_row - (item.start + item.num_tokens - 1 - position)
        collected.append(token_logprobs(output, row, most))

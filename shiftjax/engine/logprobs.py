"""Log-probabilities from the rows of a step to the requests that asked for them. No JAX."""

from shiftjax.engine.request import (
    ScheduledSequence,
    Sequence,
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
        asking = (item.sequence for item in plan.scheduled if item.num_rows)
        num_top = max(map(_num_top, asking), default=-1)
        if num_top > 0 or (num_top == 0 and output.logprobs is None):
            raise ValueError("The runner returned no log-probabilities, the plan asks for them.")


def _num_top(sequence: Sequence) -> int:
    """How many of the most likely tokens a sequence wants; 0: its own token alone; -1: nothing."""
    sampling = sequence.request.sampling
    wanted = sampling.logprobs, sampling.prompt_logprobs
    return max(-1 if number is None else number for number in wanted)


def token_logprobs(output: StepOutput, row: int, num_top: int) -> TokenLogprobs:
    """The entry of one row with the `num_top` most likely tokens; `output` has been checked."""
    assert output.logprobs is not None
    top_ids, top_logprobs = output.top_ids, output.top_logprobs
    return TokenLogprobs(
        int(output.token_ids[row]),
        float(output.logprobs[row]),
        top_ids[row, :num_top].tolist() if top_ids is not None else [],
        top_logprobs[row, :num_top].tolist() if top_logprobs is not None else [],
    )


def collect_prompt_logprobs(item: ScheduledSequence, output: StepOutput, last_row: int) -> None:
    """Row of position p tells about prompt token p + 1; rows seen before a preemption are known."""
    sequence = item.sequence
    collected, num_top = sequence.prompt_logprobs, sequence.request.sampling.prompt_logprobs
    assert collected is not None and num_top is not None
    end = min(item.start + item.num_tokens, sequence.num_prompt_tokens - 1)
    for position in range(len(collected) - 1, end):
        row = last_row - (item.start + item.num_tokens - 1 - position)
        collected.append(token_logprobs(output, row, num_top))

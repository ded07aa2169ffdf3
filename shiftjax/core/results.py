"""What the rows of a step mean for the sequences that they belong to. No JAX."""

import logging

from shiftjax.core.request import (
    Event,
    FinishReason,
    Request,
    RequestMetrics,
    ScheduledSequence,
    SequenceState,
    StepOutput,
    StepPlan,
    TokenConstraint,
    TokenLogprobs,
)

DEAD_END = "The output cannot be continued within the structure that this request asks for."
logger = logging.getLogger(__name__)


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


def num_accepted(item: ScheduledSequence, sampled: list[int]) -> int:
    """How many proposed tokens the step samples itself; `sampled` are those of the item's rows.

    What is kept is what plain decoding would have sampled, at any temperature: one that is no
    distribution of its own is accepted just as often by rejection sampling (Leviathan et al. 2023).
    """
    proposed_ids = item.proposed_ids
    for number, (guess, token) in enumerate(zip(proposed_ids, sampled, strict=False)):
        if guess != token:
            return number
    return len(proposed_ids)


def append_tokens(
    sequence: SequenceState, sampled: list[int], output: StepOutput, first_row: int, now: float
) -> tuple[Event, FinishReason | None]:
    """Enter what rows sampled, from `first_row` on, up to a token that ends the sequence.

    Returns its event, and why it ends if it does.
    """
    token_ids, sampling = sequence.token_ids, sequence.request.sampling
    event = Event(sequence.request.request_id, sequence.index)
    sequence.num_pending_tokens -= 1
    if sequence.first_token_seconds is None:
        sequence.first_token_seconds = now
        event.prompt_logprobs = sequence.prompt_logprobs
    if len(token_ids) == sequence.max_length:  # max_tokens 0: the prompt was all
        return event, "length"
    sequence.last_token_seconds = now
    num_before, reason = len(token_ids), None
    for token in sampled:
        token_ids.append(token)
        reason = _end_at(sequence, token, event)
        if reason is not None:
            break
    event.token_ids = tuple(token_ids[num_before:])
    if sampling.logprobs is not None:
        rows = range(first_row, first_row + len(event.token_ids))
        event.logprobs = tuple(token_logprobs(output, row, sampling.logprobs) for row in rows)
    return event, reason


def _end_at(sequence: SequenceState, token: int, event: Event) -> FinishReason | None:
    """Why a sequence ends with this token, its last; None: it goes on."""
    min_tokens = sequence.request.sampling.min_tokens
    if token in sequence.stop_ids and sequence.num_output_tokens > min_tokens:
        event.stop_token_id = token
        return "stop"
    if len(sequence.token_ids) >= sequence.max_length:
        return "length"
    if sequence.constraint is not None and not _accepts(sequence.constraint, token):
        event.error, event.error_code = DEAD_END, "constraint_failed"
        return "error"
    return None


def _accepts(constraint: TokenConstraint, token: int) -> bool:
    """Whether the output can go on; what a constraint raises ends its own request only."""
    try:
        return constraint.accept(token)
    except Exception:
        logger.exception("A constraint failed.")
        return False


def ended_in_queue(request: Request, reason: FinishReason = "abort") -> list[Event]:
    """The last events of a request that no group has seen."""
    nothing = RequestMetrics(
        queue_seconds=None,
        ttft_seconds=None,
        tpot_seconds=None,
        num_prompt_tokens=len(request.prompt_token_ids),
        num_output_tokens=0,
        num_cached_tokens=0,
        num_preemptions=0,
        steps_by_mode={},
    )
    last = request.sampling.n - 1
    return [
        Event(
            request.request_id,
            index,
            finish_reason=reason,
            metrics=nothing,
            is_last=index == last,
        )
        for index in range(request.sampling.n)
    ]

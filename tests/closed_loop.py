"""Steps through a pipeline by hand: an independent replay, to hold predictions and engines to."""

from collections.abc import Sequence


def ends_of_steps(
    stages: Sequence[float], host: float, in_flight: int, num_steps: int, num_batches: int = 0
) -> list[float]:
    """When equal steps end of which at most `in_flight` are between the host and the results.

    The host prepares one after the other, each in `host` seconds, and `stages` take one at a time.
    With `num_batches` micro-batches, which take turns, a step also needs the tokens that the step
    before of its micro-batch has sampled in the last stage.
    """
    prepared, idle_at, ends = 0.0, [0.0] * len(stages), []
    for number in range(num_steps):
        committed = ends[number - in_flight] if number >= in_flight else 0.0
        prepared = max(prepared, committed) + host
        there = prepared
        if num_batches and number >= num_batches:
            there = max(there, ends[number - num_batches])
        for stage, seconds in enumerate(stages):
            there = idle_at[stage] = max(there, idle_at[stage]) + seconds
        ends.append(there)
    return ends


def interval(ends: Sequence[float], period: int) -> float:
    """Seconds between two ends in the steady state; steps repeat after `period` of them."""
    num_periods = len(ends) // (2 * period)
    return (ends[-1] - ends[-1 - num_periods * period]) / (num_periods * period)

"""Why a replay refused requests, in words. No JAX."""

from collections.abc import Sequence

from shiftjax.sim.modelled import Target, sized_of
from shiftjax.sim.replay import Replay
from shiftjax.sim.trace import TraceRequest


def refused_in_words(run: Replay, target: Target, requests: Sequence[TraceRequest]) -> str:
    """How many had no room, and how long a request may be; "" where all were answered."""
    if not run.num_refused:
        return ""
    limits = sized_of(target, run.deployment).limits
    most = limits.max_length(0, None)
    longest = max(r.num_prompt_tokens + r.num_output_tokens for r in requests)
    why = "the model takes" if most == limits.max_model_len else "its KV cache holds"
    return (
        f"{run.deployment.name} refused {run.num_refused:,} of {len(requests):,} requests: "
        f"{why} {most:,} tokens of one, and the longest has {longest:,}"
    )

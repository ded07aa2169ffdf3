"""What one request went through: how long it waited and computed, in which modes. No JAX."""

from typing import Any

from serving.server.handle import RequestHandle


def asked_timeline(handle: RequestHandle, is_asked: bool | None) -> dict[str, Any]:
    """The field `timeline` of an answer, if it was asked for."""
    return {"timeline": timeline_of(handle)} if is_asked else {}


def timeline_of(handle: RequestHandle) -> dict[str, Any]:
    """The first continuation of a request that has ended, as plain values.

    `queue_seconds` from arrival to the first step, `prefill_seconds` from there to the first
    token, `decode_seconds` from there to the last; None: it never got so far. `modes` are runs of
    output tokens that steps of one mode sampled, as [mode, tokens] in their order; `steps` count
    those of the prompt, too.
    """
    output, modes = handle.output.outputs[0], handle.modes or []
    metrics = output.metrics
    assert metrics is not None  # it has ended
    queue, ttft = metrics.queue_seconds, metrics.ttft_seconds
    per_token, num_later = metrics.tpot_seconds or 0.0, max(0, metrics.num_output_tokens - 1)
    tokens: dict[str, int] = {}
    for mode, number in modes:
        tokens[mode] = tokens.get(mode, 0) + number
    return {
        "queue_seconds": queue,
        "prefill_seconds": None if ttft is None or queue is None else ttft - queue,
        "decode_seconds": None if ttft is None else per_token * num_later,
        "prompt_tokens": metrics.num_prompt_tokens,
        "cached_tokens": metrics.num_cached_tokens,
        "output_tokens": len(output.token_ids),
        "modes": modes,
        "tokens": tokens,
        "steps": metrics.steps_by_mode,
        "preemptions": metrics.num_preemptions,
        "draft_tokens": metrics.num_proposed_tokens,
        "accepted_draft_tokens": metrics.num_accepted_tokens,
    }

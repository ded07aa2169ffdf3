"""Which experts tokens chose, as vLLM's answers tell it: who is told, and how. No JAX."""

import base64
import io
from typing import Any

import numpy as np

from serving.server.errors import invalid
from serving.server.fields import GenerationFields
from serving.server.handle import Delta
from serving.server.schema import Wish
from shiftjax.core.limits import RequestLimits
from shiftjax.outputs import CompletionOutput

ASKED, START = "return_routed_experts", "routed_experts_prompt_start"


def wants_experts(wish: Wish, num_prompt: int, limits: RequestLimits) -> bool:
    """Whether an answer to so many prompt tokens shall tell them. Raises `ServeError`.

    Who names a first token asks, too.
    """
    fields = wish.fields
    asked, start = fields.return_routed_experts, fields.routed_experts_prompt_start
    if start is not None and not 0 <= start < num_prompt:
        raise invalid(START, f"must be from 0 to {num_prompt - 1}, a token of the prompt")
    is_asked = asked or (asked is None and bool(start))
    if is_asked and not limits.keeps_notes:
        words = "needs a server that is started with --enable-return-routed-experts"
        raise invalid(ASKED if asked else START, words)
    if is_asked and fields.stream and not wish.tells_experts:
        raise invalid(ASKED if asked else START, "cannot be streamed; use /inference/v1/generate")
    return limits.keeps_notes and (wish.tells_experts if asked is None and not start else is_asked)


def told_experts(fields: GenerationFields, news: Delta | CompletionOutput) -> dict[str, Any]:
    """The `routed_experts` of a choice, the bytes of a `.npy` file in base64; nothing: not asked.

    `[tokens, layers, k]` from the first token on that the request names, to the last but one.
    """
    if news.routed_experts is None:
        return {}
    file = io.BytesIO()
    rows = news.routed_experts[fields.routed_experts_prompt_start or 0 :]
    np.save(file, np.ascontiguousarray(rows), allow_pickle=False)
    return {"routed_experts": base64.b64encode(file.getvalue()).decode("ascii")}

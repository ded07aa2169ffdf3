"""ShiftJAX: an LLM inference engine in which parallelism is a run-time choice."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shiftjax.core.kept_blocks import CacheHints
    from shiftjax.core.request import SamplingParams
    from shiftjax.embedder import Embedder
    from shiftjax.llm import LLM

__all__ = ["LLM", "CacheHints", "Embedder", "SamplingParams"]
__version__ = "0.1.0"

_HOMES = {
    "LLM": "shiftjax.llm",
    "Embedder": "shiftjax.embedder",
    "CacheHints": "shiftjax.core.kept_blocks",
    "SamplingParams": "shiftjax.core.request",
}


def __getattr__(name: str):
    """Import the public classes on first use, so that `import shiftjax.sim` stays free of JAX."""
    if name not in _HOMES:
        raise AttributeError(f"module 'shiftjax' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)

"""The published traces that papers replay: which file, and where it is published. No JAX."""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from shiftjax.sim.trace import TraceRequest, load_trace


class TraceFile(NamedTuple):
    """A trace that is not part of this package."""

    patterns: tuple[str, ...]  # of its name, the one that is looked for first in front
    published: str


TRACES: Mapping[str, TraceFile] = {
    "azure": TraceFile(
        ("AzureLLMInferenceTrace_code.csv",),
        "in Azure/AzurePublicDataset, AzureLLMInferenceDataset2023",
    ),
    "mooncake": TraceFile(
        ("conversation_trace.jsonl",),
        "in kvcache-ai/Mooncake, FAST25-release/traces",
    ),
}


def find_trace(name: str, folder: Path | None) -> list[TraceRequest] | str:
    """The requests of a trace that lies in or below a folder; else, in words, what is missing.

    Raises ConfigError for a file that is no trace.
    """
    trace = TRACES[name]
    wanted = f"{trace.patterns[0]}, published {trace.published}"
    if folder is None:
        return f"Not run: needs --traces with {wanted}."
    for pattern in trace.patterns:
        if found := sorted(folder.rglob(pattern)):
            return load_trace(found[0])
    return f"Not run: {folder} lacks {wanted}."

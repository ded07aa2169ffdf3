"""The published traces that papers replay: which file, and where it is published. No JAX."""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from shiftjax.sim.trace import TraceRequest, load_trace


class TraceFile(NamedTuple):
    """A trace that is not part of this package."""

    names: tuple[str, ...]  # of files, in the order in which they are looked for
    published: str


TRACES: Mapping[str, TraceFile] = {
    "azure": TraceFile(
        ("AzureLLMInferenceTrace_code_15mins.jsonl", "AzureLLMInferenceTrace_code.csv"),
        "as DOI 10.5281/zenodo.18240909, and whole in Azure/AzurePublicDataset",
    ),
    "mooncake": TraceFile(
        ("conversation_trace_15mins.jsonl", "conversation_trace.jsonl"),
        "as DOI 10.5281/zenodo.18240909, and whole in kvcache-ai/Mooncake",
    ),
}


def find_trace(name: str, folder: Path | None) -> list[TraceRequest] | str:
    """The requests of a trace that lies in or below a folder; else, in words, what is missing.

    Raises ConfigError for a file that is no trace.
    """
    trace = TRACES[name]
    wanted = f"{' or '.join(trace.names)}, published {trace.published}"
    if folder is None:
        return f"Not run: needs --traces with {wanted}."
    for file in trace.names:
        if found := sorted(folder.rglob(file)):
            return load_trace(found[0])
    return f"Not run: {folder} lacks {wanted}."

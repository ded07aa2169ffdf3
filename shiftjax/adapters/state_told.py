"""What an engine tells of its adapters: metrics, and a part of the page. No JAX."""

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from shiftjax.adapters.pool import AdapterState
from shiftjax.metric import Metric, counter, gauge

MOST_SHOWN = 64  # adapters of the page
MOST_NAMED = 256  # adapters of a label: as many as there may be slots
INFO = "Adapters that requests have now, and since when it is known; as vLLM tells it."


def metrics(state: AdapterState | None, clock: Callable[[], float] = time.time) -> Iterator[Metric]:
    """How many there are, and who has them; nothing without adapters."""
    if state is None:
        return
    names = (_label(each) for each in (state.waiting, state.running))
    info = {(str(state.num_slots), *names): clock()}
    labels = "max_lora", "waiting_lora_adapters", "running_lora_adapters"
    yield gauge("lora_requests_info", INFO, info, *labels)
    yield gauge("lora_adapters_loaded", "Adapters that requests may ask for.", len(state.loaded))
    yield gauge("lora_adapters_in_slots", "Adapters that devices hold.", len(state.in_slots))
    yield counter("lora_slot_writes", "Adapters that were copied to a slot.", state.num_writes)
    text = "Adapters whose files were read again, as host memory had not kept them."
    yield counter("lora_adapter_reads", text, state.num_reads)


def _label(sequences: Mapping[str, int]) -> str:
    """Names of adapters, of many those with the most sequences."""
    most = sorted(sequences, key=lambda name: (-sequences[name], name))[:MOST_NAMED]
    return ",".join(sorted(most))


def page_part(state: AdapterState) -> dict[str, Any]:
    """Adapters with their sequences, those that are asked for or on devices first."""
    known = {*state.loaded, *state.in_slots, *state.running, *state.waiting}
    rows = [
        {
            "name": name,
            "in_slot": name in state.in_slots,
            "running": state.running.get(name, 0),
            "waiting": state.waiting.get(name, 0),
        }
        for name in known
    ]
    order = "running", "waiting", "in_slot"
    rows.sort(key=lambda row: (*(-row[each] for each in order), row["name"]))
    return {
        "num_slots": state.num_slots,
        "num_in_slots": len(state.in_slots),
        "num_loaded": len(state.loaded),
        "rows": rows[:MOST_SHOWN],
    }

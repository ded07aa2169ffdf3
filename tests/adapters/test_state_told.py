"""What is told of adapters: as vLLM tells it, and on the page."""

from shiftjax.adapters.pool import AdapterState
from shiftjax.adapters.state_told import MOST_NAMED, MOST_SHOWN, metrics, page_part

STATE = AdapterState(
    2, ["a", "b", "c"], ["b", "gone"], 5, 1, running={"gone": 2, "b": 1}, waiting={"c": 3}
)


def test_metrics_as_vllm_has_them():
    found = {each.name: each for each in metrics(STATE, clock=lambda: 7.5)}
    info = found["lora_requests_info"]
    assert info.labels == ("max_lora", "waiting_lora_adapters", "running_lora_adapters")
    assert info.values == {("2", "c", "b,gone"): 7.5}
    numbers = {name: each.values.get(()) for name, each in found.items()}
    assert numbers["lora_adapters_loaded"] == 3 and numbers["lora_adapters_in_slots"] == 2
    assert numbers["lora_slot_writes"] == 5 and numbers["lora_adapter_reads"] == 1
    assert [*metrics(None)] == []


def test_a_label_has_no_more_names_than_there_may_be_slots():
    waiting = {f"a{number:04}": 1 for number in range(5000)} | {"z,most": 2}
    state = AdapterState(1, [], [], 0, 0, waiting=waiting)
    ((_, names, running),) = next(metrics(state)).values
    assert names.count(",") == MOST_NAMED and names.endswith(",z,most") and running == ""


def test_the_page_has_those_first_that_are_busy():
    told = page_part(STATE)
    assert [row["name"] for row in told["rows"]] == ["gone", "b", "c", "a"]
    assert told["rows"][0] == {"name": "gone", "in_slot": True, "running": 2, "waiting": 0}
    assert told["rows"][2] == {"name": "c", "in_slot": False, "running": 0, "waiting": 3}
    assert (told["num_slots"], told["num_in_slots"], told["num_loaded"]) == (2, 2, 3)
    many = AdapterState(1, [f"a{number:03}" for number in range(200)], [], 0, 0)
    assert len(page_part(many)["rows"]) == MOST_SHOWN

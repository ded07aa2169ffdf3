"""Prompts and decodes in a configuration each: what is parked, when phases change, what is lost."""

import pytest
from echo_kit import generate, make_engine, make_request, reference
from phases_kit import exchange_of, make_phases


def requests_of(num: int, *, length: int = 9, **sampling):
    options = {"max_tokens": 6, "ignore_eos": True} | sampling
    return [make_request(f"r{n}", [n % 13] * length, float(n), **options) for n in range(num)]


CONFIGURATIONS = [
    {"pp": (4, 1)},
    {"pp": (1, 2)},
    {"dp": (2, 2), "pp": (2, 1)},
    {"dp": (1, 2), "pp": (1, 3), "overlap": False},
]


@pytest.mark.parametrize("options", CONFIGURATIONS)
@pytest.mark.parametrize("num_host_blocks", [4, 7, 1000])
def test_tokens_are_those_of_one_configuration(options, num_host_blocks):
    requests = requests_of(20)
    engine = make_phases(num_host_blocks=num_host_blocks, **options)
    found = generate(engine, *requests)
    expected = generate(make_engine(), *requests)
    for key, outcome in expected.items():
        assert found[key].token_ids == outcome.token_ids == reference_of(engine, requests, key)
    loads = exchange_of(engine).loads
    assert loads == ["decode", "prefill"] * (len(loads) // 2) + ["decode"]
    assert (len(loads) > 1) == (num_host_blocks < 1000)
    assert engine.stats().num_preemptions == {"recompute": 0, "swap": 0}


def reference_of(engine, requests, key):
    number = [request.request_id for request in requests].index(key[0])
    return reference(engine, requests[number], number, key[1])[0]

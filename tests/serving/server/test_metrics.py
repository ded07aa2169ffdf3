"""Metrics under vLLM's names; gauges are back at zero; the counters add up."""

from dataclasses import replace
from pathlib import Path

import grpc
import pytest
from kit import (
    make_drafting_engine,
    make_engine,
    metric_total,
    metric_values,
    running_server,
)

from serving.server import metrics
from shiftjax.core.engine import Engine
from shiftjax.core.scheduler import Scheduler
from shiftjax.host_tier.extents import HostBlocks, HostMemory
from shiftjax.phases.parking import Parking
from shiftjax.phases.resharding import Resharding


@pytest.mark.parametrize("prefix", ["shiftjax", "vllm"])
def test_what_happens_is_counted(prefix):
    with running_server(metrics_prefix=prefix) as server, server.client() as client:
        body = {"prompt": "hello", "max_tokens": 8, "seed": 1, "ignore_eos": True}
        client.post("/v1/completions", json=body)
        client.post("/v1/completions", json=body | {"n": 2})
        client.post("/v1/completions", json=body | {"temperature": -1})
        client.post("/v1/completions", json=body, headers={"x-request-timeout": "0"})
        server.assert_quiescent()
        values = metric_values(client)
        name = f"{prefix}:"
        assert metric_total(values, name + "generation_tokens_total") == 24
        assert metric_total(values, name + "prompt_tokens_total") == 10
        success = name + "request_success_total"
        assert metric_total(values, success, finished_reason="length") == 3
        rejected = name + "requests_rejected_total"
        assert metric_total(values, rejected, reason="invalid_value") == 1
        assert metric_total(values, rejected, reason="deadline_exceeded") == 1
        for gauge in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
            assert (name + gauge) in {key for key, _ in values}
            assert metric_total(values, name + gauge) == 0
        assert metric_total(values, name + "time_to_first_token_seconds_count") == 2
        assert metric_total(values, name + "e2e_request_latency_seconds_count") == 2
        assert metric_total(values, name + "request_queue_time_seconds_count") == 2
        assert metric_total(values, name + "inter_token_latency_seconds_count") == 21
        steps = metric_total(values, name + "steps_total")
        assert steps >= metric_total(values, name + "step_duration_seconds_count") > 0
        assert metric_total(values, name + "recompiles_after_warmup_total") == 0
        labels = {key for (found, key) in values if found == name + "num_requests_running"}
        assert labels == {(("engine", "0"), ("model_name", "echo"))}


# What the dashboards of vLLM 0.29.0 ask for (examples/observability).
ON_DASHBOARDS = {
    *("generation_tokens_total", "prompt_tokens_total", "request_success_total"),
    *("kv_cache_usage_perc", "num_requests_running", "num_requests_waiting"),
    *("e2e_request_latency_seconds_bucket", "e2e_request_latency_seconds_sum"),
    *("inter_token_latency_seconds_bucket", "inter_token_latency_seconds_sum"),
    *("time_to_first_token_seconds_bucket", "time_to_first_token_seconds_sum"),
    *("iteration_tokens_total_count", "request_max_num_generation_tokens_sum"),
    *("request_prompt_tokens_bucket", "request_generation_tokens_bucket"),
    *("request_queue_time_seconds_sum", "request_prefill_time_seconds_sum"),
    "request_decode_time_seconds_sum",
}


def test_the_dashboards_of_vllm_find_their_numbers():
    body = {"prompt": "hello", "seed": 1, "ignore_eos": True}
    with running_server(metrics_prefix="vllm") as server, server.client() as client:
        client.post("/v1/completions", json=body | {"max_tokens": 3})
        client.post("/v1/completions", json=body | {"max_tokens": 8, "n": 2})
        server.assert_quiescent()
        values = metric_values(client)
    assert {f"vllm:{name}" for name in ON_DASHBOARDS} <= {name for name, _ in values}

    def total(name: str) -> float:
        return metric_total(values, f"vllm:{name}")

    assert total("request_max_num_generation_tokens_sum") == 3 + 8
    assert total("request_generation_tokens_sum") == 3 + 16
    assert total("request_params_max_tokens_sum") == 11
    # Each token but the last of a continuation is the input of a step; a prompt may be cached.
    assert 5 + 2 + 14 <= total("iteration_tokens_total_sum") <= 5 + 5 + 2 + 14 + 5
    assert total("iteration_tokens_total_count") == total("step_duration_seconds_count")


@pytest.mark.parametrize("prefix", ["shiftjax", "vllm"])
def test_vllms_names_come_with_their_older_ones(prefix):
    old = {
        "vllm:kv_cache_usage_perc": "vllm:gpu_cache_usage_perc",
        "vllm:prefix_cache_queries_total": "vllm:gpu_prefix_cache_queries_total",
        "vllm:prefix_cache_hits_total": "vllm:gpu_prefix_cache_hits_total",
    }
    with running_server(metrics_prefix=prefix) as server, server.client() as client:
        for _ in range(2):
            client.post("/v1/completions", json={"prompt": "a" * 40, "max_tokens": 2})
        server.assert_quiescent()
        values = metric_values(client)
    found = {name: value for (name, _), value in values.items()}
    if prefix == "shiftjax":
        assert not [name for name in found if "gpu_" in name]
        return
    labels = {name: label for name, label in values}
    for name, older in old.items():
        assert (found[older], labels[older]) == (found[name], labels[name])
    assert 0 < found["vllm:gpu_prefix_cache_hits_total"] < found["vllm:prefix_cache_queries_total"]


def test_drafts_are_counted_by_vllms_names_and_ours():
    """The same request again is drafted from what the first one left in the corpus."""
    body = {"prompt": "hello", "max_tokens": 30, "seed": 1, "ignore_eos": True}
    with (
        running_server(make_drafting_engine(speculation="suffix")) as server,
        server.client() as client,
    ):

        def total(name: str, **labels: str) -> float:
            return metric_total(values, f"shiftjax:{name}", **labels)

        client.post("/v1/completions", json=body)
        server.assert_quiescent()
        values = metric_values(client)
        assert total("draft_corpus_tokens") == 30
        before = total("spec_decode_num_accepted_tokens_total")
        steps = total("steps_total")
        client.post("/v1/completions", json=body)
        server.assert_quiescent()
        values = metric_values(client)
        accepted = total("spec_decode_num_accepted_tokens_total")
        assert 10 < accepted - before < 30
        assert total("steps_total") - steps < 30 - (accepted - before) + 4
        assert total("spec_decode_num_accepted_tokens_per_pos_total") == accepted
        first = total("spec_decode_num_accepted_tokens_per_pos_total", position="0")
        assert 0 < first <= total("spec_decode_num_drafts_total")
        drafted = total("spec_decode_num_draft_tokens_total")
        assert total("draft_tokens_total", outcome="accepted") == accepted
        assert total("draft_tokens_total", drafter="suffix") == drafted >= accepted
        num_steps = total("draft_steps_total")
        assert 0 < num_steps == total("draft_steps_total", mode="shift")
        assert num_steps <= total("spec_decode_num_drafts_total")
        assert total("draft_seconds_count") >= num_steps and total("draft_seconds_sum") > 0


def test_the_host_tier_is_counted():
    engine = make_engine(num_blocks=17)  # 64 tokens
    engine.lanes[0].scheduler.tables.tier = HostBlocks(HostMemory(4000), 4, 100)
    with running_server(engine) as server, server.client() as client:
        for letter in "abab":
            body = {"prompt": letter * 50, "max_tokens": 4, "seed": 1, "ignore_eos": True}
            usage = client.post("/v1/completions", json=body).json()["usage"]
        values = {key.removeprefix("shiftjax:"): v for key, v in totals(client).items()}
        assert usage["prompt_tokens_details"]["cached_tokens"] == 48
        assert 0 < values["host_cache_hits_total"] <= values["host_cache_queries_total"]
        assert values["prefix_cache_hits_total"] == 96 >= values["host_cache_hits_total"]
        assert values["host_cache_moved_bytes_total"] % 100 == 0
        assert 0 < values["host_cache_used_bytes"] <= values["host_cache_size_bytes"] == 4000
    with running_server() as server, server.client() as client:
        assert not [name for name in totals(client) if "host_cache" in name]


class NothingToLoad:
    def load(self, phase: str) -> None:
        """Pools are audited: what is in them from the phase before is overwritten."""


def phased_engine() -> Engine:
    """A lane for prompts and one for decodes, of 4,000 bytes of host memory."""
    memory, lanes, engine = HostMemory(4000), {}, make_engine()
    for phase in ("prefill", "decode"):
        lanes[phase] = (lane,) = make_engine().lanes
        config = replace(lane.scheduler.config, preemption="swap")
        admission = Parking() if phase == "prefill" else None
        lane.scheduler = Scheduler(config, tier=HostBlocks(memory, 4, 100), admission=admission)
    lanes["decode"][0].runner.host = lanes["prefill"][0].runner.host
    resharding = Resharding(lanes, NothingToLoad(), memory)
    every = [*lanes["prefill"], *lanes["decode"]]
    return Engine(every, engine.policy, engine.limits, seed=5, topology=resharding)


def test_phases_are_counted():
    with running_server(phased_engine()) as server, server.client() as client:
        for letter in "ab":
            body = {"prompt": letter * 50, "max_tokens": 4, "seed": 1, "ignore_eos": True}
            client.post("/v1/completions", json=body)
        server.assert_quiescent()
        values = metric_values(client)
        assert metric_total(values, "shiftjax:phase", phase="decode") == 1
        assert metric_total(values, "shiftjax:phase", phase="prefill") == 0
        assert metric_total(values, "shiftjax:phase_switches_total") == 3
        assert metric_total(values, "shiftjax:phase_switch_seconds_total") > 0
        for gauge in ("sequences_parked", "host_cache_held_bytes"):
            assert metric_total(values, f"shiftjax:{gauge}") == 0
    with running_server() as server, server.client() as client:
        assert not [name for name in totals(client) if "phase" in name or "parked" in name]


def test_rows_that_are_not_finite_are_counted_by_their_cause_not_by_its_words():
    with running_server() as server, server.client() as client:
        server.runner.poisoned.add(7)
        one_step = {"prompt": [7, 8], "max_tokens": 1}  # no further step meets the fault below
        answer = client.post("/v1/completions", json=one_step)
        assert answer.json()["error"]["code"] == "internal_error"
        server.runner.faults.append(RuntimeError("numbers that are not finite"))
        answer = client.post("/v1/completions", json={"prompt": [8, 8], "max_tokens": 4})
        assert answer.status_code == 500
        values = metric_values(client)
    assert metric_total(values, "shiftjax:nan_rows_total") == 1
    aborted = "shiftjax:requests_aborted_total"
    assert metric_total(values, aborted, reason="internal_error") == 2


def test_what_all_requests_have_names_no_feature():
    text = Path(metrics.__file__).read_text().lower()
    words = "fleet", "draft", "host", "embed", "resharding", "kv_event", "expert"
    assert [word for word in words if word in text] == []


def totals(client) -> dict[str, float]:
    """Every metric over all of its labels."""
    values = metric_values(client)
    return {name: metric_total(values, name) for name, _ in values}


def test_nothing_is_said_of_drafts_where_there_are_none():
    with running_server() as server, server.client() as client:
        assert not [name for name, _ in metric_values(client) if "spec_decode" in name]


def test_nothing_is_said_of_groups_that_stay_as_they_are():
    with running_server() as server, server.client() as client:
        names = [name for name, _ in metric_values(client)]
    assert not [name for name in names if "fleet" in name or "paused" in name or "kv_m" in name]


def test_every_refusal_of_a_generation_is_counted_once():
    with running_server(keys=("key",), max_request_bytes=2000) as server:
        headers = {"authorization": "Bearer key"}
        with server.client(headers=headers) as client:

            def post(content: bytes, **given: str) -> int:
                given = {name.replace("_", "-"): value for name, value in given.items()}
                answer = client.post("/v1/chat/completions", content=content, headers=given)
                return answer.status_code

            assert [
                post(b"{"),
                post(b"{}"),
                post(b'"%s"' % (b"x" * 3000)),
                post(b"{}", content_type="text/plain"),
                post(b"{}", authorization="Bearer other"),
                post(b"{}", host="elsewhere"),
                post(b"{}", x_request_id="a b"),
                post(b"{}", x_request_timeout="soon"),
            ] == [400, 400, 413, 415, 401, 400, 400, 400]
            for path in ("/metrics", "/v1/nothing"):  # that are no generations
                client.get(path, headers={"authorization": ""})
            values = metric_values(client)
        assert server.engine.counts.rejected == 8
    name = "shiftjax:requests_rejected_total"
    reasons = {
        dict(labels)["reason"]: value for (key, labels), value in values.items() if key == name
    }
    assert reasons.pop("invalid_api_key") == 1
    assert reasons.pop("request_too_large") == 1
    assert reasons.pop("unsupported_media_type") == 1
    assert sum(reasons.values()) == 5


def test_grpc_calls_that_are_refused_before_they_are_read_are_counted():
    options, headers = (
        {"keys": ("key",), "max_request_bytes": 2000},
        {"authorization": "Bearer key"},
    )
    with running_server(**options) as server, server.client(headers=headers) as client:
        with grpc.insecure_channel(server.server.grpc.address) as channel:
            for name, data, key in (
                ("GenerateOnce", b"\xff", "key"),
                ("GenerateOnce", b"\xff" * 2001, "key"),
                ("Score", b"", "other"),
                ("Tokenize", b"", "other"),  # no generation
            ):
                call = channel.unary_unary(f"/shiftjax.v1.Inference/{name}")
                with pytest.raises(grpc.RpcError):
                    call(data, metadata=(("authorization", f"Bearer {key}"),))
        values = metric_values(client)
    counts = {
        reason: metric_total(values, "shiftjax:requests_rejected_total", reason=reason)
        for reason in ("invalid_value", "request_too_large", "invalid_api_key")
    }
    assert counts == {"invalid_value": 1, "request_too_large": 1, "invalid_api_key": 1}


def test_names_that_dashboards_want_are_there_before_any_request():
    with running_server() as server, server.client() as client:
        names = {key.removeprefix("shiftjax:") for key, _ in metric_values(client)}
    assert names >= {
        *("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"),
        *("time_to_first_token_seconds_bucket", "inter_token_latency_seconds_bucket"),
        *("e2e_request_latency_seconds_bucket", "request_queue_time_seconds_bucket"),
        *("request_prefill_time_seconds_bucket", "request_decode_time_seconds_bucket"),
        *("prompt_tokens_total", "generation_tokens_total", "num_preemptions_total"),
        *("prefix_cache_queries_total", "prefix_cache_hits_total", "cache_config_info"),
        *("steps_total", "mode_switches_total", "recompiles_after_warmup_total"),
        *("compile_total", "last_step_age_seconds", "nan_rows_total", "config_info"),
    }

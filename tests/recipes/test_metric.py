"""The recipe of `docs/CORE.md` for a metric, carried out in a copy of the sources."""

import pytest
from copied import change, copy_tree, run_in

METRICS = "serving/server/metrics.py"
CHECK = """
from kit import metric_total, metric_values, running_server

with running_server() as server, server.client() as client:
    for prompt in ("x" * 40, "y" * 3):
        body = {"prompt": prompt, "max_tokens": 2, "ignore_eos": True}
        assert client.post("/v1/completions", json=body).status_code == 200
    server.assert_quiescent()
    values, text = metric_values(client), client.get("/metrics").text
"""


@pytest.fixture
def copy(tmp_path):
    return copy_tree(tmp_path)


def test_a_gauge_of_the_engine_takes_one_file(copy):
    old = '    yield gauge("kv_cache_usage_perc"'
    new = '    yield gauge("num_waiting_tokens", "Tokens that wait.", stats.num_waiting_tokens)\n'
    change(copy, METRICS, old, new + old)
    check = """
assert metric_total(values, "shiftjax:num_waiting_tokens", model_name="echo") == 0
assert "# HELP shiftjax:num_waiting_tokens Tokens that wait." in text
assert "# TYPE shiftjax:num_waiting_tokens gauge" in text
"""
    run_in(copy, CHECK + check)


def test_a_counter_and_a_histogram_of_requests_take_one_file(copy):
    old = '    Declared("nan_rows"'
    new = """\
    Declared("long_prompts", "Prompts of more than 9 tokens, by their end.", labels=("end",)),
    Declared("request_tokens", "Tokens of a request.", SIZE_BUCKETS),
"""
    change(copy, METRICS, old, new + old)
    old = '        records.observe("request_generation_tokens", handle.num_output_tokens)\n'
    new = """\
        num_prompt, end = len(request.prompt_token_ids), "error" if error else "finished"
        records.count("long_prompts", int(num_prompt > 9), end)
        records.observe("request_tokens", num_prompt + handle.num_output_tokens)
"""
    change(copy, METRICS, old, old + new)
    check = """
assert metric_total(values, "shiftjax:long_prompts_total", end="finished") == 1
assert metric_total(values, "shiftjax:request_tokens_count") == 2
assert metric_total(values, "shiftjax:request_tokens_sum") == 40 + 2 + 3 + 2
"""
    run_in(copy, CHECK + check)


def test_a_metric_of_a_feature_takes_the_file_of_its_state(copy):
    old = '    size = drafts.num_corpus_tokens\n    yield gauge("draft_corpus_tokens"'
    new = '    yield counter("draft_steps_of_all_modes", "Them.", drafts.steps.total())\n'
    change(copy, "shiftjax/drafts/speculation.py", old, new + old)
    check = CHECK.replace("running_server", "make_drafting_engine, running_server", 1).replace(
        "running_server()", 'running_server(make_drafting_engine(speculation="suffix"))'
    )
    run_in(copy, check + 'assert "shiftjax:draft_steps_of_all_modes_total{" in text\n')

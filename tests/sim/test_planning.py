"""The closed form of a plan: what the replay says, and that more of anything is never worse."""

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from spent import quick

from shiftjax.costs.machine_files import machine_names
from shiftjax.draft_options import DraftOptions
from shiftjax.sim.estimate import Workload, estimate, saturated_tokens_per_second
from shiftjax.sim.experiments import saturation_rate, target_from
from shiftjax.sim.modelled import cost_model, memory_of
from shiftjax.sim.named import standard_deployments
from shiftjax.sim.planning import all_deployments, recommend

BUDGETS = {"max_num_seqs": 32, "max_num_batched_tokens": 2048}
ASKED = (  # each model, machine and engine with several of the others
    ("llama-70b", "h200x8", "shiftjax", "fp8"),
    ("llama-70b", "h200x8", "vllm", "fp8"),
    ("qwen-32b", "a100x8", "shiftjax", "bfloat16"),
    ("llama-8b", "l4x8", "shiftjax", "bfloat16"),
    ("llama-8b", "a100x8", "vllm", "bfloat16"),
    ("mistral-7b", "l4x8", "vllm", "bfloat16"),
)


@pytest.mark.thorough
@pytest.mark.parametrize(("model", "machine", "engine", "dtype"), ASKED)
def test_plan_and_replay_agree(model, machine, engine, dtype):
    names = {"model": model, "machine": machine, "engine": engine, "dtype": dtype}
    target = target_from(names)
    prompt, output = (1500, 60) if engine == "vllm" else (500, 100)
    for name in ("tp", "greedy"):
        deployment = standard_deployments(target, **BUDGETS)[name]
        costs, memory = cost_model(target, deployment), memory_of(target, deployment)
        workload = Workload(prompt, output)
        planned = saturated_tokens_per_second(costs, deployment, memory, workload)
        replayed = saturation_rate(target, deployment, prompt, output) * (prompt + output)
        assert planned == pytest.approx(replayed, rel=0.1), name


def test_a_group_is_no_wider_than_the_model_has_query_heads():
    target = target_from({"model": "smollm2-135m", "machine": "h200x8", "hosts": 2})
    best, _ = recommend(target, Workload(1000, 100)) or (None, "")
    assert best is not None and (best.dp, best.sp * best.tp) == (2, 8)  # 9 heads, 16 devices


def test_with_drafts_there_are_the_same_rows():
    """A step of a pipeline has a share of the sequences, and rows for the drafts of these."""
    target = target_from({"model": "llama-70b", "machine": "h200x8", "dtype": "fp8"})
    found = all_deployments(target, drafts=DraftOptions(speculation="suffix"), max_num_seqs=64)
    assert [each.name for each in found] == [each.name for each in all_deployments(target)]
    assert {(each.pp, each.max_draft_rows) for each in found} >= {(1, 256), (2, 128), (8, 32)}


MACHINES = sorted(set(machine_names()) - {"cpu"})
MORE = {
    "memory_bytes": lambda machine, by: machine.memory_bytes * by,
    "memory_bytes_per_second": lambda machine, by: machine.memory_bytes_per_second * by,
    "matmul_flops": lambda machine, by: {n: f * by for n, f in machine.matmul_flops.items()},
    "num_devices": lambda machine, by: machine.num_devices * 2,
}


@pytest.mark.parametrize("machine", quick(MACHINES, *MACHINES[::3]))
@settings(max_examples=2, deadline=None, derandomize=True)
@given(
    st.sampled_from(["llama-8b", "qwen-32b", "llama-70b", "qwen3-30b-a3b", "gpt-oss-20b"]),
    st.sampled_from(sorted(MORE)),
    st.floats(1.05, 4.0),
    st.sampled_from(list(itertools.product((100, 4096), (30, 1000)))),
)
def test_more_of_anything_never_predicts_less(machine, model, what, by, lengths):
    target = target_from({"model": model, "machine": machine, "dtype": "bfloat16"})
    larger = replace(target.machine, **{what: MORE[what](target.machine, by)})
    tokens_per_second = [
        max(
            estimate(each, deployment, Workload(*lengths)).tokens_per_second
            for deployment in all_deployments(each)
        )
        for each in (target, replace(target, machine=larger))
    ]
    assert tokens_per_second[1] >= tokens_per_second[0] * (1 - 1e-9)

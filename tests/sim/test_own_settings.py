"""A simulation of my settings simulates my settings."""

from dataclasses import replace

import pytest
from harness import silent

from shiftjax.build import build
from shiftjax.config import SERVER_BUDGETS, EngineConfig
from shiftjax.costs.work import Work
from shiftjax.options import ConfigError
from shiftjax.sim.devices import Clock
from shiftjax.sim.estimate import Workload, estimate
from shiftjax.sim.experiments import target_from
from shiftjax.sim.modelled import cost_model, deploy_config, memory_of
from shiftjax.sim.named import deploy
from shiftjax.sim.replay import replay
from shiftjax.sim.sim_backend import make_engine
from shiftjax.sim.trace import TraceRequest
from shiftjax.weights.locate import open_source, resolve_model

SETTINGS = {
    **{"model": "random:tiny", "dtype": "float32", "kv_cache_dtype": "bfloat16", "sp": 2, "tp": 2},
    **{"dp": 2, "policy": "threshold", "shift_threshold": 16, "max_num_seqs": 6, "block_size": 8},
    **{"max_num_batched_tokens": 48, "token_buckets": [16, 64], "num_blocks": 50},
    **{"max_model_len": 96, "prefix_caching": False, "memory_fraction": 0.8},
}
FORMATS = {"dtype": "float32", "kv_cache_dtype": "bfloat16"}
TARGET = target_from({"model": "tiny", "machine": "cpu"} | FORMATS)
GPUS = target_from({"model": "llama-70b", "machine": "h200x8"})


@pytest.mark.costs(12)
def test_what_is_simulated_is_what_would_be_built():
    config = EngineConfig.from_options(**SETTINGS, cache_dir="none")
    built = build(config, open_source(resolve_model("random:tiny"), seed=0), silent)
    assert deploy_config(TARGET, config) == built.deployment
    engine, runners = make_engine(TARGET, [deploy_config(TARGET, config)], Clock())
    assert engine.limits == built.engine.limits
    assert engine.policy == built.engine.policy
    for simulated, real in zip(engine.lanes, built.engine.lanes, strict=True):
        assert simulated.scheduler.config == real.scheduler.config
        assert simulated.modes == real.modes
    for runner, real in zip(runners, built.runners, strict=True):
        assert runner.costs.buckets == [program.bucket for program in real.programs]


def test_blocks_are_those_that_fit_the_machine_and_could_be_used():
    config = EngineConfig.from_options(sp=4, tp=2, max_num_seqs=512, max_model_len=131_072)
    deployment = deploy_config(GPUS, config)
    needed = memory_of(GPUS, deployment)
    memory = GPUS.machine.memory_bytes * 0.9 - needed.weight_bytes - needed.workspace_bytes
    taken = deployment.num_blocks * deployment.block_bytes
    assert memory * 7 / 8 < taken < memory  # of 4 significant bits
    assert deployment.num_blocks % (1 << deployment.num_blocks.bit_length() - 4) == 0
    few = deploy_config(GPUS, EngineConfig.from_options(sp=4, tp=2, max_model_len=64))
    assert few.num_blocks == 1 + 256 * 64 // 16


def test_a_server_is_assumed_where_no_settings_are_given():
    assert SERVER_BUDGETS == {"max_num_seqs": 256, "max_num_batched_tokens": 8192}
    server = deploy(GPUS, "sp=8,tp=1,policy=base")
    assert (server.max_num_seqs, server.max_num_batched_tokens) == (256, 8192)


def test_stages_are_simulated_and_planned_for():
    deployment = deploy_config(GPUS, EngineConfig.from_options(pp=4, tp=2, max_model_len=4096))
    _, (runner,) = make_engine(GPUS, [deployment], Clock())
    assert runner.costs.layout.num_devices == 2 and deployment.grid.num_devices == 8
    found = estimate(GPUS, deployment, Workload(1000, 100))
    assert found.fits and found.row()["pp"] == 4
    costs, chunk = cost_model(GPUS, deployment), deployment.max_num_batched_tokens
    shift = costs.layout.shift
    assert chunk >= 1000
    assert found.ttft_seconds == costs.device_seconds(shift, Work.prefill(1000))
    assert found.tpot_seconds == costs.device_seconds(shift, Work.decode(1, 1050))


def test_a_host_tier_is_simulated():
    """Prompts that fall out of a small pool come back from the host."""
    options = {"sp": 1, "tp": 8, "num_blocks": 140, "max_model_len": 2048}
    same = TraceRequest(0.0, 1000, 2, (1,), 992)
    prompts = [same, TraceRequest(5.0, 2000, 2), replace(same, arrival_seconds=9.0)]
    plain, tiered = (
        replay(prompts, GPUS, deploy_config(GPUS, EngineConfig.from_options(**options, **more)))
        for more in ({}, {"host_memory": "8GiB"})
    )
    assert plain.requests[2].num_cached_tokens < 500 < tiered.requests[2].num_cached_tokens
    assert tiered.requests[2].ttft < plain.requests[2].ttft


@pytest.mark.parametrize(
    ("options", "fragment"),
    [
        ({"phases": "pp8:tp8"}, "phases = pp8:tp8 is not simulated"),
        ({"policy": "cost", "machine": "cpu"}, "machine = cpu is not simulated on h200x8"),
        ({"devices": 16}, "16 devices are asked for, but this machine has 8"),
        ({"sp": 8, "tp": 1, "num_blocks": 10**6}, "num_blocks = 1000000 take"),
        ({"sp": 8, "tp": 1, "memory_fraction": 0.5}, "leave no memory for KV blocks"),
    ],
)
def test_what_cannot_be_simulated_is_said(options, fragment):
    with pytest.raises(ConfigError, match=fragment):
        deploy_config(GPUS, EngineConfig.from_options(**options))


def test_a_cost_policy_for_the_same_machine_is_simulated():
    config = EngineConfig.from_options(sp=4, tp=2, policy="cost", machine="h200x8")
    assert deploy_config(GPUS, config).policy == "cost"
    other = replace(GPUS.machine, name="mine")
    with pytest.raises(ConfigError, match="not simulated on mine"):
        deploy_config(replace(GPUS, machine=other), config)

"""Deployments over several hosts: which modes pay there, and whether one engine should be there."""

import re
from dataclasses import replace
from types import SimpleNamespace

import jax
import pytest

from serving.cli.main import main
from shiftjax.arch.formats import formats_of
from shiftjax.core.policies import CostPolicy
from shiftjax.core.policy import wanted_modes
from shiftjax.costs.group_costs import PipelineCosts
from shiftjax.costs.machine import Machine, Transfer
from shiftjax.costs.machine_files import load_engine, load_machine
from shiftjax.costs.work import Work
from shiftjax.device.choosers import known_costs
from shiftjax.draft_options import DraftOptions
from shiftjax.options import ConfigError
from shiftjax.parallel.grid import Mode
from shiftjax.sim.estimate import Workload
from shiftjax.sim.modelled import Target, cost_model, modes_of
from shiftjax.sim.models import find_model
from shiftjax.sim.named import deploy
from shiftjax.sim.planning import hosts_in_words

TWO = load_machine("h200x8", hosts=2)
BASE, INSIDE, SHIFT = Mode(8, 8), Mode(8, 2), Mode(8, 1)  # INSIDE: TP=8 on each host


def on(machine: Machine) -> Target:
    model, engine = find_model("llama-70b"), load_engine("shiftjax")
    return Target(model, machine, engine, formats_of("bfloat16"))


def chosen(machine: Machine) -> tuple[dict[int, Mode], set[Mode]]:
    """The mode of steps by their tokens, and all modes that are compiled, of Llama-70B."""
    target = on(machine)
    deployment = deploy(target, "sp=8,tp=2,policy=cost")
    costs = cost_model(target, deployment)
    policy, modes = CostPolicy(costs), modes_of(costs, deployment)
    found = {n: policy.mode_of(Work.prefill(n), modes, 0, None) for n in (8, 512, 8192)}
    wanted = wanted_modes(policy, deployment.buckets, modes)
    return found, {mode for each in wanted.values() for mode in each}


def test_between_few_and_many_tokens_weights_are_split_inside_hosts():
    """Shift waits for the network twice a layer, for few bytes; the mode between exchanges less."""
    by_tokens, _ = chosen(TWO)
    assert by_tokens == {8: SHIFT, 512: INSIDE, 8192: BASE}


def test_shift_is_left_out_where_the_network_is_too_slow_for_it():
    """Sums of all hidden states cross in it, more than exchanges of heads: nothing compiles it."""
    _, wanted = chosen(TWO)
    assert {SHIFT, INSIDE, BASE} <= wanted
    slow = replace(TWO, network=(Transfer(19e-6, 0.5e9),))
    by_tokens, wanted = chosen(slow)
    assert SHIFT not in wanted and SHIFT not in by_tokens.values()


def test_an_engine_over_hosts_decides_by_the_links_that_it_has(monkeypatch):
    """Of 8 devices a host of the file's machine, this one has 4."""
    for name, count in (("process_count", 2), ("local_device_count", 4), ("device_count", 8)):
        monkeypatch.setattr(jax, name, lambda count=count: count)
    deployment = deploy(on(TWO), "sp=4,tp=2,policy=cost")
    costs = known_costs(deployment, SimpleNamespace(device_kind="NVIDIA H200"))
    assert costs.machine.num_hosts == 2 and costs.machine.devices_per_host == 4
    between = replace(costs.machine, network=(Transfer(1.0, 1.0),))
    slower = deployment.costs(between, costs.engine).mode_seconds(Mode(4, 4), (512, 8))
    assert slower > 1e6 > costs.mode_seconds(Mode(4, 4), (512, 8))


def test_without_a_network_drafts_do_without_costs_and_the_policy_cannot(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    deployment = deploy(on(TWO), "sp=4,tp=2,policy=base")
    device = SimpleNamespace(device_kind="cpu")
    drafting = replace(deployment, drafts=DraftOptions(speculation="ngram"))
    assert drafting.drafts.draft_choice == "auto"
    assert known_costs(drafting, device) is None
    with pytest.raises(ConfigError, match="cpu has no network between hosts"):
        known_costs(replace(deployment, policy="cost"), device)


def test_stages_on_several_hosts_hand_over_by_the_network():
    deployment = deploy(on(TWO), "pp2tp8")
    costs, num_bytes = cost_model(on(TWO), deployment), 4096 * 8192 * 2 / 8  # bf16, of a device
    assert isinstance(costs, PipelineCosts)
    assert costs.send_seconds(Work.prefill(4096)) == pytest.approx(19e-6 + num_bytes / 47e9)


@pytest.mark.costs(9)
@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("--model", "llama-70b"), "replicas: a server on each of 2 hosts (--sp 4 --tp 2)"),
        (("--model", "llama-70b"), "recommended: --sp 8 --tp 2 --policy cost"),
        (("--model", "llama-70b"), "and has room for no longer requests"),
        (("--model", "llama-405b"), "recommended: --sp 2 --tp 8 --policy cost"),
        (("--model", "llama-405b", "--machine", "h100x8"), "one engine over 2 hosts: no host"),
    ],
)
def test_plan_says_whether_one_engine_or_replicas(capsys, argv, words):
    assert main(["plan", "--hosts", "2", *argv]) == 0
    assert words in capsys.readouterr().out


def test_a_plan_of_an_engines_settings_is_over_its_hosts(capsys, tmp_path):
    file = tmp_path / "engine.yaml"
    file.write_text("{model: llama-70b, hosts: 2, coordinator: 'a:5', host_secret_file: secret}")
    assert main(["plan", "--config", str(file)]) == 0
    assert "on h200x8 over 2 hosts" in capsys.readouterr().out


def test_requests_that_no_host_holds_are_for_one_engine():
    """Devices of 26 GB: a host has room for a request, but not for the longest of the model."""
    machine = replace(TWO, memory_bytes=26e9, reserved_bytes=0.0)
    target = on(machine)
    target = replace(target, engine=replace(target.engine, buffers_each_sum=False))
    words = hosts_in_words(target, Workload(1000, 100))
    longest, held = re.findall(r"of more than ([\d,]+) tokens: it holds ([\d,]+)", words)[0]
    assert 1100 < int(longest.replace(",", "")) < target.model.max_position_embeddings
    assert int(held.replace(",", "")) > int(longest.replace(",", ""))
    assert hosts_in_words(replace(target, machine=machine.one_host), Workload(1000, 100)) == ""


def test_a_trace_is_replayed_over_hosts(capsys):
    argv = ["mesh", "simulate", "--trace", "poisson", "--set", "rate=4", "--set", "seconds=2"]
    argv += ["--set", "prompt_tokens=500", "--set", "output_tokens=4", "--compare", "cost"]
    took = []
    for more in ((), ("--hosts", "2")):
        assert main([*argv, *more]) == 0
        took.append(capsys.readouterr().out)
    assert "sp4tp2" in took[0] and "sp8tp2" in took[1]

"""The command that `plan` prints makes the engine that it planned."""

from dataclasses import replace

import pytest

from serving.cli.main import main, make_parser
from serving.run.flags import parse_args, settle
from shiftjax.sim.estimate import Workload
from shiftjax.sim.experiments import target_from
from shiftjax.sim.live import deploy_live
from shiftjax.sim.load import Limits, even_load
from shiftjax.sim.modelled import memory_of
from shiftjax.sim.named import deploy
from shiftjax.sim.serve_command import serve_command, settings_file
from shiftjax.sim.servers import Server, all_servers, changed
from shiftjax.sim.trials import Measured, Trial
from shiftjax.sim.variants import VARIANTS

PARSER = make_parser()


def started(command: str, target):
    """What the words of a command come to on the target's machine."""
    program, *words = command.split()
    assert program == "shiftjax"
    arguments = parse_args(PARSER, [*words, "--simulate", target.machine.name])
    config, _ = settle(arguments)
    assert arguments.notes == [] and arguments.server.simulate == target.machine.name
    return deploy_live(target, config)


@pytest.mark.parametrize(
    ("model", "machine", "dtype", "name", "budgets"),
    [
        ("qwen3-32b", "h200x8", "bfloat16", "shift", {}),
        ("qwen3-32b", "h200x8", "fp8", "dp", {"max_num_seqs": 128}),
        ("llama-70b", "h100x8", "fp8", "sp4tp2", {"threshold": 512, "block_size": 32}),
        ("llama-70b", "h100x8", "bfloat16", "cost", {"max_num_batched_tokens": 2048}),
        ("llama-70b", "h200x8", "bfloat16", "fleet:tp2", {}),
        ("llama-70b", "h200x8", "bfloat16", "fleet:load:tp4", {}),
        ("llama-70b", "h100x8", "bfloat16", "pp4tp2", {}),
        ("llama-70b", "h100x8", "bfloat16", "tp,prefix_caching=false,overlap=false", {}),
    ],
)
def test_a_command_makes_the_planned_deployment(model, machine, dtype, name, budgets):
    target = target_from({"model": model, "machine": machine, "dtype": dtype})
    planned = deploy(target, name, **budgets)
    planned = planned.sized(memory_of(target, planned))
    found = started(serve_command(model, planned), target)
    assert replace(found, name="") == replace(planned, name="")


LIMITS = Limits(2.0, 0.2)


def servers(machine: str, model: str, dtype: str) -> list[Server]:
    """All that a search may start from, on parts of the machine."""
    target = target_from({"model": model, "machine": machine, "dtype": dtype})
    load = even_load(Workload(4096, 250), LIMITS)
    return all_servers([target], load, LIMITS, True, {}).servers


@pytest.mark.costs(10)
@pytest.mark.parametrize(
    ("machine", "model", "dtype"),
    [
        ("h200x8", "llama-70b", "fp8"),
        pytest.param("h100x8", "qwen3-32b", "bfloat16", marks=pytest.mark.thorough),
    ],
)
def test_the_command_and_the_file_of_every_server_make_it(machine, model, dtype, tmp_path):
    """On the whole machine, of which a server may have a part."""
    found = servers(machine, model, dtype)
    whole = target_from({"model": model, "machine": machine, "dtype": dtype})
    assert {s.num_devices for s in found} >= {2, 4, 8} and {s.rank for s in found} == {0, 1}
    for server in found:
        planned = server.deployment.sized(memory_of(server.target, server.deployment))
        assert same(started(serve_command(model, planned), whole), planned), server.text
        file = tmp_path / "engine.yaml"
        file.write_text(settings_file(model, planned))
        assert same(started(f"shiftjax serve --config {file}", whole), planned), server.text


def same(found, planned) -> bool:
    return replace(found, name="") == replace(planned, name="")


CHANGES = (
    {"target_ttft": 0.5, "target_tpot": 0.03},
    {"dp": 2},
    {"max_num_batched_tokens": 2048},
    {"max_num_seqs": 512},
    {"fleet": True},
)


def test_changes_are_those_of_the_table():
    server = next(s for s in servers("h200x8", "llama-70b", "fp8") if s.deployment.name == "sp4")
    measured = Measured(1.0, 0.1, 1.0, 1.0, 256, 0)
    trial = Trial(server, 2, 1.0, (measured,), False)
    found = [variant.settings(trial, LIMITS) for variant in VARIANTS]
    assert {name for settings in found for name in settings or ()} == {
        name for settings in CHANGES for name in settings
    }


def test_targets_of_priorities_are_in_the_command():
    target = target_from({"model": "llama-8b", "machine": "h200x8"})
    text = "tp4,target_tpot=0.05,targets_by_priority=1:2.5/0.2,1000:none/none"
    planned = deploy(target, text)
    planned = planned.sized(memory_of(target, planned))
    command = serve_command("llama-8b", planned)
    assert "--target-tpot 0.05" in command and "--target-ttft" not in command
    assert same(started(command, target), planned)


@pytest.mark.parametrize("settings", CHANGES)
def test_the_command_of_every_change_makes_it(settings):
    (server,) = (
        s
        for s in servers("h200x8", "llama-70b", "fp8")
        if s.deployment.name == "sp4" and s.rank == 1
    )
    server = changed(server, {}, settings)
    planned = server.deployment.sized(memory_of(server.target, server.deployment))
    whole = target_from({"model": "llama-70b", "machine": "h200x8", "dtype": "fp8"})
    assert same(started(serve_command("llama-70b", planned), whole), planned)
    assert planned.grid.num_devices == 4 * settings.get("dp", 1)


@pytest.mark.parametrize("machine", ["h200x8", "l40sx8"])
def test_the_printed_command_is_complete(capsys, machine):
    assert main(["plan", "qwen3-32b", "--machine", machine, "--dtype", "fp8"]) == 0
    lines = capsys.readouterr().out.splitlines()
    (start,) = (line.removeprefix("start: ") for line in lines if line.startswith("start: "))
    (tried,) = (line.removeprefix("try:   ") for line in lines if line.startswith("try:   "))
    assert tried == f"{start} --simulate {machine}"
    assert "--max-num-seqs 256 --max-num-batched-tokens 8192" in start
    (rule,) = (line.removeprefix("recommended: ") for line in lines if "recommended: " in line)
    assert set(rule.split()) <= set(start.split())
    assert main([*tried.split()[1:], "--print-config"]) == 0
    printed = capsys.readouterr().out
    assert "max_num_seqs: 256" in printed and "quantization: fp8" in printed

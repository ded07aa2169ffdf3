"""The command that `plan` prints makes the engine that it planned."""

from dataclasses import replace

import pytest

from serving.cli.main import main, make_parser
from serving.run.flags import parse_args, settle
from shiftjax.sim.experiments import target_from
from shiftjax.sim.live import deploy_live
from shiftjax.sim.modelled import memory_of
from shiftjax.sim.named import deploy
from shiftjax.sim.serve_command import serve_command

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

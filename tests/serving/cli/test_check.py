"""`shiftjax check`: the plan, or what is wrong with it, without loading anything."""

from kit import run_command


def test_check_prints_the_plan(capsys):
    flags = ("--model", "random:smollm2-135m", "--sp", "4", "--tp", "2", "--max-model-len", "512")
    code, out, _ = run_command(capsys, "check", *flags)
    rows = {line[:20].strip(): line[20:].strip() for line in out.splitlines()}
    assert code == 0
    assert rows["base mode"] == "sp 4, tp 2"
    assert rows["shift mode"] == "sp 1, tp 8"
    assert rows["query / KV heads"] == "9 / 3, padded to 16 / 4"
    assert rows["longest sequence"] == "512 tokens"
    assert rows["weights"] == "145.2 MiB"  # what loading puts on a device: 152.2 MB


def test_check_refuses_what_the_model_cannot_do(capsys):
    flags = ("--model", "random:smollm2-135m", "--tp", "10", "--max-model-len", "10000")
    code, _, lines = run_command(capsys, "check", *flags)
    assert (code, len(lines)) == (2, 3)  # positions, devices of this test run, heads

"""Flags are made from the fields of the settings; what is wrong with them is said all at once."""

import argparse
from collections.abc import Mapping

import pytest
from kit import run_command

from serving.cli.main import UNSHOWN, make_parser
from serving.run.flags import SAMPLING_SETTINGS
from serving.server.options import SERVER_SETTINGS
from shiftjax.config import SETTINGS


def subparsers() -> Mapping[str, argparse.ArgumentParser]:
    actions = make_parser()._actions
    return next(a.choices for a in actions if isinstance(a, argparse._SubParsersAction))


@pytest.mark.parametrize("command", ["generate", "chat", "check"])
def test_the_flags_are_those_of_the_fields(command):
    settings = SETTINGS | (SERVER_SETTINGS if command == "check" else {})
    expected = {flag for setting in settings.values() for flag in setting.flags}
    parser = subparsers()[command]
    flags = {flag for action in parser._actions for flag in action.option_strings}
    assert expected <= flags
    fixed = {"--config", "--print-config", "--help", "-h", "--stats", "--prompts", "--system"}
    fixed |= {"--speculative-config"}
    negations = {f for f in flags if f.startswith("--no-")}
    settings = SERVER_SETTINGS if command == "check" else SAMPLING_SETTINGS
    others = {flag for setting in settings.values() for flag in setting.flags}
    assert flags - expected - fixed - negations <= others | {"--sampling-seed"}
    dests = {action.dest for action in parser._actions}
    assert set(SETTINGS) <= dests


def test_commands_have_the_sampling_flags_that_they_honour():
    for command, without in (("generate", set(UNSHOWN)), ("chat", {"n", *UNSHOWN})):
        dests = {action.dest for action in subparsers()[command]._actions}
        fields = {d.removeprefix("sampling_") for d in dests if d.startswith("sampling_")}
        assert fields == set(SAMPLING_SETTINGS) - without


def test_names_of_the_interface_are_flags():
    flags = set(subparsers()["generate"]._option_string_actions)
    assert flags >= {
        *("--model", "--tokenizer", "--dtype", "--kv-cache-dtype", "--max-model-len", "--seed"),
        *("--max-num-seqs", "--max-num-batched-tokens", "--block-size", "--memory-fraction"),
        *("--tensor-parallel-size", "--tp", "--sequence-parallel-size", "--sp", "--policy"),
        *("--pipeline-parallel-size", "--pp", "--data-parallel-size", "--dp", "--devices"),
        *("--shift-parallel-threshold", "--shift-threshold", "--enable-prefix-caching"),
    }


def test_names_of_the_server_are_flags():
    flags = set(subparsers()["serve"]._option_string_actions)
    assert flags >= {
        *("--served-model-name", "--host", "--port", "--grpc-port", "--max-num-queued-reqs"),
        *("--max-num-queued-tokens", "--shutdown-timeout", "--max-logprobs", "--api-key"),
        *("--ssl-certfile", "--ssl-keyfile", "--ssl-ca-certs", "--metrics-prefix"),
    }


def test_the_commands_and_benchmarks_of_the_interface_exist():
    commands = subparsers()
    assert set(commands) >= {
        *("generate", "chat", "serve", "batch", "bench", "plan", "mesh", "convert", "check")
    }
    actions = commands["bench"]._actions
    kinds = next(a.choices for a in actions if isinstance(a, argparse._SubParsersAction))
    assert set(kinds) >= {"serve", "latency", "throughput", "startup", "kernels"}


def test_all_problems_come_on_lines_of_their_own(capsys, monkeypatch, tmp_path):
    config = tmp_path / "c.yaml"
    config.write_text("dp: 0\n")
    monkeypatch.setenv("SHIFTJAX_SEED", "x")
    flags = ("--tp", "two", "--block-size=3", "--tpp", "3", "--top-p", "7", "--temperature", "hot")
    code, out, lines = run_command(capsys, "generate", "--config", str(config), *flags, "hello")
    assert (code, out) == (2, "")
    assert lines == [
        "shiftjax: unknown flag '--tpp'; did you mean --tp?",
        f"shiftjax: {config}, line 1: dp: must be at least 1, got 0",
        "shiftjax: SHIFTJAX_SEED: must be a whole number, got 'x'",
        "shiftjax: --tensor-parallel-size/--tp: must be a whole number, got 'two'",
        "shiftjax: --block-size: must be a power of two, got 3",
        "shiftjax: temperature must be a number, not 'hot'",
        "shiftjax: top_p must be between 0 and 1, not 7.0",
    ]

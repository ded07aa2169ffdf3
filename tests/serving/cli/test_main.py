"""The command line: generated flags, all problems on lines of their own, exit codes."""

import argparse
import io
import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from kit import TEMPLATE, byte_tokenizer

from serving.cli.main import UNSHOWN, guarded, main, make_parser
from serving.run.flags import SAMPLING_SETTINGS
from shiftjax.config import SETTINGS, EngineConfig
from shiftjax.control.request import RequestError
from shiftjax.settings import dump_yaml, resolve
from shiftjax.text.errors import TokenizerError
from shiftjax.weights.source import CheckpointError

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def no_settings_around(monkeypatch):
    for name in SETTINGS:
        monkeypatch.delenv(f"SHIFTJAX_{name.upper()}", raising=False)


def run(capsys, *argv: str) -> tuple[int, str, list[str]]:
    """(exit code, stdout, lines of stderr) of one command."""
    code = main(argv)
    out, err = capsys.readouterr()
    return code, out, err.splitlines()


def subparsers() -> Mapping[str, argparse.ArgumentParser]:
    actions = make_parser()._actions
    return next(a.choices for a in actions if isinstance(a, argparse._SubParsersAction))


@pytest.mark.parametrize("command", ["generate", "chat", "check"])
def test_the_flags_are_those_of_the_fields(command):
    expected = {flag for setting in SETTINGS.values() for flag in setting.flags}
    parser = subparsers()[command]
    flags = {flag for action in parser._actions for flag in action.option_strings}
    assert expected <= flags
    fixed = {"--config", "--print-config", "--help", "-h", "--stats", "--prompts", "--system"}
    negations = {f for f in flags if f.startswith("--no-")}
    sampling = (
        set() if command == "check" else {f for s in SAMPLING_SETTINGS.values() for f in s.flags}
    )
    assert flags - expected - fixed - negations <= sampling | {"--sampling-seed"}
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
    code, out, lines = run(capsys, "generate", "--config", str(config), *flags, "hello")
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


@pytest.mark.parametrize(
    ("argv", "fragment"),
    [
        ((), "the following arguments are required: COMMAND"),
        (("serve", "--ssl-certfile", "c.pem"), "ssl_certfile and ssl_keyfile go together"),
        (("serve", "--port", "70000"), "must be at most 65535"),
        (("serve", "--served-model-name", " , "), "served_model_name holds no name"),
        (("serve", "--metrics-prefix", "a b{"), "metrics_prefix must be letters"),
        (("generate",), "no prompt was given"),
        (("generate", "--tp"), "expected one argument"),
        (("generate", "--prompts", "/absent", "x"), "--prompts /absent: cannot be read"),
        (("generate", "--config", "/absent.yaml", "x"), "/absent.yaml: cannot be read"),
        (("generate", "--logprobs", "3", "x"), "unknown flag '--logprobs'"),
        (("chat", "hello"), "unexpected argument 'hello'"),
        (("check", "--machine", "h200x8"), "has no meaning with policy = threshold"),
        (("check", "--devices", "8", "--sp", "2", "--tp", "2"), "4 devices, but devices = 8"),
        (("convert", "smollm2-135m", "x", "--to", "gguf"), "invalid choice: 'gguf'"),
        (("convert", "smollm2-135m", ".", "--to", "orbax"), "is not an empty directory"),
    ],
)
def test_wrong_usage_is_exit_code_2(capsys, argv, fragment):
    code, out, lines = run(capsys, *argv)
    assert (code, out, len(lines)) == (2, "", 1)
    assert fragment in lines[0]


@pytest.mark.parametrize(
    "argv",
    [
        ("check", "--model", "/absent/model"),
        ("check", "--model", "smollm-135m"),
        ("convert", "/absent/model", "/absent/output", "--to", "orbax"),
    ],
)
def test_a_model_that_is_not_there_is_exit_code_3(capsys, argv):
    code, out, lines = run(capsys, *argv)
    assert (code, out, len(lines)) == (3, "", 1)


def test_a_damaged_model_is_exit_code_3(capsys, tmp_path):
    (tmp_path / "config.json").write_text("{")
    code, _, lines = run(capsys, "check", "--model", str(tmp_path))
    assert code == 3
    assert str(tmp_path) in lines[0]


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (CheckpointError("one", "two"), 3),
        (TokenizerError("one"), 3),
        (RequestError("one"), 2),
        (KeyboardInterrupt(), 130),
        (FileNotFoundError(2, "one", "file"), 1),
    ],
)
def test_errors_have_codes(capsys, error, code):
    def fail() -> int:
        raise error

    assert guarded(fail) == code
    words = "file: one" if isinstance(error, OSError) else str(error)
    expected = [f"shiftjax: {line}" for line in words.splitlines()]
    assert capsys.readouterr().err.splitlines() == expected


def test_a_bug_is_not_hidden():
    with pytest.raises(ZeroDivisionError):
        guarded(lambda: 1 // 0)


def test_a_printed_config_is_a_config_file(capsys, tmp_path):
    flags = ("--sp", "4", "--tp=2", "--no-enable-prefix-caching", "--token-buckets", "64,1024")
    code, text, _ = run(capsys, "check", "--print-config", *flags)
    assert code == 0
    file = tmp_path / "c.yaml"
    file.write_text(text)
    code, again, _ = run(capsys, "generate", "--config", str(file), "--print-config")
    assert (code, again) == (0, text)
    assert text == dump_yaml(
        EngineConfig.from_options(sp=4, tp=2, prefix_caching=False, token_buckets=[64, 1024])
    )
    assert resolve({}, {}, text).parallel.sp == 4


def test_check_prints_the_plan(capsys):
    flags = ("--model", "random:smollm2-135m", "--sp", "4", "--tp", "2", "--max-model-len", "512")
    code, out, _ = run(capsys, "check", *flags)
    rows = {line[:20].strip(): line[20:].strip() for line in out.splitlines()}
    assert code == 0
    assert rows["base mode"] == "sp 4, tp 2"
    assert rows["shift mode"] == "sp 1, tp 8"
    assert rows["query / KV heads"] == "9 / 3, padded to 16 / 4"
    assert rows["longest sequence"] == "512 tokens"


def test_check_refuses_what_the_model_cannot_do(capsys):
    flags = ("--model", "random:smollm2-135m", "--tp", "10", "--max-model-len", "10000")
    code, _, lines = run(capsys, "check", *flags)
    assert (code, len(lines)) == (2, 3)  # positions, devices of this test run, heads


def test_text_that_is_not_unicode_is_refused_in_words(capsys, monkeypatch, tmp_path):
    """What a shell or a pipe passes on need not be UTF-8."""
    byte_tokenizer().backend.save(str(tmp_path / "tokenizer.json"))
    settings = {"chat_template": TEMPLATE, "tokenizer_class": "PreTrainedTokenizerFast"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    tiny = ("--model=random:tiny", f"--tokenizer={tmp_path}", "--sp=1", "--tp=1")
    tiny += ("--num-blocks=20", "--max-model-len=64", "--token-buckets=32", "--max-num-seqs=2")
    tiny += ("--max-num-batched-tokens=32",)
    code, _, lines = run(capsys, "generate", *tiny, "a\udcff")
    assert code == 2
    assert lines == ["shiftjax: The prompt is not valid Unicode at character 1: is it UTF-8?"]
    for errors, words in (("surrogateescape", "not valid Unicode"), ("strict", "not utf-8 text")):
        text = io.TextIOWrapper(io.BytesIO(b"\xff\n"), encoding="utf-8", errors=errors)
        monkeypatch.setattr("sys.stdin", text)
        code, _, lines = run(capsys, "chat", *tiny)
        assert code == 0
        assert words in lines[0]


def test_help_needs_no_jax_and_names_the_exit_codes():
    code = (
        "import sys\nfrom serving.cli.main import main\n"
        "try: main(['generate', '--help'])\nexcept SystemExit: pass\n"
        "sys.exit('jax' in sys.modules)"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0
    assert "exit codes:" in run.stdout
    assert "3  the model cannot be found or read" in run.stdout


def test_version(capsys):
    code, out, _ = run(capsys, "version")
    assert code == 0
    assert out.startswith("shiftjax ")

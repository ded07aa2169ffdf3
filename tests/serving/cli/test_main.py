"""The command line: commands, exit codes, what --help costs."""

import importlib
import inspect
import io
import json
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from engines import checkpoint
from kit import TEMPLATE, byte_tokenizer, run_command
from oracle import numpy_llama

from serving.cli.help import HELP, commands_of
from serving.cli.main import guarded, make_parser
from serving.run.flags import parse_args
from shiftjax.config import EngineConfig
from shiftjax.core.request import RequestError
from shiftjax.settings import dump_yaml, resolve
from shiftjax.text.errors import TokenizerError
from shiftjax.text.tokenizer import load_tokenizer
from shiftjax.weights.locate import open_source, resolve_model
from shiftjax.weights.source import CheckpointError

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    ("argv", "fragment"),
    [
        (("serv",), "unknown command 'serv'; did you mean serve?"),
        (("mesh", "simulat", "--trace", "x"), "did you mean simulate?"),
        (("x" * 90,), "unknown command"),
        (("serve", "--ssl-certfile", "c.pem"), "ssl_certfile and ssl_keyfile go together"),
        (("serve", "--port", "70000"), "must be at most 65535"),
        (("serve", "--served-model-name", " , "), "served_model_name holds no name"),
        (("serve", "--metrics-prefix", "a b{"), "metrics_prefix must be letters"),
        (("generate",), "no prompt was given"),
        (("generate", "--tp"), "expected one argument"),
        (("generate", "--prompts", "/absent", "x"), "--prompts /absent: cannot be read"),
        (("generate", "--config", "/absent.yaml", "x"), "/absent.yaml: cannot be read"),
        (("generate", "--logprobs", "3", "x"), "unknown flag '--logprobs'"),
        (("chat", "smollm2-135m", "hello"), "unexpected argument 'hello'"),
        (("serve", "tiny", "--model=tiny-bert"), "'tiny' and --model 'tiny-bert' are two models"),
        (("convert", "x", "--to", "orbax"), "no model was given"),
        (("check", "--machine", "h200x8", "--pp", "2"), "has no meaning with policy = threshold"),
        (("check", "--devices", "8", "--sp", "2", "--tp", "2"), "4 devices, but devices = 8"),
        (("convert", "smollm2-135m", "x", "--to", "gguf"), "invalid choice: 'gguf'"),
        (("convert", "smollm2-135m", ".", "--to", "orbax"), "is not an empty directory"),
    ],
)
def test_wrong_usage_is_exit_code_2(capsys, argv, fragment):
    code, out, lines = run_command(capsys, *argv)
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
    code, out, lines = run_command(capsys, *argv)
    assert (code, out, len(lines)) == (3, "", 1)


def test_a_damaged_model_is_exit_code_3(capsys, tmp_path):
    (tmp_path / "config.json").write_text("{")
    code, _, lines = run_command(capsys, "check", "--model", str(tmp_path))
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


@pytest.mark.parametrize(
    "argv", [(), ("mesh",), ("bench",), ("convert",), ("batch",), ("embed",), ("mesh", "simulate")]
)
def test_a_command_alone_that_needs_more_prints_its_help(capsys, argv):
    code, out, lines = run_command(capsys, *argv)
    assert (code, lines) == (2, [])
    assert out.startswith(f"usage: {' '.join(('shiftjax', *argv))} ")
    assert "\nexamples:\n" in out and "\nexit codes:\n" in out


PARSERS = dict(commands_of(make_parser()))


@pytest.mark.parametrize("name", PARSERS)
def test_help_is_a_line_of_usage_flags_that_one_needs_first_and_examples(name):
    text = PARSERS[name].format_help()
    usage, _, _ = text.partition("\n\n")
    assert len(usage.splitlines()) <= 2, usage
    flags, examples = HELP[name].flags, HELP[name].examples
    num_flags = len(PARSERS[name]._option_string_actions)
    assert len(flags) == 5 or (not flags and num_flags < 15)
    first = text.partition("\n\n")[2].partition("\npositional")[0].partition("\noptions:")[0]
    assert all(flag in first for flag in flags)
    for line in examples:
        assert f"  {line}\n" in text
        program, *words = shlex.split(line)
        assert program == "shiftjax" and " ".join(words).startswith(name)
        assert not parse_args(make_parser(), words).problems


def test_the_table_of_help_has_nobody_else():
    assert set(HELP) == set(PARSERS)


def test_ctrl_c_while_modules_are_imported_leaves_no_traceback():
    """The signal comes when the command line is looked for."""
    code = (
        "import os, signal, sys\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # whatever started the tests
        "from serving.cli.entry import main\n"
        "class Finder:\n"
        "    def find_spec(self, name, path, target=None):\n"
        "        if name == 'serving.cli.main': os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Finder())\n"
        "main()"
    )
    command = [sys.executable, "-c", code]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (run.returncode, run.stdout, run.stderr) == (-signal.SIGINT, "", "")


def test_ctrl_c_that_is_ignored_stays_so_and_the_program_runs():
    for ignored in (True, False):
        code = (
            "import signal, sys\n"
            "from serving.cli.entry import main\n"
            f"if {ignored}: signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
            "was = signal.getsignal(signal.SIGINT)\n"
            "sys.argv = ['shiftjax', 'version']\n"
            "sys.exit(main() or signal.getsignal(signal.SIGINT) is not was)"
        )
        command = [sys.executable, "-c", code]
        run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        assert (run.returncode, run.stderr) == (0, "")
        assert run.stdout.startswith("shiftjax ")


def test_a_printed_config_is_a_config_file(capsys, tmp_path):
    flags = ("--sp", "4", "--tp=2", "--no-enable-prefix-caching", "--token-buckets", "64,1024")
    code, text, _ = run_command(capsys, "generate", "--print-config", *flags)
    assert code == 0
    file = tmp_path / "c.yaml"
    file.write_text(text)
    code, again, _ = run_command(capsys, "check", "--config", str(file), "--print-config")
    assert code == 0 and again.startswith(f"{text}\n# server\n")
    assert text == dump_yaml(
        EngineConfig.from_options(sp=4, tp=2, prefix_caching=False, token_buckets=[64, 1024])
    )
    assert resolve({}, {}, text).parallel.sp == 4


@pytest.mark.costs(8)
def test_text_that_is_not_unicode_is_refused_in_words(capsys, monkeypatch, tmp_path):
    """What a shell or a pipe passes on need not be UTF-8."""
    byte_tokenizer().backend.save(str(tmp_path / "tokenizer.json"))
    settings = {"chat_template": TEMPLATE, "tokenizer_class": "PreTrainedTokenizerFast"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    tiny = ("--model=random:tiny", f"--tokenizer={tmp_path}", "--sp=1", "--tp=1")
    tiny += ("--num-blocks=20", "--max-model-len=64", "--token-buckets=32", "--max-num-seqs=2")
    tiny += ("--max-num-batched-tokens=32",)
    code, _, lines = run_command(capsys, "generate", *tiny, "a\udcff")
    assert code == 2
    assert lines == ["shiftjax: The prompt is not valid Unicode at character 1: is it UTF-8?"]
    for errors, words in (("surrogateescape", "not valid Unicode"), ("strict", "not utf-8 text")):
        text = io.TextIOWrapper(io.BytesIO(b"\xff\n"), encoding="utf-8", errors=errors)
        monkeypatch.setattr("sys.stdin", text)
        code, _, lines = run_command(capsys, "chat", *tiny)
        assert code == 0
        assert words in lines[0]


@pytest.mark.parametrize("argv", [["--help"], ["generate", "--help"]])
def test_help_imports_little_and_names_the_exit_codes(argv):
    heavy = {"jax", "numpy", "ml_dtypes", "rich", "yaml", "shiftjax.sim", "serving.cli.commands"}
    code = (
        "import sys\nfrom serving.cli.main import main\n"
        f"try: main({argv})\nexcept SystemExit: pass\n"
        f"sys.exit(' '.join({heavy} & set(sys.modules)) or 0)"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (run.returncode, run.stderr) == (0, "")
    assert "exit codes:" in run.stdout
    assert "3  the model cannot be found or read" in run.stdout


def test_every_command_is_where_the_parser_says():
    places = set(filter(None, (each.get_default("run") for each in PARSERS.values())))
    assert len(places) > 10
    for place in places:
        module, _, name = place.rpartition(".")
        parameters = inspect.signature(
            getattr(importlib.import_module(f"serving.{module}"), name)
        ).parameters
        assert [*parameters] == ["arguments", "config", "sampling"]


@pytest.mark.parametrize(
    ("argv", "own"),
    [
        ("serve", ()),
        ("chat", ()),
        ("check", ()),
        ("plan", ()),
        ("mesh simulate --trace=poisson", ()),
        ("bench latency", ()),
        ("bench throughput", ()),
        ("bench startup", ()),
        ("bench steps", ()),
        ("batch --output=c", ("input",)),
        ("embed", ("input", "output")),
        ("convert --to=orbax", ("output",)),
    ],
)
def test_the_model_is_the_first_word_or_a_flag(argv, own):
    """Wherever flags stand, and the words behind it keep their places."""
    files = ["a/b", "c"][: len(own)]
    command, flag = argv.split(), ["--model", "m/x"]
    for words in (
        [*command, "m/x", *files],
        [*command, *flag, *files],
        [*command, *files, *flag],
        [*command, "m/x", *flag, *files],
        [*command, "m/x", *files[:1], *flag, *files[1:]],
    ):
        arguments = parse_args(make_parser(), words)
        assert not arguments.problems, words
        assert arguments.model == "m/x"
        assert [str(getattr(arguments, name)) for name in own] == files
    assert parse_args(make_parser(), [*command, *files]).model is None


def test_a_model_converted_for_hugging_face_gives_the_same_tokens(capsys, tmp_path):
    """By way of Orbax; another implementation computes what each directory holds."""
    shared, config, tensors = checkpoint()
    directory = shutil.copytree(shared, tmp_path / "m")
    tokenizer = byte_tokenizer()
    tokenizer.save(directory)
    for start, end, format in ((directory, "o", "orbax"), (tmp_path / "o", "h", "hf")):
        code, out, _ = run_command(
            capsys, "convert", str(start), str(tmp_path / end), "--to", format
        )
        assert (code, out) == (0, f"{tmp_path / end}\n")
    result = tmp_path / "h"
    assert json.loads((result / "config.json").read_text())["model_type"] == "llama"
    assert load_tokenizer(result).backend.to_str() == tokenizer.backend.to_str()
    location = resolve_model(str(result))
    assert location.kind == "huggingface"
    source = open_source(location)
    written = {name: source.read(name) for name in source.tensors}
    prompt = [5, 6, 7, 8]
    expected = numpy_llama.greedy(config, tensors, prompt, 8)
    assert numpy_llama.greedy(config, written, prompt, 8) == expected


def test_version(capsys):
    code, out, _ = run_command(capsys, "version")
    assert code == 0
    assert out.startswith("shiftjax ")


def test_the_base_install_has_the_command():
    """What `pip install .` brings is enough for the command line; serving's packages are extras."""
    absent = ("msgspec", "starlette", "uvicorn", "grpc", "llguidance", "prometheus_client")
    code = f"import sys; sys.modules.update(dict.fromkeys({absent})); import serving.cli.main"
    code += ", serving.run.start, serving.cli.commands, serving.cli.embed"
    subprocess.run([sys.executable, "-c", code], check=True)

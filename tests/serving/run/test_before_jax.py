"""What is wrong with names, files and settings is found before JAX is imported."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from engines import checkpoint
from kit import EOS, VOCAB_SIZE, byte_tokenizer

ROOT = Path(__file__).parents[3]
OWN = {  # words of the command's own behind the model
    "serve": ("--port=0", "--grpc-port=0"),
    "check": (),
    "chat": (),
    "generate": ("hello",),
    "batch": ("INPUT", "--output=OUTPUT"),
    "embed": ("INPUT", "OUTPUT.npy"),
}
RUN = """
import json, sys
from serving.cli.main import main
for argv in json.loads(sys.argv[1]):
    print("exit code", main(argv), "jax" in sys.modules, file=sys.stderr)
"""


def results_of(commands: list[list[str]]) -> list[tuple[str, str]]:
    """(last line on stderr, exit code and whether JAX was imported) of each, in one process."""
    code = [sys.executable, "-c", RUN, json.dumps(commands)]
    run = subprocess.run(code, cwd=ROOT, capture_output=True, text=True, check=True)
    lines = [line for line in run.stderr.splitlines() if " INFO " not in line]
    ends = [at for at, line in enumerate(lines) if line.startswith("exit code")]
    return [(lines[at - 1], lines[at].removeprefix("exit code ")) for at in ends]


def model_flag(command: str, model: str | Path) -> list[str]:
    return [command, f"--model={model}", *OWN[command]]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A model with a tokenizer, in a copy that may be damaged."""
    path = tmp_path / "model"
    path.mkdir()
    for file in checkpoint(vocab_size=VOCAB_SIZE, eos_token_id=EOS)[0].iterdir():
        (path / file.name).write_bytes(file.read_bytes())
    byte_tokenizer().save(path)
    return path


def test_a_model_that_is_not_there_costs_no_import_of_jax(tmp_path):
    (tmp_path / "INPUT").write_text('{"prompt": [1], "max_tokens": 1}\n')
    words = {"INPUT": str(tmp_path / "INPUT"), "OUTPUT.npy": str(tmp_path / "x.npy")}
    words["--output=OUTPUT"] = f"--output={tmp_path / 'y'}"
    commands = [
        [words.get(word, word) for word in model_flag(command, model)]
        for command in OWN
        for model in ("nosuch", "./missing")
    ]
    for command in (c for c in commands if c[0] == "batch"):
        command += ["--format=plain", "--resume"]
    results = results_of(commands)
    assert len(results) == len(commands)
    for command, (line, end) in zip(commands, results, strict=True):
        assert end == "3 False", (command, line)
        wrong = "./missing: no such file" if "missing" in command[1] else "'nosuch' is no path"
        assert wrong in line


@pytest.mark.parametrize(
    ("name", "text", "code", "words"),
    [
        ("config.json", "{bad", 3, "config.json"),
        ("tokenizer.json", "{bad", 3, "tokenizer.json"),
        ("chat_template.jinja", "{% for", 3, "The chat template is wrong at line 1"),
        ("model.safetensors", "short", 3, "model.safetensors"),
    ],
)
def test_a_damaged_file_is_found_before_jax_is_imported(directory, name, text, code, words):
    assert (directory / name).exists() or name.startswith("chat")
    (directory / name).write_text(text)
    commands = [model_flag(command, directory) for command in ("serve", "check")]
    for line, end in results_of(commands):
        assert end == f"{code} False", line
        assert words in line


def test_a_chat_template_that_is_wrong_is_a_wrong_setting(directory):
    flags = ["--chat-template={% for"]
    for line, end in results_of([model_flag(c, directory) + flags for c in ("serve", "check")]):
        assert end == "2 False", line
        assert "chat_template: The chat template is wrong at line 1" in line

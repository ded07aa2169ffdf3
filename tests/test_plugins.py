"""Plugins of a real package, installed where only these tests look."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from spent import quick, thorough

from shiftjax.options import ConfigError
from shiftjax.plugins import load_plugins, loaded_plugins

PROJECT = """
[build-system]
requires = ["setuptools"]
build-backend = "setuptools.build_meta"
[project]
name = "modest-plugins"
version = "1.2"
[tool.setuptools]
py-modules = ["modest_plugins"]
[project.entry-points."shiftjax.plugins"]
calls = "modest_plugins:add_formats"
models = "modest_plugins:add_models"
parity = "modest_plugins:add_policies"
"""
MODULE = """
from shiftjax.registry import Decoder, Policy, add_decoder, add_policy
from serving.server.registry import CallMarks, ToolFormat, Written, add_tool_format
from serving.server.registry import ThinkingMarks, add_thinking_marks

print("imported")


class Parity(Policy):
    name = "parity"

    def mode_of(self, work, modes, num_waiting, last_mode):
        return modes[work.num_tokens % 2 - 1]


def add_policies():
    add_policy(Parity)


def add_models():
    add_decoder("modest", Decoder("ModestForCausalLM", {"qk_norm": True}))


def add_formats():
    add_thinking_marks("modest", ThinkingMarks("<<why>>", "<</why>>", "<</why>>"))
    marks = CallMarks(("<<call>>",), "<</call>>")
    written = Written('<<call>>{"name": "', '", "arguments": ', "}<</call>>")
    add_tool_format("modest", ToolFormat(("<<call>>",), marks, written))
"""
FAILING = PROJECT.replace("modest", "broken").replace('calls = "broken_plugins:add_formats"', "")
MODEL = """
import json, tempfile
from pathlib import Path
from shiftjax import LLM, SamplingParams

config = {"model_type": "modest", "vocab_size": 64, "hidden_size": 16, "intermediate_size": 32}
config |= {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}
config |= {"max_position_embeddings": 64, "architectures": ["ModestForCausalLM"]}
folder = Path(tempfile.mkdtemp())
(folder / "config.json").write_text(json.dumps(config))
"""


def install(folder: Path, project: str, name: str, module: str) -> Path:
    """Let pip build and install a package; the folder where Python finds it."""
    source, target = folder / "source", folder / "installed"
    source.mkdir(parents=True)
    (source / "pyproject.toml").write_text(project)
    (source / f"{name}.py").write_text(module)
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "install"]
    pip += ["--no-index", "--no-deps", "--no-build-isolation", "--target", str(target)]
    subprocess.run([*pip, str(source)], check=True)
    return target


class Python:
    """An interpreter that finds what was installed."""

    def __init__(self, *paths: Path):
        kept = {k: v for k, v in os.environ.items() if not k.startswith("SHIFTJAX_")}
        old = kept.get("PYTHONPATH", "")
        self.environ = kept | {"PYTHONPATH": os.pathsep.join([*map(str, paths), old])}

    def run(self, *words: str, code: int = 0, **variables: str) -> str:
        run = subprocess.run(
            [sys.executable, *words],
            env=self.environ | variables,
            capture_output=True,
            text=True,
            check=False,
        )
        assert run.returncode == code, run.stderr
        return run.stdout + run.stderr

    def shiftjax(self, *words: str, code: int = 0, **variables: str) -> str:
        return self.run("-m", "shiftjax", *words, code=code, **variables)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return install(tmp_path_factory.mktemp("plugins"), PROJECT, "modest_plugins", MODULE)


@pytest.fixture
def python(folder) -> Python:
    return Python(folder)


def test_what_a_plugin_adds_is_a_choice_of_settings(python):
    flags = ("--policy=parity", "--tool-parser=modest", "--reasoning-parser=modest")
    text = python.shiftjax("serve", "random:tiny", *flags, "--print-config")
    assert text.count("imported") == 1
    assert "policy: parity" in text and "tool_parser: modest" in text
    assert "reasoning_parser: modest" in text
    refused = python.shiftjax("serve", "random:tiny", "--policy=even", code=2)
    assert "must be one of threshold, cost, base, shift, parity" in refused


@pytest.mark.parametrize("as_flag", quick([True, False], False))
def test_a_setting_says_which_are_loaded(python, as_flag):
    def serve(plugins: str, *flags: str, code: int = 0) -> str:
        given = [f"--plugins={plugins}"] if as_flag else []
        variables = {} if as_flag else {"SHIFTJAX_PLUGINS": plugins}
        words = ("serve", "random:tiny", "--print-config", *given, *flags)
        return python.shiftjax(*words, code=code, **variables)

    assert "imported" not in serve("none")
    assert "--policy: must be one of" in serve("none", "--policy=parity", code=2)
    assert "--policy: must be one of" in serve("calls", "--policy=parity", code=2)
    assert "policy: parity" in serve("parity, calls", "--policy=parity")
    unknown = serve("party", code=2)
    assert "unknown plugin 'party'; did you mean parity?" in unknown
    assert "installed are calls, models, parity" in unknown


def test_a_file_of_settings_says_it_too(python, tmp_path):
    (tmp_path / "settings.yaml").write_text("plugins: none\n")
    text = python.shiftjax(
        "serve", "random:tiny", f"--config={tmp_path}/settings.yaml", *["--print-config"]
    )
    assert "imported" not in text and "plugins: none" in text


def test_plans_know_the_policies_of_plugins(python):
    numbers = ("rate=4", "seconds=3", "prompt_tokens=300", "output_tokens=9")
    trace = ("--trace", "poisson", *(word for each in numbers for word in ("--set", each)))
    words = ("mesh", "simulate", *trace, "--machine", "a10x8", "llama-8b", "--compare")
    assert "mode by parity" in python.shiftjax(*words, "shift,parity")
    refused = python.shiftjax(*words, "parity", code=2, SHIFTJAX_PLUGINS="none")
    assert "unknown deployment 'parity'" in refused


def test_a_server_names_them_in_its_log(python):
    """And runs with the policy of one."""
    words = ["serve", "llama-8b", "--simulate=a10x8", "--policy=parity", "--port=0"]
    command = [sys.executable, "-m", "shiftjax", *words, "--grpc-port=0"]
    pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    log = ""
    with subprocess.Popen(command, env=python.environ, text=True, **pipes) as process:
        assert process.stderr is not None
        for line in process.stderr:
            log += line
            if "ready after" in line:
                process.terminate()
    assert process.returncode == 0, log
    for name in ("add_formats", "add_models", "add_policies"):
        assert f"of modest-plugins 1.2 (modest_plugins:{name})" in log


def test_calls_and_thoughts_in_the_formats_of_a_plugin_are_found(python):
    code = """
from serving.server.formats.tool_formats import FORMATS, make_parser, reasoning_format, tool_format
from serving.server.formats.pieces import CallBegin, Reasoning
from serving.server.tools import ToolWish
from serving.server.fields import Function
from shiftjax.plugins import load_plugins

load_plugins("calls")
template = "<<call>>{{ tools }}<</call>>"
form = tool_format("auto", template)
assert form is FORMATS["modest"] is tool_format("modest", template)
assert reasoning_format("auto", "{{ x }}<</why>>") == "modest"
parser = make_parser(form, ToolWish((Function("add"),)), "modest", is_inside=False)
text = '<<why>>so<</why>><<call>>{"name": "add", "arguments": {"a": 1}}<</call>>'
pieces = [*parser.feed(text), *parser.finish()]
assert [each.name for each in pieces if isinstance(each, CallBegin)] == ["add"], pieces
assert "".join(each.text for each in pieces if isinstance(each, Reasoning)) == "so", pieces
"""
    python.run("-c", code)


@pytest.mark.costs(12)
def test_a_model_of_a_plugin_generates(python):
    sampling = "SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)"
    code = MODEL + textwrap.dedent(
        f"""
        llm = LLM(f"random:{{folder}}", devices=1, max_model_len=32, dtype="float32", num_blocks=16,
                  max_num_seqs=2, max_num_batched_tokens=16, token_buckets=(16,))
        (output,) = llm.generate([[5, 6, 7]], {sampling})
        assert len(output.outputs[0].token_ids) == 3
        from shiftjax.weights.hf_config import read_config
        assert read_config(folder).qk_norm
        """
    )
    python.run("-c", code)
    refused = python.run("-c", code.replace("devices=1", 'devices=1, plugins="none"'), code=1)
    assert "model_type must be one of" in refused


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("raise KeyError('colour')", "KeyError: 'colour'"),
        *thorough(
            ("from shiftjax.registry import nothing", "ImportError: cannot import name 'nothing'")
        ),
        (
            "from shiftjax.core.policies import GreedyPolicy\\n    from shiftjax.registry import "
            "add_policy\\n    add_policy(GreedyPolicy)",
            "ValueError: there is a policy 'greedy' already",
        ),
    ],
)
def test_a_plugin_that_fails_is_named(python, folder, tmp_path, body, reason):
    functions = "".join(f"def {name}():\n    {body}\n" for name in ("add_models", "add_policies"))
    broken = install(tmp_path, FAILING, "broken_plugins", functions.replace("\\n", "\n"))
    both = Python(broken)
    text = both.shiftjax("serve", "random:tiny", "--print-config", code=2)
    (line,) = text.splitlines()
    assert line.startswith("shiftjax: plugin models of broken-plugins 1.2 (broken_plugins:add_")
    assert reason in line and line.endswith("--plugins says which to load")
    assert "plugins: none" in both.shiftjax(
        "serve", "random:tiny", "--print-config", "--plugins=none"
    )


def test_nothing_is_loaded_where_nothing_is_installed():
    before = loaded_plugins()
    load_plugins()
    assert loaded_plugins() == before
    with pytest.raises(ConfigError, match="plugins: must be text, got 3"):
        load_plugins(3)
    assert json.dumps(before) == "[]"

"""`--config` files as vLLM's users have them."""

import argparse

import pytest

from serving.cli.main import main, make_parser
from serving.run.flags import parse_args, settle
from serving.run.foreign_file import in_our_words
from shiftjax.config import EngineConfig
from shiftjax.options import ConfigError
from shiftjax.settings import read_yaml

PARSER = make_parser()
OF_VLLM = """\
model: some/model
port: 8123
tensor-parallel-size: 4   # of each group
gpu-memory-utilization: 0.8
max_num_seqs: 32
enable-chunked-prefill: true
no-enable-prefix-caching: true
async-scheduling: false
served-model-name: [a, b]
dtype: half
compilation-config:
  mode: 3
  cudagraph_capture_sizes: [1, 2]
speculative-config:
  method: ngram
  num_speculative_tokens: 3
  prompt_lookup_max: 4
override-generation-config: {"temperature": 0.6}
uvicorn-log-level: info
shift_threshold: 99
"""


def opened(path, *words: str) -> tuple[argparse.Namespace, EngineConfig]:
    arguments = parse_args(PARSER, ["serve", "--config", str(path), *words])
    return arguments, settle(arguments)[0]


def test_a_file_of_vllm_sets_ours(tmp_path, caplog):
    path = tmp_path / "serve.yaml"
    path.write_text(OF_VLLM, "utf-8")
    arguments, config = opened(path)
    assert (config.model.model, config.model.dtype) == ("some/model", "float16")
    assert config.model.override_generation_config == '{"temperature": 0.6}'
    assert (config.parallel.tp, config.scheduler.shift_threshold) == (4, 99)
    assert (config.cache.memory_fraction, config.cache.prefix_caching) == (0.8, False)
    assert (config.scheduler.overlap, config.scheduler.max_num_seqs) == (False, 32)
    assert (config.drafts.speculation, config.drafts.max_draft_tokens) == ("ngram", 3)
    assert (arguments.server.port, arguments.server.served_model_name) == (8123, "a,b")
    notes = [record.message for record in caplog.records]
    assert [note.partition(", line ")[2].split(" has no effect")[0] for note in notes] == [
        "6: --enable-chunked-prefill",
        "11: --compilation-config",
        "19: --uvicorn-log-level",
    ]


@pytest.mark.parametrize(
    ("entry", "modules"),
    [
        ("lora-modules:\n  - a=/b\n  - c=/d", {"a": "/b", "c": "/d"}),
        ("lora-modules:\n  - a=/b\n  - {name: c, path: '/d,e'}", {"a": "/b", "c": "/d,e"}),
        ("lora-modules:\n  name: a\n  path: /b", {"a": "/b"}),
        ("""lora-paths:\n  - '{"lora_name": "a", "lora_path": "/b"}'""", {"a": "/b"}),
        ("lora_modules: a=/b,c=/d", {"a": "/b", "c": "/d"}),
    ],
)
def test_adapters_of_a_file(tmp_path, entry, modules):
    path = tmp_path / "serve.yaml"
    path.write_text(f"model: m\nenable-lora: true\n{entry}\nmax-loras: 2\n", "utf-8")
    _, config = opened(path)
    assert config.lora.enable_lora and config.lora.max_loras == 2
    assert config.lora.modules == modules


def test_flags_go_before_the_file(tmp_path):
    path = tmp_path / "serve.yaml"
    path.write_text(OF_VLLM, "utf-8")
    arguments, config = opened(path, "--tp", "2", "--port", "0")
    assert (config.parallel.tp, arguments.server.port) == (2, 0)


def test_what_is_refused_names_its_line(tmp_path, capsys):
    path = tmp_path / "serve.yaml"
    path.write_text("model: m\n\nlora-dtype: half\ndefault-mm-loras:\n  a: b\ntp: 0\n", "utf-8")
    assert main(["serve", "--config", str(path)]) == 2
    first, second = capsys.readouterr().err.splitlines()
    assert f"{path}, line 3: --lora-dtype is not a flag here: adapters have the numbers of" in first
    assert f"{path}, line 4: --default-mm-loras is not a flag here" in second
    path.write_text("model: m\nenforce-eager: true\nkv-cache-dtype: fp9\nnonsense: 1\n", "utf-8")
    with pytest.raises(ConfigError) as error:
        opened(path)
    assert [each.split(":")[0] for each in error.value.problems] == [
        f"{path}, line 4",
        f"{path}, line 3",
    ]


@pytest.mark.parametrize(
    "entry", ["speculative-config: false", "served-model-name: null", "api-key: true", "lora: 1"]
)
def test_an_entry_that_says_nothing_is_refused(tmp_path, entry):
    path = tmp_path / "serve.yaml"
    path.write_text(f"model: m\n{entry}\n", "utf-8")
    with pytest.raises(ConfigError) as error:
        opened(path)
    assert error.value.problems[0].startswith(f"{path}, line 2: ")


@pytest.mark.parametrize("text", ["", "a: [", "[1, 2]", "tp: 2\n# --enable-lora\n", "{tp: 2}"])
def test_what_is_ours_or_nothing_is_left_alone(text):
    found = in_our_words(text, "f")
    assert read_yaml(found.text, "f") == read_yaml(text, "f") and found.notes == []

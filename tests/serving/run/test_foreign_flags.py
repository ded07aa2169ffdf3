"""Flags that users of vLLM, SGLang and Arctic type: taken, told to have no effect, or refused."""

import argparse
from collections import Counter
from pathlib import Path

import pytest

from serving.cli.main import main, make_parser
from serving.run.flags import parse_args, settle
from serving.run.foreign_flags import FOREIGN, is_foreign, known_flags
from shiftjax.options import ConfigError

DATA = Path(__file__).parents[2] / "data"
LINES = (DATA / "foreign_flags.txt").read_text("utf-8").split("\n")
TYPED = [line.split(" ", 1) for line in LINES if line]
# Every argument of `vllm serve`, from the sources of 0.29.0; = stands behind what takes a value.
OF_VLLM = (DATA / "vllm_flags.txt").read_text("utf-8").split()
# Refused by what is wrong with the value, because a model is named twice, or without --enable-lora.
OF_VALUES = {"--quantization", "--tool-call-parser", "--speculative-config", "--config"}
OF_VALUES |= {"--lora-modules", "--max-loras", "--max-lora-rank"}
PARSER = make_parser()


def parsed(*words: str) -> argparse.Namespace:
    arguments = parse_args(PARSER, ["serve", *words])
    settle(arguments)
    return arguments


@pytest.mark.parametrize("words", TYPED, ids=" ".join)
def test_what_others_type_is_taken_or_refused_by_its_own_name(words):
    given = words if words[0] == "--model-path" else ["m", *words]
    try:
        arguments = parsed(*given)
    except ConfigError as error:
        (problem,) = error.problems
        name = words[0]
        assert "did you mean" not in problem and "unknown flag" not in problem
        refused = problem.startswith(f"{name} is not a flag here: ")
        assert refused or name in OF_VALUES
    else:
        assert arguments.model in ("m", "x")


def test_every_argument_of_vllm_is_known():
    known, found = known_flags(PARSER, ["serve"]), Counter()
    for flag in OF_VLLM:
        name = flag.removesuffix("=")
        assert name in known or is_foreign(name), name
        kind = "own" if name in known else "alias"
        if name in FOREIGN and name not in known:
            kind = FOREIGN[name].kind
            assert FOREIGN[name].is_switch is not flag.endswith("="), name
        found[kind] += 1
    assert found.total() == len(OF_VLLM) == 315 and min(found.values()) > 0


def test_keys_of_json_values_behind_dots():
    arguments = parsed(
        *("m", "--speculative-config.method", "ngram", "--tp", "2"),
        *("--structured-outputs-config.backend", "xgrammar", "-cc.mode=3"),
        *("--speculative-config.num_speculative_tokens=4",),
        *("--override-generation-config.temperature", "0.5"),
        *("--default-chat-template-kwargs.enable_thinking", "false"),
    )
    config, _ = settle(arguments)
    assert (config.drafts.speculation, config.drafts.max_draft_tokens) == ("ngram", 4)
    assert (arguments.model, config.parallel.tp, len(arguments.notes)) == ("m", 2, 2)
    assert config.model.override_generation_config == '{"temperature": 0.5}'
    assert arguments.default_chat_template_kwargs == '{"enable_thinking": false}'


def test_more_logprobs_than_there_are_is_the_most():
    for words in (["--max-logprobs", "151936"], ["--max-logprobs=-1"]):
        arguments = parsed("m", *words)
        assert arguments.max_logprobs == "20" and "20 here" in arguments.notes[0]
    arguments = parsed("m", "--max-logprobs", "5")
    assert (arguments.max_logprobs, arguments.notes, arguments.model) == ("5", [], "m")


def test_several_names_are_a_list():
    for words in (["a", "b"], ['["a", "b"]'], ["a,b"]):
        arguments = parsed("m", "--served-model-name", *words, "--port", "0")
        assert (arguments.model, arguments.served_model_name) == ("m", "a,b")
    assert parsed("--served-model-name", "a", "m").model == "m"
    origins = parsed("m", "--allowed-origins", '["https://a.example"]').allowed_origins
    assert origins == "https://a.example"


def test_most_of_what_others_type_is_taken():
    taken = 0
    for words in TYPED:
        try:
            parsed(*words)
        except ConfigError:
            continue
        taken += 1
    assert (len(TYPED), taken) == (85, 73)


@pytest.mark.parametrize(
    ("words", "name", "value"),
    [
        (["-tp", "2"], "tp", "2"),
        (["-tp=2"], "tp", "2"),
        (["--tensor_parallel_size", "2"], "tp", "2"),
        (["--gpu-memory-utilization", "0.8"], "memory_fraction", "0.8"),
        (["--sampling_defaults", "openai"], "generation_config", "none"),
        (["--mem-fraction-static=0.8"], "memory_fraction", "0.8"),
        (["--ulysses-sequence-parallel-size", "4"], "sp", "4"),
        (["--kv-offloading-size", "8"], "host_memory", "8GiB"),
        (["--dtype", "half"], "dtype", "float16"),
        (["--runner", "pooling"], "task", "embed"),
        (["--reasoning-parser", "qwen3"], "reasoning_parser", "think"),
        (["--disable-radix-cache"], "prefix_caching", False),
        (["--context-length", "99"], "max_model_len", "99"),
        (["--async-scheduling"], "overlap", True),
        (["--no-async-scheduling"], "overlap", False),
    ],
    ids=str,
)
def test_a_flag_of_another_engine_sets_ours(words, name, value):
    arguments = parsed("m", *words)
    assert getattr(arguments, name) == value and arguments.notes == []


@pytest.mark.parametrize(
    "words",
    [
        ["--swap-space", "4", "m"],
        ["m", "--swap-space=4"],
        ["--enforce-eager", "m"],
        ["m", "--no-enable-chunked-prefill"],
        ["m", "--fully-sharded-loras"],
        ["m", "--lora-dtype", "auto"],
        ["-O3", "m"],
        ["-O", "3", "m"],
        ["--enable_chunked_prefill", "m"],
    ],
    ids=" ".join,
)
def test_a_flag_without_effect_is_told_and_its_value_is_no_model(words):
    arguments = parsed(*words)
    (note,) = arguments.notes
    assert "no effect" in note and arguments.model == "m"


A_AND_C = {"a": "/b", "c": "/d"}
OF_SGLANG = '{"lora_name": "a", "lora_path": "/b", "pinned": %s}'


@pytest.mark.parametrize(
    ("words", "modules"),
    [
        (["m", "--lora-modules", "a=/b", "c=/d"], A_AND_C),
        (["--lora-modules", "a=/b", "c=/d", "m"], A_AND_C),
        (["m", "--lora-modules", "a=/b,c=/d"], A_AND_C),
        (["m", "--lora-modules=a=/b", "--max-loras", "2"], {"a": "/b"}),
        (["m", "--lora-modules", '{"name": "a", "path": "/b"}', "c=/d"], A_AND_C),
        (["m", "--lora-modules", '[{"name": "a", "path": "/b,c"}]'], {"a": "/b,c"}),
        (["m", "--lora_paths", "a=/b", "c=/d", "--max-loras-per-batch", "2"], A_AND_C),
        (
            ["m", "--lora-paths", '{"lora_name": "a", "lora_path": "/b", "pinned": false}'],
            {"a": "/b"},
        ),
        (
            ["m", "--lora-modules", '{"name": "a", "path": "/b", "base_model_name": "m"}'],
            {"a": "/b"},
        ),
    ],
    ids=str,
)
def test_adapters_in_words_and_objects(words, modules):
    arguments = parsed(*words, "--enable-lora", "--max-lora-rank", "32", "--max-cpu-loras", "9")
    config, _ = settle(arguments)
    assert config.lora.modules == modules and config.model.model == "m"
    assert (config.lora.max_lora_rank, config.lora.max_cpu_loras) == (32, 9)


@pytest.mark.parametrize(
    "words",
    [
        ["--lora-modules", "/only/a/path"],
        ["--lora-modules", "a=b", "a=c"],
        ["--lora-modules", '{"name": "a"}'],
        ["--lora-modules", '{"name": "a", "path": "/b", "rank": 8}'],
        ["--lora-paths", OF_SGLANG % "true"],
        ["--lora-modules", "=b"],
        ["--lora-modules", "[1]"],
        ["--lora-modules", "{"],
        ["--lora-modules"],
    ],
    ids=str,
)
def test_adapters_that_are_wrong(words):
    with pytest.raises(ConfigError) as error:
        settle(parsed("m", "--enable-lora", *words))
    assert "lora" in error.value.problems[0]


def test_words_behind_a_double_dash_are_left_alone():
    with pytest.raises(ConfigError, match="unknown flag '--enforce-eager'"):
        parsed("m", "--", "--enforce-eager")


def test_weights_that_are_made_up_have_another_name():
    with pytest.raises(
        ConfigError, match=r"--load-format dummy is not a flag here: .*random:MODEL"
    ):
        parsed("m", "--load-format", "dummy")
    assert parsed("m", "--load-format", "auto").notes


def test_notes_are_lines_on_stderr(capsys):
    assert main(["serve", "m", "--enforce-eager", "--print-config"]) == 0
    words = "--enforce-eager has no effect: steps are compiled ahead of traffic"
    assert capsys.readouterr().err == f"shiftjax: {words}\n"


def test_the_command_of_arctic_inference():
    speculative = '{"method": "suffix", "num_speculative_tokens": 4}'
    arguments = parsed(
        *("m", "--tensor-parallel-size", "2", "--ulysses-sequence-parallel-size", "4"),
        *("--enable-shift-parallel", "--shift-parallel-threshold", "256"),
        *("--speculative-config", speculative),
    )
    config, _ = settle(arguments)
    assert (config.parallel.sp, config.parallel.tp) == (4, 2)
    assert config.scheduler.shift_threshold == 256 and config.drafts.speculation == "suffix"


def test_no_flag_of_ours_is_called_foreign():
    parser = PARSER
    (commands,) = (a for a in parser._actions if isinstance(a.choices, dict))
    serve = commands.choices["serve"]
    ours = {flag for action in serve._actions for flag in action.option_strings}
    assert not ours & FOREIGN.keys()
    for flag, foreign in FOREIGN.items():
        if foreign.kind == "alias":
            assert foreign.words in ours, flag


def test_variables_of_vllm_are_told_to_have_no_effect(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("VLLM_USE_V1", "1")
    assert main(["serve", str(tmp_path / "nowhere")]) == 3
    assert "the variable VLLM_USE_V1 has no effect" in caplog.text

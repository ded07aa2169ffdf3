"""`--phases` of a batch: what auto chooses and says, for which lengths."""

import json

import pytest
from batch_kit import encoded
from kit import TEMPLATE, byte_tokenizer, run_command

from serving.cli import batch_phases
from serving.cli.batch_formats import OPENAI, read_lines
from serving.server.options import ServerOptions
from shiftjax.arch.formats import AUTO, Formats
from shiftjax.config import EngineConfig
from shiftjax.options import ConfigError
from shiftjax.sim.phase_choice import choose_phases

A10 = {"machine": "a10x8", "host_memory": "80GiB", "devices": 8, "dtype": "bfloat16"}


def chosen(capsys, num_lines: int, prompt: int, output: int, **options) -> tuple[EngineConfig, str]:
    """What becomes of the settings, and what is said of it."""
    line = {"prompt": [5] * prompt, "max_tokens": output}
    lines = read_lines(encoded(*[line] * num_lines), OPENAI)
    settings = {"model": "random:qwen3-32b", "max_model_len": 4096} | A10 | options
    config = EngineConfig.from_options(phases="auto", **settings)
    return batch_phases.settle_phases(config, lines, ServerOptions()), capsys.readouterr().err


def test_a_pair_that_pays_is_taken(capsys):
    config, said = chosen(capsys, 200, 3000, 200)
    assert (config.parallel.phases, config.parallel.pp, config.parallel.tp) == ("pp8:tp8", 1, None)
    assert (config.cache.host_memory, config.scheduler.machine) == ("80GiB", None)
    first, *ranked, reason = said.splitlines()
    assert first == "phases: predicted on 8 devices of a10x8:"
    assert ranked[0].startswith("phases: pp8:tp8: ")
    assert "quicker than" in reason
    assert "a cycle has" in reason


def test_one_configuration_is_kept_where_a_pair_would_not_pay(capsys):
    config, said = chosen(capsys, 3, 3000, 1)
    degrees = config.parallel
    assert degrees.phases is None
    assert degrees.dp * degrees.pp * (degrees.sp or 1) * (degrees.tp or 1) == 8
    assert "without phases" in said.splitlines()[-1]
    config, _ = chosen(capsys, 3, 3000, 1, prefix_caching=False)
    assert config.cache.host_memory == "0"  # which nothing else reads


def test_nothing_is_predicted_for_a_cpu(capsys):
    config, said = chosen(capsys, 3, 3000, 100, machine=None)
    assert (config.parallel.phases, config.parallel.tp) == (None, None)
    assert said.startswith("phases: nothing is predicted for cpu, so prompts and decodes share")
    assert len(said.splitlines()) == 1
    with pytest.raises(ConfigError, match="cpu has no to_host and from_host"):
        chosen(capsys, 3, 3000, 100, machine="cpu")


def test_the_lengths_are_those_that_the_engine_will_see(tmp_path, monkeypatch):
    seen = []

    def choose(target, lengths, host_bytes, **budgets):
        sizes = target.machine.num_devices, budgets["max_num_seqs"]
        seen.append((lengths, host_bytes, *sizes, target.formats))
        return choose_phases(target, lengths, host_bytes, **budgets)

    monkeypatch.setattr(batch_phases, "choose_phases", choose)
    byte_tokenizer().backend.save(str(tmp_path / "tokenizer.json"))
    bodies = [
        {"prompt": "four", "max_tokens": 7},
        {"prompt": ["a", "bcd"], "n": 2, "max_tokens": 5},
        {"messages": [{"role": "user", "content": "hi"}], "max_tokens": None},
        {"prompt": "four", "max_tokens": 500},
        {"prompt": "x" * 64, "max_tokens": 5},
        {"prompt": "x", "temperature": -1},
        {"prompt": ""},
        b"{\n",
    ]
    options = A10 | {"max_num_seqs": 3, "max_model_len": 64, "devices": 4, "quantization": "fp8"}
    tokenizer = str(tmp_path / "tokenizer.json")
    config = EngineConfig.from_options(
        model="random:tiny", tokenizer=tokenizer, phases="auto", **options
    )
    server = ServerOptions(chat_template=TEMPLATE)
    batch_phases.settle_phases(config, read_lines(encoded(*bodies), OPENAI), server)
    ((lengths, host_bytes, num_devices, max_num_seqs, formats),) = seen
    chat = len("user: hi\nassistant:")
    assert lengths == [(4, 7), (1, 10), (3, 10), (chat, 64 - chat), (4, 60)]
    assert (host_bytes, num_devices, max_num_seqs) == (80 << 30, 4, 3)
    assert formats == Formats("fp8", AUTO, AUTO)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--phases=pp2:tp4",), "pp2 takes 2 devices and tp4 takes 4"),
        (("--phases=pp2:tp2", "--tp=2"), "cannot be had with tp = 2"),
        (("--phases=pp2:tp2", "--speculation=suffix"), "cannot be had with speculation"),
        (("--phases=quick",), "is no pair: write PREFILL:DECODE"),
        (("--stages=pp2:tp2",), "unknown flag '--stages'; it is now called --phases"),
        (("--phases=pp2:tp2", "--machine=a10x8"), "has no meaning with policy"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_written(capsys, tmp_path, flags, words):
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(json.dumps({"prompt": [5]}))
    model = "--model=random:tiny"
    code, _, said = run_command(capsys, "batch", str(source), f"--output={output}", model, *flags)
    assert code == 2
    assert len(said) == 1
    assert words in said[0]
    assert not output.exists()

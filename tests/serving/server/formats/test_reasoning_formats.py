"""Thoughts of models by the names of vLLM's reasoning parsers, cut at every character.

`tests/data/reasoning.json` has the outputs, with what is in them and where they come from.
"""

import json
from functools import cache
from pathlib import Path

import pytest
from scripted import marked_tokenizer

from serving.cli.main import make_parser as make_flags
from serving.run.flags import parse_args, settle
from serving.server.fields import Function
from serving.server.formats.pieces import CallArguments, CallBegin, Reasoning, Text
from serving.server.formats.tool_formats import FORMATS, make_parser, reasoning_format
from serving.server.tools import ToolWish
from shiftjax.options import ConfigError
from shiftjax.text import thinking
from shiftjax.text.thinking import MARKS, begins_inside

DATA = Path(__file__).parents[3] / "data" / "reasoning.json"
RECORDS = json.loads(DATA.read_text())
NAMED = {f"{record['parser']}-{number}": record for number, record in enumerate(RECORDS)}
# `--reasoning-parser` of vLLM 0.29.0 that has no counterpart here.
NOT_HERE = {
    *("poolside_v1", "cohere_command3", "cohere_command4", "granite", "hunyuan_a13b", "hy_v3"),
    *("hy_v4", "kimi_k3", "minimax_m2_append_think", "minimax_m3", "muse_glimmer", "inkling"),
    "ling3",
}
HERE = {
    *("deepseek_r1", "deepseek_v3", "deepseek_v4", "ernie45", "gemma4", "glm45", "glm47"),
    *("openai_gptoss", "holo2", "kimi_k2", "mimo", "minimax_m2", "mistral", "nemotron_v3"),
    *("olmo3", "qwen3", "seed_oss", "step3", "step3p5"),
}


FLAGS = make_flags()


@cache
def ours(name: str) -> str:
    """The setting that the flag of another engine comes to. Raises `ConfigError`."""
    arguments = parse_args(FLAGS, ["serve", "m", "--reasoning-parser", name])
    settle(arguments)
    return arguments.reasoning_parser


def wish_of(record) -> ToolWish | None:
    tools = {name: each for name, each in record.get("tools", {}).items() if name != "format"}
    functions = (
        Function(name, parameters={"type": "object", "properties": each})
        for name, each in tools.items()
    )
    return ToolWish(tuple(functions)) if tools else None


def parsed(record, parts, *, has_ended=True):
    """(reasoning, text, names, arguments as text)."""
    wish, setting = wish_of(record), ours(record["parser"])
    wanted = FORMATS[record["tools"]["format"]] if wish else None
    inside = record["is_inside"] or MARKS[setting].is_first
    parser = make_parser(wanted, wish, setting, is_inside=inside)
    pieces = [piece for part in parts for piece in parser.feed(part)]
    pieces += parser.finish() if has_ended else []
    thought = "".join(piece.text for piece in pieces if isinstance(piece, Reasoning))
    text = "".join(piece.text for piece in pieces if isinstance(piece, Text))
    names = [piece.name for piece in pieces if isinstance(piece, CallBegin)]
    made = "".join(piece.text for piece in pieces if isinstance(piece, CallArguments))
    return thought, text, names, made


@pytest.mark.parametrize("record", NAMED.values(), ids=NAMED)
def test_what_is_in_it(record):
    thought, text, names, made = parsed(record, [record["output"]])
    assert (thought, text) == (record["reasoning"], record["text"])
    calls = record.get("calls", [])
    assert names == [name for name, _ in calls]
    assert not calls or json.loads(made) == calls[0][1]


@pytest.mark.parametrize("record", NAMED.values(), ids=NAMED)
def test_the_places_of_the_cuts_change_nothing(record):
    output = record["output"]
    whole = parsed(record, [output])
    assert parsed(record, output) == whole  # at every character
    for place in range(1, len(output)):
        assert parsed(record, [output[:place], output[place:]]) == whole, output[:place]


@pytest.mark.parametrize("record", NAMED.values(), ids=NAMED)
def test_what_has_come_is_a_beginning(record):
    """Whatever is still to come: no part of a mark is ever given out."""
    output = record["output"]
    whole = parsed(record, [output])
    for end in range(len(output)):
        parts = parsed(record, [output[:end]], has_ended=False)
        for begun, all_of_it in zip(parts, whole, strict=True):
            assert all_of_it[: len(begun)] == begun


@pytest.mark.parametrize("name", sorted(HERE | NOT_HERE))
def test_names_of_vllm_are_taken_or_refused(name):
    if name in HERE:
        assert ours(name) in MARKS
        return
    with pytest.raises(ConfigError, match="--reasoning-parser: must be one of"):
        ours(name)


@pytest.mark.parametrize("name", sorted(set(MARKS) - {"openai_gptoss"}))
def test_a_prompt_may_open_the_thoughts(name, monkeypatch):
    """A template opens them, opens and ends them at once (no thinking), or does neither."""
    tokenizer, marks = marked_tokenizer("{{ messages }}"), MARKS[name]
    monkeypatch.setattr(thinking, "TAIL", 40)  # a token here is a byte
    written = {
        f"user: hi assistant: {marks.begin}\n": True,
        f"user: hi assistant: {marks.begin}{marks.end}\n\n": False,
        f"user: hi assistant: {marks.end}": False,
        "user: hi assistant:": marks.is_first,
    }
    for prompt, is_inside in written.items():
        ids = tokenizer.encode(prompt, add_special_tokens=False)
        assert begins_inside(ids, tokenizer, marks) is is_inside


def test_a_template_says_how_thoughts_are_marked():
    assert reasoning_format("auto", "{{ '<seed:think>' }} {{ '</seed:think>' }}") == "seed_oss"
    assert reasoning_format("auto", "{{ '<channel|>' }}") == "gemma4"
    assert reasoning_format("auto", "{{ '[THINK]' }} {{ '[/THINK]' }}") == "mistral"
    assert reasoning_format("auto", "{{ '</think>' }}") == "think"
    assert reasoning_format("auto", "{{ messages }}") == "none"

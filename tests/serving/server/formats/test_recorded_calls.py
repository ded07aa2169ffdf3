"""Outputs of models in their own formats of calls, cut at every character.

`tests/data/tool_calls.json` has the outputs, with what is in them and where they come from.
"""

import json
from pathlib import Path

import pytest

from serving.server.fields import Function
from serving.server.formats.call_marks import DEEPSEEK_CALL, DEEPSEEK_SEPARATOR
from serving.server.formats.pieces import CallArguments, CallBegin, Text
from serving.server.formats.tool_formats import FORMATS, make_parser, tool_format
from serving.server.tools import ToolWish

DATA = Path(__file__).parents[3] / "data" / "tool_calls.json"
RECORDS = json.loads(DATA.read_text())
NAMED = {f"{record['format']}-{number}": record for number, record in enumerate(RECORDS)}


def wish_of(record) -> ToolWish:
    return ToolWish(
        tuple(
            Function(name, parameters={"type": "object", "properties": properties})
            for name, properties in record["tools"].items()
        )
    )


def parsed(record, parts, *, is_cut=False):
    """(text, names, arguments as text, ids)."""
    parser = make_parser(FORMATS[record["format"]], wish_of(record), "none", is_inside=False)
    pieces = [piece for part in parts for piece in parser.feed(part)]
    pieces += [] if is_cut else parser.finish()
    begun = [piece for piece in pieces if isinstance(piece, CallBegin)]
    arguments = ["" for _ in begun]
    for piece in pieces:
        if isinstance(piece, CallArguments):
            arguments[piece.number] += piece.text
    text = "".join(piece.text for piece in pieces if isinstance(piece, Text))
    return text, [piece.name for piece in begun], arguments, [piece.id for piece in begun]


@pytest.mark.parametrize("record", NAMED.values(), ids=NAMED)
def test_what_is_in_it(record):
    text, names, arguments, ids = parsed(record, [record["output"]])
    made = [[name, json.loads(each)] for name, each in zip(names, arguments, strict=True)]
    assert (text, made) == (record["text"], record["calls"])
    assert len(set(ids)) == len(ids)


@pytest.mark.parametrize("record", NAMED.values(), ids=NAMED)
def test_the_places_of_the_cuts_change_nothing(record):
    output = record["output"]
    whole = parsed(record, [output])[:3]
    assert parsed(record, output)[:3] == whole  # at every character
    for place in range(1, len(output)):
        assert parsed(record, [output[:place], output[place:]])[:3] == whole, output[:place]


@pytest.mark.parametrize("record", NAMED.values(), ids=NAMED)
def test_what_max_tokens_cuts_off_is_a_beginning(record):
    """Names and arguments of an unfinished output are the first part of those of all of it."""
    output = record["output"]
    _, names, arguments, _ = parsed(record, [output])
    for end in range(len(output)):
        text, begun, parts, _ = parsed(record, [output[:end]])
        assert begun == names[: len(begun)]
        assert all(whole.startswith(part) for whole, part in zip(arguments, parts, strict=False))
        assert parts[:-1] == arguments[: len(parts[:-1])]
        assert (text, begun, parts) == parsed(record, output[:end])[:3]


@pytest.mark.parametrize("record", NAMED.values(), ids=NAMED)
def test_the_text_of_a_string_is_passed_on_as_it_comes(record):
    """Half of a string has come: a client sees nearly all of that half."""
    strings = [
        (number, value)
        for number, (_, arguments) in enumerate(record["calls"])
        for key, value in arguments.items()
        if isinstance(value, str) and record["output"].count(value) == 1 and key != "multi_non_null"
    ]
    for number, value in strings:
        half = len(value) // 2
        end = record["output"].index(value) + half
        arguments = parsed(record, record["output"][:end], is_cut=True)[2]
        assert json.dumps(value[: half - 1], ensure_ascii=False)[1:-1] in arguments[number]


def test_ids_of_kimi_are_its_own():
    """Its template writes the id of an earlier call in front of the arguments."""
    record = next(each for each in RECORDS if each["format"] == "kimi_k2")
    ids = ["functions.get_weather:0", "functions.get_news:1", "functions.send_email:2"]
    assert parsed(record, [record["output"]])[3] == ids


def test_every_format_of_other_words_than_json_objects_has_a_record():
    told_elsewhere = {"openai", "mistral", "mistral_named", "llama3_json", "llama4_json"}
    assert {record["format"] for record in RECORDS} == set(FORMATS) - told_elsewhere - {
        "hermes",
        "smollm2",
    }


# What each chat template says, beside the word tools.
TEMPLATES = {
    "qwen3_coder": "<tool_call>\\n<function=f>\\n<parameter=a>\\nv\\n</parameter>\\n</function>",
    "seed_oss": "<seed:tool_call>\\n<function=f>\\n<parameter=a>v</parameter>\\n</function>",
    "glm45": "<tool_call>f\n<arg_key>{{ k }}</arg_key>\n<arg_value>{{ v }}</arg_value>",
    "glm47": "<tool_call>f<arg_key>{{ k }}</arg_key><arg_value>{{ v }}</arg_value>",
    "minimax_m2": "{% set begin = '<minimax:tool_call>' %}",
    "deepseek_v3": DEEPSEEK_CALL + "function" + DEEPSEEK_SEPARATOR + "f\\n```json",
    "deepseek_v31": DEEPSEEK_CALL + "f" + DEEPSEEK_SEPARATOR,
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>",
    "functiongemma": "<start_function_call>call:f{",
    "gemma4": "<|tool_call>call:f{",
    "llama4_pythonic": "<|header_start|> [func_name1(param1=value1), func_name2(...)]",
    "llama4_json": """<|header_start|> {\\"name\\": f, \\"parameters\\": a}""",
    "pythonic": "[func_name1(params_name1=params_value1, params_name2=params_value2...)]",
}


@pytest.mark.parametrize("kind", TEMPLATES)
def test_a_template_says_which_format_it_is(kind):
    assert tool_format("auto", f"{{# tools #}}{TEMPLATES[kind]}") is FORMATS[kind]

"""Bare values become what a schema says, whatever they look like."""

import json

import pytest

from serving.server.fields import Function
from serving.server.formats.json_types import as_json, escaped, quoted, types_of
from serving.server.formats.pieces import CallArguments
from serving.server.formats.tool_formats import FORMATS, make_parser
from serving.server.tools import ToolWish

ROOT = {"$defs": {"a/b": {"type": "integer"}, "loop": {"$ref": "#/$defs/loop"}}}


@pytest.mark.parametrize(
    ("schema", "types"),
    [
        ({"type": "string"}, {"string"}),
        ({"type": ["integer", "null"]}, {"integer", "null"}),
        ({"enum": ["a", 1, None]}, {"string", "integer", "null"}),
        ({"const": 1.5}, {"number"}),
        ({"anyOf": [{"type": "string"}, {"const": True}]}, {"string", "boolean"}),
        ({"oneOf": [{"type": "array"}, {"type": "object"}]}, {"array", "object"}),
        ({"allOf": [{"type": "string"}]}, {"string"}),
        ({"anyOf": [{"type": "string"}, {}]}, set()),  # anything
        ({"$ref": "#/$defs/a~1b"}, {"integer"}),
        ({"$ref": "#/$defs/none"}, set()),
        ({"$ref": "#/$defs/loop"}, set()),
        ({"description": "x"}, set()),
        (True, set()),
        (None, set()),
    ],
)
def test_types(schema, types):
    assert types_of(schema, ROOT) == types


@pytest.mark.parametrize(
    ("text", "types", "made"),
    [
        ("5", "integer", "5"),
        (" 5\n", "integer", "5"),
        ("5", "", "5"),
        ("5", "string", '"5"'),
        ("5", "string integer", "5"),
        ("5", "string number", "5"),
        ("5.5", "string integer", '"5.5"'),
        ("[1, 2]", "string array", "[1, 2]"),
        ("[1, 2]", "string object", '"[1, 2]"'),
        ("True", "boolean", "true"),
        ("TRUE", "boolean", "true"),
        ("None", "", "null"),
        ("null", "string null", "null"),
        ("null", "string", '"null"'),
        ("{'a': (1, None)}", "object", '{"a": [1, null]}'),
        ('{"a": [1,\n2]}', "object", '{"a": [1,\n2]}'),
        ('"quoted"', "", '"\\"quoted\\""'),  # quotes of its own
        ('"quoted"', "object", '"quoted"'),  # JSON
        ("plain words", "integer", '"plain words"'),
        ("1e999", "number", '"1e999"'),
        ("{1, 2}", "array", '"{1, 2}"'),
        ("b'x'", "", "\"b'x'\""),
        ("(" * 500, "", '"' + "(" * 500 + '"'),
        ("", "integer", '""'),
    ],
)
def test_values(text, types, made):
    assert as_json(text, frozenset(types.split())) == made
    json.loads(made)


def test_texts_are_quoted_as_they_are():
    assert quoted('a"\n\\é☃') == '"a\\"\\n\\\\é☃"' and escaped("é\t") == "é\\t"
    assert quoted("\ud83d") == '"\\ud83d"'  # half a pair cannot be sent as it is


PROPERTIES = {"s": {"type": "string"}, "n": {"type": ["string", "null"]}, "i": {"type": "integer"}}


@pytest.mark.parametrize(
    ("kind", "written", "arguments"),
    [
        ("qwen3_coder", "\n<parameter=n>\nnull\n</parameter>", {"n": None}),
        ("qwen3_coder", "<parameter=n>null and more</parameter>", {"n": "null and more"}),
        ("qwen3_coder", "<parameter=n>nul</parameter>", {"n": "nul"}),
        ("qwen3_coder", "<parameter=s>null</parameter>", {"s": "null"}),
        ("qwen3_coder", "<parameter=s>\n\n a \n\n</parameter>", {"s": "\n a \n"}),
        ("qwen3_coder", "<parameter=s></parameter>", {"s": ""}),
        ("qwen3_coder", "<parameter=s>a < b <c></parameter>", {"s": "a < b <c>"}),
        ("qwen3_coder", "noise <<parameter=i>1</parameter> <x>", {"i": 1}),
        ("qwen3_coder", "<parameter=other>[1]</parameter>", {"other": [1]}),
        ("glm45", "\n<arg_key>s</arg_key>\n<arg_value>\na\n</arg_value>\n", {"s": "\na\n"}),
        ("gemma4", 's:<|"|>a<|b<|"|>,i:1', {"s": "a<|b", "i": 1}),
        ("gemma4", "s:5,i:5,x:5", {"s": "5", "i": 5, "x": 5}),
        ("gemma4", "s:two words , i:3", {"s": "two words", "i": 3}),
        ("gemma4", "s:", {"s": ""}),
        ("gemma4", "o:{a:[1,[2],{}],b:{}},", {"o": {"a": [1, [2], {}], "b": {}}}),
        ("pythonic", "s='a' , i = 3,", {"s": "a", "i": 3}),
        ("pythonic", r"s='\x41\u00e9\n\'\"\\\d'", {"s": "Aé\n'\"\\\\d"}),
        ("pythonic", r"s='\ud83d\ude00', x='\U0001F600'", {"s": "😀", "x": "😀"}),
        ("pythonic", "x={'k': (1, None), 'l': [True]}", {"x": {"k": [1, None], "l": [True]}}),
        ("pythonic", "x={1: 2}", {"x": {"1": 2}}),
        ("pythonic", "x=b'z'", {"x": "b", "z": ""}),  # no such value: JSON nevertheless
        ("pythonic", "{'a': 1}", {"": {"a": 1}}),
        ("pythonic", "5", {"5": ""}),
        ("pythonic", "", {}),
    ],
)
def test_arguments(kind, written, arguments):
    before, behind = {
        "qwen3_coder": ("<tool_call><function=f>", "</function></tool_call>"),
        "glm45": ("<tool_call>f", "</tool_call>"),
        "gemma4": ("<|tool_call>call:f{", "}<tool_call|>"),
        "pythonic": ("[f(", ")]"),
    }[kind]
    schema = {"type": "object", "properties": PROPERTIES}
    for parts in ([before + written + behind], before + written + behind):
        wish = ToolWish((Function("f", parameters=schema),))
        parser = make_parser(FORMATS[kind], wish, "none", is_inside=False)
        pieces = [piece for part in parts for piece in parser.feed(part)] + parser.finish()
        made = "".join(piece.text for piece in pieces if isinstance(piece, CallArguments))
        assert json.loads(made) == arguments

"""Forced and strict calls always parse, whatever the model would rather say."""

import json
import random

import numpy as np
import pytest
from scripted import MARK, TEMPLATES, marked_tokenizer

from serving.server.errors import ServeError
from serving.server.fields import Function
from serving.server.formats.call_marks import DEEPSEEK_BEGIN
from serving.server.formats.pieces import CallArguments, CallBegin, Text
from serving.server.formats.tool_formats import FORMATS, make_parser
from serving.server.formats.tool_grammar import call_grammar
from serving.server.grammar import Grammars
from serving.server.grammar_source import GrammarSource
from serving.server.tools import ToolWish
from shiftjax.text.detokenizer import IncrementalDetokenizer

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 6},
        "when": {"type": "object", "properties": {"day": {"enum": [1, 2]}}, "required": ["day"]},
    },
    "required": ["city"],
}
F = Function("f", parameters=SCHEMA)
STRICT = Function("get-weather", parameters=SCHEMA | {"additionalProperties": False}, strict=True)
LONGEST = 4000
BEGUN = {
    "hermes": "<tool_call>",
    "smollm2": "<tool_call>",
    "mistral": MARK,
    "mistral_named": MARK,
    "llama3_json": "{",
    "llama4_json": "{",
    "openai": "<|channel|>commentary to=functions.",
    **{kind: "<tool_call>" for kind in ("qwen3_coder", "glm45", "glm47")},
    "seed_oss": "<seed:tool_call>",
    "minimax_m2": "<minimax:tool_call>",
    "deepseek_v3": DEEPSEEK_BEGIN,
    "deepseek_v31": DEEPSEEK_BEGIN,
    "kimi_k2": "<|tool_calls_section_begin|>",
    "functiongemma": "<start_function_call>",
    "gemma4": "<|tool_call>",
    "pythonic": "[",
    "llama4_pythonic": "[",
}


@pytest.fixture(scope="module")
def tokenizer():
    return marked_tokenizer(TEMPLATES["hermes"])


@pytest.fixture(scope="module")
def grammars(tokenizer):
    made = Grammars(tokenizer, tokenizer.vocab_size, 60.0)
    yield made
    made.close()


def grammar_of(kind, wish, tokenizer, reasoning="none", *, is_inside=False, answer=None):
    special = {MARK: tokenizer.backend.token_to_id(MARK)}
    wanted = FORMATS[kind]
    return call_grammar(wanted, wish, reasoning, special, is_inside=is_inside, answer=answer)


def random_output(state, tokenizer, rng, urge="", *, is_cut=False, visible=None) -> str:
    """What a model says that likes all tokens alike, after what it has the `urge` to say."""
    ids = tokenizer.encode(urge, add_special_tokens=False)
    visible = visible or frozenset({tokenizer.backend.token_to_id(MARK)})
    text = IncrementalDetokenizer(tokenizer, visible=visible)
    said = ""
    for _ in range(LONGEST):
        if state.is_stopped:
            return said + text.finish()
        bits = np.unpackbits(state.mask.view(np.uint8), bitorder="little")
        token = ids.pop(0) if ids else rng.choice(np.flatnonzero(bits).tolist())
        assert bits[token], f"{said!r} may not go on with {token}"
        if token in tokenizer.eos_token_ids:
            return said + text.finish()
        said += text.push(token)
        assert state.accept(token) or state.is_stopped
    assert is_cut, "it never ends"
    return said


def calls_of(kind, wish, output, reasoning="none", *, is_inside=False):
    """(text, names, arguments): the arguments must be JSON."""
    parser = make_parser(FORMATS[kind], wish, reasoning, is_inside=is_inside)
    pieces = parser.feed(output) + parser.finish()
    names = [piece.name for piece in pieces if isinstance(piece, CallBegin)]
    arguments = ["" for _ in names]
    for piece in pieces:
        if isinstance(piece, CallArguments):
            arguments[piece.number] += piece.text
    text = "".join(piece.text for piece in pieces if isinstance(piece, Text))
    return text, names, [json.loads(each) for each in arguments]


def check(name: str, arguments: dict) -> None:
    allowed = {"f": {"city", "when"}, "get-weather": {"city", "when"}, "g": set()}
    assert arguments.keys() <= allowed[name]
    assert name == "g" or len(arguments["city"]) <= 6


@pytest.mark.parametrize("kind", sorted(FORMATS))
@pytest.mark.parametrize("most", [None, 1])
def test_forced_calls_parse(kind, most, tokenizer, grammars):
    wish = ToolWish((F, Function("g"), STRICT), is_forced=True, most=most)
    urge = BEGUN[kind] if kind == "openai" else ""  # or it would think at random, and for ever
    rng = random.Random(3)
    for state in grammars.prepare(grammar_of(kind, wish, tokenizer), 12):
        text, names, arguments = calls_of(kind, wish, random_output(state, tokenizer, rng, urge))
        assert text == ""
        assert len(names) == 1 if most == 1 else names
        for name, values in zip(names, arguments, strict=True):
            check(name, values)


@pytest.mark.parametrize("kind", sorted(FORMATS))
def test_a_strict_call_that_has_begun_parses(kind, tokenizer, grammars):
    wish = ToolWish((F, STRICT), most=1)
    rng = random.Random(4)
    before = "" if BEGUN[kind] in "{[" or kind == "openai" else "I see: "
    for state in grammars.prepare(grammar_of(kind, wish, tokenizer), 12):
        # Behind the call a model may say anything, for ever; this one is cut there.
        output = random_output(state, tokenizer, rng, before + BEGUN[kind], is_cut=True)
        parser = make_parser(FORMATS[kind], wish, "none", is_inside=False)
        pieces = parser.feed(output)
        (begin,) = [piece for piece in pieces if isinstance(piece, CallBegin)]
        made = "".join(piece.text for piece in pieces if isinstance(piece, CallArguments))
        check(begin.name, json.JSONDecoder().raw_decode(made)[0])


@pytest.mark.parametrize("kind", sorted(FORMATS))
def test_a_model_need_not_call_what_is_strict(kind, tokenizer, grammars):
    (state,) = grammars.prepare(grammar_of(kind, ToolWish((STRICT,)), tokenizer), 1)
    answer = "<|channel|>final<|message|>Hi [x] <b>" if kind == "openai" else "Hi [x] <b> {"
    for token in tokenizer.encode(answer, add_special_tokens=False):
        assert state.accept(token)
    (end,) = tokenizer.eos_token_ids
    assert state.mask[end // 32] >> np.uint32(end % 32) & 1


@pytest.mark.parametrize(
    ("said", "is_inside"), [("Hm.</think>", True), ("<think>Hm.</think>", False)]
)
@pytest.mark.parametrize("is_forced", [True, False])
def test_a_model_may_think_before_it_calls(said, is_inside, is_forced, tokenizer, grammars):
    wish = ToolWish((STRICT,), is_forced=is_forced, most=1)
    source = grammar_of("hermes", wish, tokenizer, "think", is_inside=is_inside)
    (state,) = grammars.prepare(source, 1)
    urge = f"{said}\n\n<tool_call>"
    output = random_output(state, tokenizer, random.Random(5), urge, is_cut=not is_forced)
    text, names, (arguments,) = calls_of("hermes", wish, output, "think", is_inside=is_inside)
    assert names == ["get-weather"]
    check("get-weather", arguments)
    assert text == "" or not is_forced


ANSWER = GrammarSource("json", json.dumps(SCHEMA | {"additionalProperties": False}))
NAMED = {"$ref": "#/$defs/Named", "$defs": {"Named": {"type": "object", "required": ["name"]}}}
NAMED["$defs"]["Named"] |= {"properties": {"name": {"enum": ["f", "x"]}}}


@pytest.mark.parametrize("kind", sorted(FORMATS))
@pytest.mark.parametrize("reasoning", ["none", "think"])
def test_an_output_is_calls_or_an_answer_in_its_form(kind, reasoning, tokenizer, grammars):
    wish = ToolWish((F, Function("g")), most=1)
    source = grammar_of(kind, wish, tokenizer, reasoning, answer=ANSWER)
    called, answered = grammars.prepare(source, 2)
    urge = '{"name": "g", "parameters": {}}' if BEGUN[kind] == "{" else BEGUN[kind]
    output = random_output(called, tokenizer, random.Random(7), urge)
    parser = make_parser(FORMATS[kind], wish, "none", is_inside=False, has_form=True)
    pieces = parser.feed(output) + parser.finish()
    assert [type(each) for each in pieces[:1]] == [CallBegin]
    thought = "<think>Hm.</think>\n" if reasoning == "think" else ""
    begun = thought + ("<|channel|>final<|message|>" if kind == "openai" else "")
    answer = random_output(answered, tokenizer, random.Random(8), begun + '{"city":')
    assert answer.startswith(begun)
    made = json.loads(answer.removeprefix(begun))
    assert made.keys() <= {"city", "when"} and len(made["city"]) <= 6


def test_an_answer_may_begin_as_a_bare_call_does(tokenizer, grammars):
    function = Function("f", parameters=NAMED)
    answer = GrammarSource("json", json.dumps(NAMED))
    source = grammar_of("llama3_json", ToolWish((function,)), tokenizer, answer=answer)
    outputs = ('{"name": "f"}', '{"name": "x"}', '{"name": "f", "parameters": {"name": "x"}}')
    for output, state in zip(outputs, grammars.prepare(source, 3), strict=True):
        assert all(state.accept(id) for id in tokenizer.encode(output, add_special_tokens=False))


RICH = {
    "type": "object",
    "properties": {
        "unit": {"enum": ["celsius", "fahrenheit"]},
        "days": {"type": "integer"},
        "place": {"$ref": "#/$defs/place"},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "minItems": 1, "maxItems": 3},
        "code": {"type": "string", "pattern": "^[A-Z]{3}$"},
        "note": {"anyOf": [{"type": "string", "maxLength": 4}, {"type": "null"}]},
        "a key": {"type": "boolean"},
    },
    "required": ["days", "place", "code"],
    "$defs": {
        "place": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 5}, "in": {"type": "null"}},
            "required": ["city"],
            "additionalProperties": False,
        }
    },
}


@pytest.mark.parametrize("kind", [kind for kind in FORMATS if FORMATS[kind].written.arguments])
def test_arguments_that_are_no_json_keep_to_their_schema(kind, tokenizer, grammars):
    wish = ToolWish((Function("f", parameters=RICH, strict=True),), is_forced=True, most=1)
    rng, optional = random.Random(7), set()
    for state in grammars.prepare(grammar_of(kind, wish, tokenizer), 24):
        _, _, (made,) = calls_of(kind, wish, random_output(state, tokenizer, rng, is_cut=False))
        assert {"days", "place", "code"} <= made.keys() <= RICH["properties"].keys()
        assert made.get("unit", "celsius") in ("celsius", "fahrenheit")
        assert isinstance(made["days"], int)
        assert "city" in made["place"].keys() <= {"city", "in"}
        assert len(made["place"]["city"]) <= 5
        assert set(made.get("tags", "a")) <= {"a", "b"}
        assert len(made["code"]) == 3
        assert made["code"].isupper()
        assert isinstance(made.get("a key", True), bool)
        optional |= made.keys()
    assert optional == RICH["properties"].keys()


def test_a_format_of_a_bare_string_is_refused_if_it_is_strict(tokenizer):
    schema = {"type": "object", "properties": {"a": {"type": "string", "format": "date"}}}
    for strict in (True, False):
        wish = ToolWish((Function("f", parameters=schema, strict=strict),), is_forced=True)
        if not strict:
            assert grammar_of("qwen3_coder", wish, tokenizer)
            continue
        with pytest.raises(ServeError, match="format"):
            grammar_of("qwen3_coder", wish, tokenizer)


OF_TOKENS = [kind for kind, each in FORMATS.items() if each.marks and not each.marks.bare]


@pytest.mark.parametrize("kind", OF_TOKENS)
def test_marks_that_are_special_tokens(kind):
    """As in the tokenizers of most models: no text can spell them."""
    marks = tuple(mark for mark in FORMATS[kind].marks.all if mark not in ("```", MARK, "[ARGS]"))
    tokenizer = marked_tokenizer(TEMPLATES["hermes"], tuple(dict.fromkeys(marks)))
    special = {mark: tokenizer.backend.token_to_id(mark) for mark in (*marks, MARK)}
    functions = (Function("f", parameters=RICH), Function("g"), STRICT)
    wish, rng = ToolWish(functions, is_forced=True), random.Random(9)
    source = call_grammar(FORMATS[kind], wish, "none", special, is_inside=False)
    grammars, seen = Grammars(tokenizer, tokenizer.vocab_size, 60.0), set()
    try:
        for state in grammars.prepare(source, 12):
            output = random_output(state, tokenizer, rng, visible=frozenset(special.values()))
            text, names, arguments = calls_of(kind, wish, output)
            assert text == "" and names
            for name, values in zip(names, arguments, strict=True):
                assert name == "f" or check(name, values) is None
                assert name != "f" or {"days", "place", "code"} <= values.keys()
            seen |= {*names}
    finally:
        grammars.close()
    assert seen == {"f", "g", "get-weather"}


def test_a_schema_that_cannot_be_kept_is_refused_if_it_is_strict(tokenizer, grammars):
    schema = {"type": "object", "properties": {"a": {"type": "string", "contentEncoding": "x"}}}
    for strict in (True, False):
        function = Function("f", parameters=schema | {"unevaluatedItems": 5}, strict=strict)
        source = grammar_of("hermes", ToolWish((function,), is_forced=True), tokenizer)
        if not strict:
            assert grammars.prepare(source, 1)
            continue
        with pytest.raises(ServeError) as caught:
            grammars.prepare(source, 1)
        assert caught.value.param == "tools"


def test_many_tools_are_one_grammar(tokenizer, grammars):
    wish = ToolWish(tuple(Function(f"f{i}", parameters=SCHEMA) for i in range(200)), True)
    (state,) = grammars.prepare(grammar_of("hermes", wish, tokenizer), 1)
    _, names, _ = calls_of("hermes", wish, random_output(state, tokenizer, random.Random(6)))
    assert names

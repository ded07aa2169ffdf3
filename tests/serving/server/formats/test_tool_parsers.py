"""Outputs are taken apart the same way whatever the parts are in which they come."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_up import examples

from serving.server.fields import Function
from serving.server.formats.call_marks import DEEPSEEK_BEGIN, DEEPSEEK_CALL, DEEPSEEK_SEPARATOR
from serving.server.formats.pieces import CallArguments, CallBegin, Reasoning, Text
from serving.server.formats.tool_formats import FORMATS, make_parser, tool_format
from serving.server.options import SERVER_SETTINGS
from serving.server.tools import ToolWish

WISH = ToolWish((Function("f"), Function("get_weather")))
CALL = '{"name": "f", "arguments": {"a": "}</tool_call>\\"{", "b": [1, {}]}}'
ARGUMENTS = {"a": '}</tool_call>"{', "b": [1, {}]}
HARMONY = (
    "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
    '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}<|call|>'
)


def parts_of(pieces) -> tuple[str, str, list[tuple[str, str]]]:
    """(text, reasoning, (name, arguments) of calls); numbers and ids must be in order."""
    text = "".join(piece.text for piece in pieces if isinstance(piece, Text))
    thought = "".join(piece.text for piece in pieces if isinstance(piece, Reasoning))
    calls, ids = [], set()
    for piece in pieces:
        if isinstance(piece, CallBegin):
            assert piece.number == len(calls)
            ids.add(piece.id)
            calls.append((piece.name, ""))
        elif isinstance(piece, CallArguments):
            assert piece.number == len(calls) - 1
            calls[-1] = (calls[-1][0], calls[-1][1] + piece.text)
        assert getattr(piece, "text", "x"), "a piece is empty"
    assert len(ids) == len(calls)
    return text, thought, calls


def parse(kind: str, parts, *, reasoning="none", wish=WISH, is_inside=False):
    parser = make_parser(FORMATS.get(kind), wish, reasoning, is_inside=is_inside)
    pieces = [piece for part in parts for piece in parser.feed(part)]
    return parts_of(pieces + parser.finish())


@pytest.mark.parametrize(
    ("kind", "output", "text", "calls"),
    [
        ("hermes", f"<tool_call>\n{CALL}\n</tool_call>", "", [ARGUMENTS]),
        ("hermes", f"So:\n<tool_call>{CALL}</tool_call>\n", "So:", [ARGUMENTS]),
        ("hermes", f"<tool_call>{CALL}</tool_call>\n" * 3, "", [ARGUMENTS] * 3),
        ("hermes", f"<tool_call>{CALL}", "", [ARGUMENTS]),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}</tool_call>!', "!", [{"a": 1}]),
        ("hermes", '<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>', "", [{"a": 1}]),
        ("hermes", '<tool_call>{"name": "f"}</tool_call>', "", [{}]),
        ("hermes", '<tool_call>{"name":"f","arguments":"{\\"a\\":1}"}</tool_call>', "", [{"a": 1}]),
        ("hermes", '<tool_call>{"name":"f","arguments":{},"id":"}"}</tool_call>x', "x", [{}]),
        ("smollm2", f"<tool_call>[{CALL}, {CALL}]</tool_call>", "", [ARGUMENTS] * 2),
        ("smollm2", "<tool_call>[]</tool_call>", "", []),
        ("llama3_json", '{"name": "f", "parameters": {"a": 1}}', "", [{"a": 1}]),
        ("llama3_json", '{"parameters": {"a": 1}, "name": "f"}', "", [{"a": 1}]),
        (
            "llama3_json",
            ' <|python_tag|>{"name": "f", "parameters": {}}; ' + CALL,
            "",
            [{}, ARGUMENTS],
        ),
        ("llama3_json", '{"name": "f", "parameters": {}} Done.', "Done.", [{}]),
        ("mistral", f"[TOOL_CALLS][{CALL},{CALL}]", "", [ARGUMENTS] * 2),
        ("mistral", '[TOOL_CALLS] f[ARGS]{"a": 1}[TOOL_CALLS]f[ARGS]{}', "", [{"a": 1}, {}]),
        ("mistral", '[TOOL_CALLS]f[CALL_ID]a1[ARGS] {"a": 1}', "", [{"a": 1}]),
        ("openai", HARMONY, "", [{"a": 1}]),
        ("openai", "<|channel|>final<|message|>Hi.<|return|>", "Hi.", []),
    ],
)
def test_calls(kind, output, text, calls):
    found, _, made = parse(kind, [output])
    assert found == text
    assert made == parse(kind, output)[2]
    assert [(name, json.loads(each)) for name, each in made] == [("f", each) for each in calls]


# By format: before a call in JSON, and behind it.
AROUND = {
    "hermes": ("<tool_call>\n", "\n</tool_call>"),
    "smollm2": ("<tool_call>[", "]</tool_call>"),
    "llama3_json": ("", ""),
    "mistral": ("[TOOL_CALLS][", "]"),
    "mistral_named": ("[TOOL_CALLS][", "]"),
}


@pytest.mark.parametrize("kind", AROUND)
@pytest.mark.parametrize(
    ("call", "arguments"),
    [
        ('{"name": "f", "parameters": {"a": {"b": 1}}}', {"a": {"b": 1}}),
        ('{"parameters": {"a": 1}, "name": "f"}', {"a": 1}),
        ('{"arguments": {"a": 1}, "name": "f"}', {"a": 1}),
        ('{"id": "x", "name": "f", "parameters": {"a": 1}}', {"a": 1}),
        ('{"type": "function", "name": "f", "parameters": {"a": 1}}', {"a": 1}),
        ('{"name": "f", "parameters": "{\\"a\\": 1}"}', {"a": 1}),
        ('{"name": "f"}', {}),
        ('{"type": "function", "name": "f"}', {}),
    ],
)
def test_arguments_are_found_by_either_name_and_may_be_left_out(kind, call, arguments):
    """A model may write the other format's field, or none where a function needs no arguments."""
    before, behind = AROUND[kind]
    for parts in ([before + call + behind], before + call + behind):
        text, _, ((name, written),) = parse(kind, parts)
        assert (text, name, json.loads(written)) == ("", "f", arguments)


@pytest.mark.parametrize("kind", AROUND)
@pytest.mark.parametrize("field", ["arguments", "parameters"])
def test_arguments_are_passed_on_before_the_call_has_ended(kind, field):
    """Whatever their field is called: a client sees them as the model writes them."""
    parser = make_parser(FORMATS[kind], WISH, "none", is_inside=False)
    pieces = parser.feed(AROUND[kind][0] + f'{{"name": "f", "{field}": {{"a": [1, ')
    assert parts_of(pieces) == ("", "", [("f", '{"a": [1, ')])


@pytest.mark.parametrize("to", ["f", "g"])
def test_a_call_of_harmony_without_arguments(to):
    """An empty message calls a function with none, as JSON; without such a function it is text."""
    output = f"<|channel|>commentary to=functions.{to} <|constrain|>json<|message|><|call|>"
    for parts in ([output], output):
        assert parse("openai", parts) == ("", "", [("f", "{}")] if to == "f" else [])
    cut = output.removesuffix("<|call|>")
    assert parse("openai", [cut]) == ("", "", [("f", "")] if to == "f" else [])


@pytest.mark.parametrize(
    ("kind", "output"),
    [
        *((kind, "Hi [x] <tool {a} \n") for kind in FORMATS),
        *((kind, "") for kind in FORMATS),
        ("hermes", '<tool_call>{"name": "g", "arguments": {"a": 1}}</tool_call>'),
        ("hermes", "<tool_call>\nf(1)\n</tool_call> then"),
        ("hermes", '<tool_call>{"name": "f", "arguments": 5}</tool_call>'),
        ("hermes", '<tool_call>{"name": 5, "arguments": {}}</tool_call>'),
        ("hermes", "<tool_call>{name: 'f', arguments: {}}</tool_call>"),
        ("hermes", '<tool_call>{"name": "f", "argu'),
        ("hermes", "\n <tool_call>\n"),
        ("hermes", CALL),
        ("llama3_json", 'See {"name": "f", "parameters": {}}'),
        ("llama3_json", '{"city": {"name": "f"}}'),
        ("llama3_json", "  \n"),
        ("mistral", "[TOOL_CALLS]g[ARGS]{}"),
        ("mistral", "[TOOL_CALLS] f(1)"),
        ("mistral", "[TOOL_CALLS]f[ARGS"),
    ],
)
def test_what_is_no_call_is_text(kind, output):
    assert parse(kind, [output]) == (output, "", [])


@pytest.mark.parametrize(
    ("kind", "begin"),
    [
        ("hermes", '<tool_call>{"name": "f", "arguments": '),
        ("llama3_json", '{"name": "f", "parameters": '),
    ],
)
def test_arguments_that_are_cut_are_what_has_come(kind, begin):
    assert parse(kind, [begin + '{"a": [1, ']) == ("", "", [("f", '{"a": [1, ')])


@pytest.mark.parametrize("kind", ["hermes", "smollm2", "mistral"])
def test_calls_beyond_the_most_are_left_out(kind):
    marks = FORMATS[kind].marks
    output = f"a{marks.begin[0]}[{CALL}, {CALL}]{marks.end}"
    assert len(parse(kind, [output])[2]) == 2
    assert len(parse(kind, [output], wish=ToolWish(WISH.functions, most=1))[2]) == 1


@pytest.mark.parametrize(
    ("output", "is_inside", "thought", "text"),
    [
        ("<think>\na < b\n</think>\n\nYes", False, "a < b", "Yes"),
        ("a\n\nb</think>Yes", True, "a\n\nb", "Yes"),
        ("a </thin", True, "a </thin", ""),
        ("Yes <think>no</think>", False, "", "Yes <think>no</think>"),
        ("<think></think>", False, "", ""),
        ("", True, "", ""),
        ("<thin", False, "", "<thin"),
    ],
)
def test_reasoning(output, is_inside, thought, text):
    for parts in ([output], output):
        assert parse("none", parts, reasoning="think", is_inside=is_inside) == (text, thought, [])


def test_reasoning_before_a_call():
    output = f"<think>Hm.</think>\n<tool_call>{CALL}</tool_call>"
    text, thought, calls = parse("hermes", output, reasoning="think")
    assert (text, thought, len(calls)) == ("", "Hm.", 1)
    assert parse("openai", HARMONY, reasoning="openai_gptoss")[:2] == ("", "Hm.")


WORDS = st.sampled_from(
    [
        *('{"name": "f", "arguments": {"a": 1}}', '{"name": "f", "arguments": ', '"name": "f"'),
        *("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "f[ARGS]", "<|python_tag|>", "g[ARGS]{}"),
        *("<think>", "</think>", "<|channel|>", "analysis", "final", "<|message|>", "<|end|>"),
        *(" to=functions.f", "<|start|>assistant", "<|call|>", "{", "}", "[", "]", '"', "\\", ","),
        *("<function=", "<function=f>", "<parameter=a>", "</parameter>", "</function>", "\n"),
        *("<arg_key>a</arg_key>", "<arg_value>", "</arg_value>", "<seed:tool_call>"),
        *("<minimax:tool_call>", '<invoke name="f">', '<parameter name="a">', "</invoke>"),
        *(DEEPSEEK_BEGIN, DEEPSEEK_CALL, "function" + DEEPSEEK_SEPARATOR, "f\n```json\n", "```"),
        *("<|tool_calls_section_begin|>", "<|tool_call_begin|>", "functions.f:0", "f:1"),
        *("<|tool_call_argument_begin|>", "<|tool_call_end|>", "<start_function_call>", "<escape>"),
        *("call:f{", "a:", "<|tool_call>", '<|"|>', "<tool_call|>", "[f(", "a=", "'", ")", "None"),
        *("\\u00", "e9", "\\x4", "1.5", "<|python_start|>", "<|python_end|>"),
        *(" ", "\n", ";", "f", "x", "<", '{"a": {}}', "é", "日"),
    ]
)


@examples(400)
@given(
    st.sampled_from(sorted(FORMATS)),
    st.sampled_from(["none", "think", "openai_gptoss"]),
    st.lists(WORDS, max_size=12),
    st.lists(st.integers(1, 9), min_size=1, max_size=8),
    st.booleans(),
)
def test_the_parts_change_nothing(kind, reasoning, words, sizes, is_inside):
    output, parts, start = "".join(words), [], 0
    while start < len(output):
        size = sizes[len(parts) % len(sizes)]
        parts.append(output[start : start + size])
        start += size
    options = {"reasoning": reasoning, "is_inside": is_inside}
    whole = parse(kind, [output], **options)
    assert parse(kind, parts, **options) == whole
    assert parse(kind, output, **options) == whole


@pytest.mark.parametrize(
    ("kind", "begin", "unit"),
    [
        ("hermes", "<tool_call>", "["),
        ("hermes", "", "<tool_call>x"),
        ("hermes", "<tool_call>", '{"name": "f", "x": {},'),
        ("hermes", '<tool_call>{"name": "' + "f" * 100_000 + '", ', '"x": {},'),
        ("mistral", "[TOOL_CALLS]", "f"),
        ("qwen3_coder", "<tool_call>", "<function="),
        ("gemma4", "", "<|tool_call>call:"),
        ("kimi_k2", "<|tool_call_begin|>", "functions."),
        ("pythonic", "", "[f"),
        ("openai", "", "<|end|>x"),
        ("openai", "", "<|channel|>"),
    ],
)
def test_long_outputs(kind, begin, unit):
    """Each takes well under a second; were it quadratic, minutes."""
    output = begin + unit * (200_000 // len(unit))
    text, _, calls = parse(kind, [output])
    assert calls == []
    assert kind == "openai" or text == output


@pytest.mark.parametrize(
    ("kind", "begin", "unit"),
    [
        ("qwen3_coder", "<tool_call><function=f>", "<parameter=a>1</parameter>"),
        ("qwen3_coder", "<tool_call><function=f><parameter=a>", "[1, "),
        ("qwen3_coder", "<tool_call><function=f>", "<x"),
        ("pythonic", "[f(a=", "[1, "),
        ("pythonic", "[f(a=", "1"),
        ("pythonic", "[f(a='", "\\x"),
        ("gemma4", "<|tool_call>call:f{a:", "1"),
        ("gemma4", "<|tool_call>call:f{", "<"),
    ],
)
def test_long_arguments(kind, begin, unit):
    """They come four characters at a time, and each takes about a second at most."""
    output = begin + unit * (40_000 // len(unit))
    _, _, ((name, made),) = parse(kind, [output[at : at + 4] for at in range(0, len(output), 4)])
    assert (name, made) == ("f", parse(kind, [output])[2][0][1])


def test_the_settings_name_the_formats():
    names = set(SERVER_SETTINGS["tool_parser"].choices) - {"auto", "none"}
    assert names == set(FORMATS) - {"mistral_named"}
    assert tool_format("mistral", "[TOOL_CALLS] [ARGS] tools") is FORMATS["mistral_named"]

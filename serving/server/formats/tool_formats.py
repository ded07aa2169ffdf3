"""How models write tool calls, and how to tell from a chat template which one does. No JAX.

One row of `FORMATS` is one way. A model whose template knows no tools is told of them in a system
message, in the words that SmolLM2 was trained with (model card of SmolLM2-1.7B-Instruct).
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec

from serving.server.fields import Function
from serving.server.formats import call_marks
from serving.server.formats.argument_grammar import Rules, keywords, tagged, with_quotes
from serving.server.formats.form_parser import FormParser
from serving.server.formats.pieces import Parser, PlainParser
from serving.server.formats.reasoning_parsers import HARMONY_MARKS, HarmonyParser, ThinkParser
from serving.server.formats.tool_parsers import CallMarks, CallParser
from serving.server.tools import ToolWish
from shiftjax.text.thinking import MARKS, name_of_marks

Json = Any


@dataclass(frozen=True)
class Written:
    """Calls as they are written: `opening`, calls with separators, `closing`.

    A call is `name_before`, the name, `name_after`, the arguments, `end`. A mark in `<|...|>` or
    `[...]` is a special token where the tokenizer has one. `{n}` in `name_after` is a number.
    """

    name_before: str
    name_after: str
    end: str
    opening: str = ""
    separator: str = ""
    closing: str = ""
    arguments: Callable[[Rules, Function], str] | None = None  # None: a JSON object


@dataclass(frozen=True)
class ToolFormat:
    """One way to write calls. `signs`: all are in the templates of its models."""

    signs: tuple[str, ...]
    marks: CallMarks | None  # None: harmony
    written: Written
    is_told: bool = False  # the template knows no tools, and we tell the model


_OBJECT, _ARGUMENTS = '{"name": "', '", "arguments": '
_SMOLLM2 = Written(_OBJECT, _ARGUMENTS, "}", "<tool_call>[", ", ", "]</tool_call>")

_XML = partial(tagged, "<parameter=", ">\n", "\n</parameter>\n")
_GLM45 = partial(tagged, "<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n")
_GLM47 = partial(tagged, "<arg_key>", "</arg_key><arg_value>", "</arg_value>")
_INVOKED = partial(tagged, '<parameter name="', '">', "</parameter>\n")

# The first whose signs are all in a template is its format.
FORMATS: dict[str, ToolFormat] = {
    "openai": ToolFormat(
        ("<|channel|>", "<|message|>"),
        None,
        Written("<|channel|>commentary to=functions.", " <|constrain|>json<|message|>", ""),
    ),
    "mistral_named": ToolFormat(
        ("[TOOL_CALLS]", "[ARGS]"), call_marks.MISTRAL, Written("[TOOL_CALLS]", "[ARGS]", "")
    ),
    "mistral": ToolFormat(
        ("[TOOL_CALLS]",),
        call_marks.MISTRAL,
        Written(_OBJECT, _ARGUMENTS, "}", "[TOOL_CALLS][", ", ", "]"),
    ),
    "llama3_json": ToolFormat(
        ("<|start_header_id|>", '"parameters": '),
        call_marks.LLAMA3,
        Written(_OBJECT, '", "parameters": ', "}", separator="; "),
    ),
    "qwen3_coder": ToolFormat(
        ("<tool_call>", "<function=", "<parameter="),
        call_marks.QWEN3_CODER,
        Written(
            *("<tool_call>\n<function=", ">\n", "</function>\n</tool_call>"),
            separator="\n",
            arguments=_XML,
        ),
    ),
    "seed_oss": ToolFormat(
        ("<seed:tool_call>",),
        call_marks.SEED_OSS,
        Written(
            *("<seed:tool_call>\n<function=", ">\n", "</function>\n</seed:tool_call>"),
            separator="\n",
            arguments=_XML,
        ),
    ),
    "glm45": ToolFormat(
        ("<arg_key>", "</arg_key>\n<arg_value>"),
        call_marks.GLM,
        Written("<tool_call>", "\n", "</tool_call>", separator="\n", arguments=_GLM45),
    ),
    "glm47": ToolFormat(
        ("<arg_key>", "<arg_value>"),
        call_marks.GLM,
        Written("<tool_call>", "", "</tool_call>", arguments=_GLM47),
    ),
    "minimax_m2": ToolFormat(
        ("<minimax:tool_call>",),
        call_marks.MINIMAX_M2,
        Written(
            *('<invoke name="', '">\n', "</invoke>\n"),
            *("<minimax:tool_call>\n", "", "</minimax:tool_call>"),
            arguments=_INVOKED,
        ),
    ),
    "deepseek_v3": ToolFormat(
        (call_marks.DEEPSEEK_CALL, "```json"),
        call_marks.DEEPSEEK,
        Written(
            *(f"{call_marks.DEEPSEEK_CALL}function{call_marks.DEEPSEEK_SEPARATOR}", "\n```json\n"),
            *(
                f"\n```{call_marks.DEEPSEEK_CALL_END}",
                call_marks.DEEPSEEK_BEGIN,
                "\n",
                call_marks.DEEPSEEK_END,
            ),
        ),
    ),
    "deepseek_v31": ToolFormat(
        (call_marks.DEEPSEEK_CALL, call_marks.DEEPSEEK_SEPARATOR),
        call_marks.DEEPSEEK,
        Written(
            *(
                call_marks.DEEPSEEK_CALL,
                call_marks.DEEPSEEK_SEPARATOR,
                call_marks.DEEPSEEK_CALL_END,
            ),
            *(call_marks.DEEPSEEK_BEGIN, "", call_marks.DEEPSEEK_END),
        ),
    ),
    "kimi_k2": ToolFormat(
        ("<|tool_calls_section_begin|>",),
        call_marks.KIMI,
        Written(
            *("<|tool_call_begin|>functions.", ":{n}<|tool_call_argument_begin|>"),
            *("<|tool_call_end|>", "<|tool_calls_section_begin|>"),
            closing="<|tool_calls_section_end|>",
        ),
    ),
    "functiongemma": ToolFormat(
        ("<start_function_call>",),
        call_marks.FUNCTION_GEMMA,
        Written(
            *("<start_function_call>call:", "{", "}<end_function_call>"),
            arguments=partial(with_quotes, "<escape>"),
        ),
    ),
    "gemma4": ToolFormat(
        ("<|tool_call>",),
        call_marks.GEMMA4,
        Written(
            *("<|tool_call>call:", "{", "}<tool_call|>"),
            arguments=partial(with_quotes, '<|"|>'),
        ),
    ),
    "llama4_pythonic": ToolFormat(
        ("<|header_start|>", "[func_name1("),
        call_marks.LLAMA4_PYTHONIC,
        Written("", "(", ")", "[", ", ", "]", arguments=keywords),
    ),
    "llama4_json": ToolFormat(
        ("<|header_start|>", '"parameters": '),
        call_marks.LLAMA4,
        Written(_OBJECT, '", "parameters": ', "}", separator="; "),
    ),
    "pythonic": ToolFormat(
        ("[func_name1(",),
        call_marks.PYTHONIC,
        Written("", "(", ")", "[", ", ", "]", arguments=keywords),
    ),
    "hermes": ToolFormat(
        ("<tool_call>", '"arguments": '),
        call_marks.TAGS,
        Written("<tool_call>\n" + _OBJECT, _ARGUMENTS, "}\n</tool_call>", separator="\n"),
    ),
    "smollm2": ToolFormat((), call_marks.TAGS, _SMOLLM2, is_told=True),
}
_KNOWS_TOOLS = re.compile(r"\btools\b")


def tool_format(name: str, template: str | None) -> ToolFormat | None:
    """The format of this name, or with `auto` that of a chat template; None: there is none."""
    if name == "none" or template is None:
        return None
    template = template.replace('\\"', '"')  # as the text in its strings reads
    knows_tools = _KNOWS_TOOLS.search(template) is not None
    if name == "auto" and not knows_tools:
        return FORMATS["smollm2"]
    if name != "auto":
        is_named = name == "mistral" and "[ARGS]" in template
        return FORMATS["mistral_named" if is_named else name]
    rows = (row for row in FORMATS.values() if row.signs)
    return next((row for row in rows if all(sign in template for sign in row.signs)), None)


def reasoning_format(name: str, template: str | None) -> str:
    """A name of `MARKS`, or `none`; with `auto`, as the chat template says."""
    return name if name != "auto" else name_of_marks(template) or "none"


def visible_marks(wanted: ToolFormat | None, reasoning: str) -> tuple[str, ...]:
    """What must be seen in the text of an output although it may be special tokens."""
    if reasoning == "openai_gptoss" or (wanted and wanted.marks is None):
        return HARMONY_MARKS
    thoughts = MARKS.get(reasoning)
    seen = (thoughts.begin, thoughts.end) if thoughts else ()
    return (*seen, *(wanted.marks.all if wanted and wanted.marks else ()))


def make_parser(
    wanted: ToolFormat | None,
    wish: ToolWish | None,
    reasoning: str,
    *,
    is_inside: bool,
    has_form: bool = False,
) -> Parser:
    """A parser of one continuation. `is_inside`: the prompt ended where reasoning begins.

    `has_form`: an answer without calls keeps to a form, and nothing stands before calls.
    """
    names, most = (wish.names, wish.most) if wish else (frozenset[str](), None)
    if reasoning == "openai_gptoss" or (wish and wanted and wanted.marks is None):
        return HarmonyParser(names, most)
    parser: Parser = PlainParser()
    if wish and wanted and wanted.marks:
        parser = CallParser(wanted.marks, wish.functions, most)
        if has_form and not wanted.marks.bare:
            parser = FormParser(parser, wanted.marks.begin)
    if reasoning not in MARKS:
        return parser
    # A model may call a tool in the middle of its thoughts and never end them.
    marks = wanted.marks.begin if wish and wanted and wanted.marks else ()
    calls = tuple(mark for mark in marks if mark != "\n[")
    return ThinkParser(MARKS[reasoning], parser, is_inside=is_inside, calls=calls)


# ---------------------------------------------------------------- templates that know no tools

_TOLD = """\
You are an expert in composing functions. You are given a question and a set of possible functions.
Based on the question, you will need to make one or more function/tool calls to achieve the purpose.
If none of the functions can be used, point it out and refuse to answer.
If the given question lacks the parameters required by the function, also point it out.

You have access to the following tools:
<tools>{}</tools>

The output MUST strictly adhere to the following format, and NO other text MUST be included.
The example format is as follows. Please make sure the parameter type is correct. \
If no function call is needed, please make the tool calls an empty list '[]'.
<tool_call>[
{{"name": "func_name1", "arguments": {{"argument1": "value1", "argument2": "value2"}}}},
... (more tool calls as required)
]</tool_call>"""


def told(messages: Sequence[dict[str, Json]], tools: Sequence[Json]) -> list[dict[str, Json]]:
    """The messages for a template that knows no tools: tools, calls and results become text."""
    written = [_as_text(message) for message in messages]
    if not tools:
        return written
    words = _TOLD.format(msgspec.json.encode(tools).decode())
    first = written[0] if written else {}
    if first.get("role") not in ("system", "developer"):
        return [{"role": "system", "content": words}, *written]
    return [first | {"content": _joined(first.get("content"), words)}, *written[1:]]


def _joined(content: Json, words: str) -> Json:
    if isinstance(content, list):
        return [*content, {"type": "text", "text": words}]
    return f"{content}\n\n{words}" if isinstance(content, str) else content


def _as_text(message: dict[str, Json]) -> dict[str, Json]:
    """Calls and results as text: a template may know no more than users and assistants."""
    if message.get("role") == "tool" and isinstance(message.get("content"), str):
        text = f"<tool_response>\n{message['content']}\n</tool_response>"
        return {"role": "user", "content": text}
    if message.get("role") != "assistant" or not message.get("tool_calls"):
        return message
    calls = [call["function"] for call in message["tool_calls"]]
    text = f"<tool_call>{msgspec.json.encode(calls).decode()}</tool_call>"
    plain = {name: value for name, value in message.items() if name != "tool_calls"}
    return plain | {"content": _joined(plain["content"], text) if plain.get("content") else text}

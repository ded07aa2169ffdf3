"""How models mark their calls, as values: what a parser looks for. No JAX.

Sources: the chat templates and model cards of the models, and those that vLLM ships as examples.
"""

from functools import partial

from serving.server.formats.call_heads import KEY, NAME, SPACE, Head, Part, before, maybe
from serving.server.formats.literal_arguments import LiteralArguments, Literals
from serving.server.formats.tagged_arguments import TaggedArguments, Tags
from serving.server.formats.tool_parsers import CallMarks, short_call_id

TAGS = CallMarks(("<tool_call>",), "</tool_call>")  # around JSON
LLAMA3 = CallMarks(("<|python_tag|>",), bare="{")
LLAMA4 = CallMarks(("<|python_start|>",), "<|python_end|>", bare="{")
MISTRAL = CallMarks(
    ("[TOOL_CALLS]",),
    head=Head(
        *(NAME, maybe("[CALL_ID]"), Part(r"[\w-]{0,64}", r"[\w-]{0,64}"), "[ARGS]"),
        *(SPACE, before("{")),
    ),
    seen=("[ARGS]", "[CALL_ID]"),
    make_id=short_call_id,
)

# ---------------------------------------------------------------- a name, then JSON


def _token(name: str) -> str:
    """A special token of DeepSeek's."""
    bar = "\N{FULLWIDTH VERTICAL LINE}"
    return f"<{bar}{name.replace(' ', '▁')}{bar}>"


DEEPSEEK_BEGIN, DEEPSEEK_END = _token("tool calls begin"), _token("tool calls end")
DEEPSEEK_CALL, DEEPSEEK_CALL_END = _token("tool call begin"), _token("tool call end")
DEEPSEEK_SEPARATOR = _token("tool sep")
DEEPSEEK = CallMarks(
    (DEEPSEEK_BEGIN, DEEPSEEK_CALL),
    DEEPSEEK_END,
    behind=(DEEPSEEK_CALL_END, "```"),
    head=Head(
        *(maybe(f"function{DEEPSEEK_SEPARATOR}"), NAME, maybe(DEEPSEEK_SEPARATOR)),
        *(SPACE, maybe("```json"), SPACE, before("{")),
    ),
    has_objects=False,
    seen=(DEEPSEEK_SEPARATOR,),
)
# The id is the model's own: its template writes that of an earlier call in front of its arguments.
KIMI = CallMarks(
    ("<|tool_calls_section_begin|>", "<|tool_call_section_begin|>", "<|tool_call_begin|>"),
    "<|tool_calls_section_end|>",
    behind=("<|tool_call_end|>", "<|tool_call_section_end|>"),
    head=Head(
        Part(
            r"(?P<id>(?:functions\.)?(?P<name>[\w-]{1,64}):\d{1,9})",
            r"[\w-]{0,64}|functions\.[\w-]{0,64}|(?:functions\.)?[\w-]{1,64}:\d{0,9}",
        ),
        *(SPACE, "<|tool_call_argument_begin|>", SPACE, before("{")),
    ),
    has_objects=False,
    seen=("<|tool_call_argument_begin|>",),
)

# ---------------------------------------------------------------- arguments in tags

_PARAMETERS = Tags(
    Head("<parameter=", KEY, ">"),
    "</parameter>",
    "</function>",
    "</tool_call>",
    ("\n<parameter=",),
    is_padded=True,
)
# Qwen3-Coder may leave out the outer tag.
QWEN3_CODER = CallMarks(
    ("<tool_call>", "<function="),
    "</tool_call>",
    head=Head(maybe("<function="), NAME, ">"),
    has_objects=False,
    reader=partial(TaggedArguments, _PARAMETERS),
)
SEED_OSS = CallMarks(
    ("<seed:tool_call>", "<function="),
    "</seed:tool_call>",
    head=Head(maybe("<function="), NAME, ">"),
    has_objects=False,
    reader=partial(
        TaggedArguments,
        Tags(_PARAMETERS.key, "</parameter>", "</function>", "</seed:tool_call>", is_padded=True),
    ),
)
GLM = CallMarks(
    ("<tool_call>",),
    "</tool_call>",
    head=Head(NAME, before(" \n<")),
    has_objects=False,
    reader=partial(
        TaggedArguments,
        Tags(
            Head("<arg_key>", KEY, "</arg_key>", SPACE, "<arg_value>"),
            *("</arg_value>", "", "</tool_call>"),
        ),
    ),
    seen=("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
)
MINIMAX_M2 = CallMarks(
    ("<minimax:tool_call>",),
    "</minimax:tool_call>",
    head=Head("<invoke name=", maybe('"'), NAME, maybe('"'), ">"),
    has_objects=False,
    reader=partial(
        TaggedArguments,
        Tags(
            Head("<parameter name=", maybe('"'), KEY, maybe('"'), ">"),
            *("</parameter>", "</invoke>", "</minimax:tool_call>"),
        ),
    ),
)

# ---------------------------------------------------------------- arguments in literals

_PYTHON = partial(LiteralArguments, Literals(")", ("'", '"'), has_escapes=True))
# Models write text before their calls although they are told not to.
PYTHONIC = CallMarks(("\n[",), bare="[", head=Head(NAME, "("), has_objects=False, reader=_PYTHON)
LLAMA4_PYTHONIC = CallMarks(
    ("<|python_start|>", "\n["),
    "<|python_end|>",
    bare="[",
    head=Head(NAME, "("),
    has_objects=False,
    reader=_PYTHON,
)
FUNCTION_GEMMA = CallMarks(
    ("<start_function_call>",),
    "<end_function_call>",
    head=Head("call:", NAME, "{"),
    has_objects=False,
    reader=partial(LiteralArguments, Literals("}", ("<escape>",))),
    seen=("<escape>",),
)
GEMMA4 = CallMarks(
    ("<|tool_call>",),
    "<tool_call|>",
    head=Head(maybe("call"), maybe(":"), NAME, Part(r"[{(]", "")),
    has_objects=False,
    reader=partial(LiteralArguments, Literals("}", ('<|"|>',))),
    seen=('<|"|>',),
)

"""Grammars of tool calls, in llguidance's dialect of Lark: a forced or strict call always parses.

Arguments keep to the schemas of the tools. Without `strict`, keywords that llguidance does not know
are left out of a schema; with it they are refused. No JAX.
"""

import json
import re
from collections.abc import Mapping
from typing import Any

from serving.server.fields import Function
from serving.server.formats.tool_formats import ToolFormat
from serving.server.grammar_source import GrammarSource
from serving.server.tools import ToolWish
from shiftjax.text.thinking import MARKS

MAX_CALLS = 16  # in one output that must be calls
_OPEN_ENDED = {"additionalProperties", "allOf", "anyOf", "oneOf", "patternProperties", "$ref"}
_ANY = "TEXT: /(.|\\n)*/"

Json = Any


def needs_grammar(wish: ToolWish) -> bool:
    """Whether the output is constrained: by force, a strict function, or what is allowed."""
    return wish.is_forced or wish.is_strict or bool(wish.all)


def call_grammar(
    wanted: ToolFormat,
    wish: ToolWish,
    reasoning: str,
    special: Mapping[str, int],
    *,
    is_inside: bool,
    answer: GrammarSource | None = None,
) -> GrammarSource:
    """The outputs that a wish allows. `special`: ids of the marks that are special tokens.

    `is_inside`: the prompt ended where reasoning begins. `answer`: the form of an output without
    calls; None: any text, also before calls.
    """
    lark = _Lark(special)
    if wanted.marks is None:
        start = _harmony(lark, wanted, wish, "TEXT" if answer is None else "@answer")
    elif wish.is_forced:
        start = _calls(lark, wanted, wish)
    elif answer is not None:
        calls = _bare_calls if wanted.marks.bare == "{" else _calls
        start = f"@answer | {calls(lark, wanted, wish)}"
    elif wanted.marks.bare:
        start = f"ANSWER | {_calls(lark, wanted, wish)}"
        lark.rules.append(f"ANSWER: /[ \\n]*([^\\{wanted.marks.bare} \\n](.|\\n)*)?/")
    else:
        start = _triggered(lark, wanted, wish)
    thoughts = MARKS.get(reasoning)
    if thoughts is not None and not thoughts.again:
        thought = f"{lark.until(thoughts.end)} SPACE"
        lark.rules.append("SPACE: /[ \\n]{0,4}/")
        begun = thought if is_inside else f"(SPACE {lark.text(thoughts.begin)} {thought})?"
        start = f"{begun} ({start})"
    text = "\n".join(["%llguidance {}", f"start: {start}", _ANY, *lark.rules])
    return GrammarSource("tools", text, answer.field if answer else "tools", answer=answer)


class _Lark:
    """Rules of a grammar as they are needed."""

    def __init__(self, special: Mapping[str, int]):
        self.rules: list[str] = []
        self._special = special
        marks = sorted(map(re.escape, special), key=len, reverse=True)
        self._split = re.compile(f"({'|'.join(marks)})") if marks else None

    def text(self, text: str) -> str:
        """The text, and nothing else; marks in it are the special tokens that they are."""
        parts = self._split.split(text) if self._split else [text]
        written = (
            f"<[{self._special[part]}]>" if part in self._special else json.dumps(part)
            for part in parts
            if part
        )
        return " ".join(written)

    def until(self, mark: str) -> str:
        """Any text up to the first of these marks, and the mark."""
        if mark in self._special:
            return f"TEXT {self.text(mark)}"
        name = f"until_{len(self.rules)}"
        self.rules.append(f"{name}[lazy]: TEXT {json.dumps(mark)}")
        return name

    def call(self, index: int, function: Function, before: str, wanted: ToolFormat) -> str:
        """One call; `before` is what stands before its name."""
        written = wanted.written
        name, number, after = f"{before}{function.name}{written.name_after}".partition("{n}")
        begin = f"{self.text(name)} /[0-9]/ {self.text(after)}" if number else self.text(name)
        made = written.arguments(self, function) if written.arguments else None
        arguments = f"%json {_schema(function)}" if made is None else made
        self.rules.append(f"call_{index}: {begin} {arguments} {self.text(written.end)}")
        return f"call_{index}"


def _calls(lark: _Lark, wanted: ToolFormat, wish: ToolWish, begun: str = "") -> str:
    """One call or several; `begun` is the mark that has been written."""
    written = wanted.written
    opening = written.opening.removeprefix(begun)
    before = written.name_before if written.opening else written.name_before.removeprefix(begun)
    names = (lark.call(i, each, before, wanted) for i, each in enumerate(wish.functions))
    lark.rules.append(f"call: {' | '.join(names)}")
    most = MAX_CALLS if wish.most is None else wish.most
    if begun and not written.opening:
        most = 1  # each has a mark of its own
    more = f" ({lark.text(written.separator)} call){{0,{most - 1}}}" if most > 1 else ""
    return f"{lark.text(opening)} call{more} {lark.text(written.closing)}"


def _bare_calls(lark: _Lark, wanted: ToolFormat, wish: ToolWish) -> str:
    """The same without marks, beside an answer that may begin alike: each call is a schema.

    As text, the beginning of a call would be one lexeme, and win over the brace of an answer.
    """
    for index, each in enumerate(wish.functions):
        lark.rules.append(f"call_{index}: %json {_call_schema(each)}")
    lark.rules.append("call: " + " | ".join(f"call_{i}" for i in range(len(wish.functions))))
    most = MAX_CALLS if wish.most is None else wish.most
    more = f" ({lark.text(wanted.written.separator)} call){{0,{most - 1}}}" if most > 1 else ""
    return f"call{more}"


def _triggered(lark: _Lark, wanted: ToolFormat, wish: ToolWish) -> str:
    """Return the rule for free text in which an opening mark starts constrained calls."""
    assert wanted.marks is not None
    mark = wanted.marks.begin[0]
    again = "*" if wish.most is None else "?"
    return f"({lark.until(mark)} {_calls(lark, wanted, wish, mark)}){again} TEXT"


def _harmony(lark: _Lark, wanted: ToolFormat, wish: ToolWish, answer: str) -> str:
    """Messages to nobody, and then a call, or an answer if there need be no call."""
    channel, message = lark.text("<|channel|>"), lark.text("<|message|>")
    said = f'{channel} ("analysis" | "commentary") {message} {lark.until("<|end|>")}'
    one = ToolWish(wish.functions, wish.is_forced, most=1)
    ends = [_calls(lark, wanted, one)]
    kind = f"({lark.text(' <|constrain|>json')})? " if answer != "TEXT" else ""
    ends += [] if wish.is_forced else [f'{channel} "final" {kind}{message} {answer}']
    return f"({said} {lark.text('<|start|>assistant')})* ({' | '.join(ends)})"


def _call_schema(function: Function) -> str:
    """The schema of a call of Llama 3's format, with the definitions of its arguments on top."""
    arguments: dict[str, Json] = json.loads(_schema(function))
    del arguments["x-guidance"]
    named = {name: arguments.pop(name) for name in ("$defs", "definitions") if name in arguments}
    properties = {"name": {"const": function.name}, "parameters": arguments}
    schema = {"type": "object", "properties": properties, "required": [*properties]} | named
    schema |= {"additionalProperties": False, "x-guidance": {"lenient": not function.strict}}
    return json.dumps(schema)


def _schema(function: Function) -> str:
    """The schema of a function's arguments: an object, written as models write it."""
    schema: dict[str, Json] = {"type": "object", "properties": {}} | (function.parameters or {})
    if not schema.keys() & _OPEN_ENDED:
        schema["additionalProperties"] = False
    schema["x-guidance"] = {
        "whitespace_flexible": False,
        "item_separator": ", ",
        "key_separator": ": ",
        "lenient": not function.strict,
    }
    return json.dumps(schema)

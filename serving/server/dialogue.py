"""What conversations need beside a chat template: tools, and marks in what is said. No JAX."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from serving.server.effort import effort_variables
from serving.server.errors import ServeError
from serving.server.fields import ChatFields, Function
from serving.server.formats.pieces import Parser, PlainParser, WithoutReasoning
from serving.server.formats.tool_formats import (
    make_parser,
    reasoning_format,
    told,
    tool_format,
    visible_marks,
)
from serving.server.formats.tool_grammar import call_grammar, needs_grammar
from serving.server.grammar_source import GrammarSource
from serving.server.options import ServerOptions
from serving.server.schema import Wish
from serving.server.system_turns import SystemTurns
from serving.server.tools import written_tools
from shiftjax.core.request import TokenConstraint
from shiftjax.text.chat import ChatTemplate
from shiftjax.text.rules import rules_of
from shiftjax.text.thinking import MARKS, begins_inside
from shiftjax.text.tokenizer import Tokenizer

Json = Any


class Dialogue:
    """How a model is told of tools, and how what it says is taken apart."""

    def __init__(
        self, tokenizer: Tokenizer | None, template: ChatTemplate | None, options: ServerOptions
    ):
        source = template.source if template is not None else None
        self._tokenizer, self._source = tokenizer, source
        self._systems = SystemTurns(template)
        self._tools = tool_format(options.tool_parser, source)
        self._reasoning = reasoning_format(options.reasoning_parser, source)
        self.template_defaults = json.loads(options.default_chat_template_kwargs or "{}")
        marks = visible_marks(self._tools, self._reasoning)
        special = tokenizer.special_ids if tokenizer is not None else frozenset()
        ids = {mark: tokenizer.backend.token_to_id(mark) for mark in marks} if tokenizer else {}
        self._special = {mark: i for mark, i in ids.items() if i is not None and i in special}

    def effort(self, fields: ChatFields) -> Mapping[str, Json]:
        """Variables of the template that say how much to think."""
        return effort_variables(fields.reasoning_effort, self._source)

    def noted(self, wish: Wish) -> Wish:
        """The wish; an effort or a budget that the model has no place for is one of its hints."""
        fields, unused = wish.fields, ()
        if isinstance(fields, ChatFields) and fields.reasoning_effort is not None:
            unused = () if self.effort(fields) else (wish.effort_name,)
        if wish.sampling.thinking_token_budget is not None and self._reasoning not in MARKS:
            unused = (*unused, "thinking_token_budget")
        return replace(wish, hints=(*wish.hints, *unused)) if unused else wish

    def conversation(
        self, messages: Sequence[dict[str, Json]], functions: Sequence[Function]
    ) -> tuple[list[dict[str, Json]], Mapping[str, Json]]:
        """(messages, variables) for the template. Raises `ServeError` if it can have no tools."""
        if functions and self._tools is None:
            message = (
                "This server does not know how the model writes tool calls (see --tool-parser)."
            )
            raise ServeError("invalid", message, param="tools", code="tools_unsupported")
        messages = self._systems.placed(messages)
        tools = written_tools(functions)
        if self._tools is not None and self._tools.is_told:
            return told(messages, tools), {}
        return [*messages], {"tools": tools} if tools else {}

    def visible(self, wish: Wish) -> frozenset[int]:
        """Special tokens that the text of an output shows: marks for the parser."""
        return frozenset(self._special.values()) if self._takes_apart(wish) else frozenset()

    def parser(self, wish: Wish, prompt: Sequence[int]) -> Callable[[], Parser]:
        """Makes the parser of one continuation of a prompt's token ids."""
        if not self._takes_apart(wish):
            return PlainParser
        inside = self._is_inside(prompt)
        formed = wish.grammar is not None
        make = partial(
            make_parser,
            self._tools,
            wish.tools,
            self._reasoning,
            is_inside=inside,
            has_form=formed,
        )
        assert isinstance(wish.fields, ChatFields)
        hides = wish.fields.include_reasoning is False
        return (lambda: WithoutReasoning(make())) if hides else make

    def grammar(self, wish: Wish, prompt: Sequence[int]) -> GrammarSource | None:
        """What constrains an output: the form of an answer, calls, or one or the other."""
        if wish.tools is None or self._tools is None:
            return wish.grammar
        if wish.grammar is None and not needs_grammar(wish.tools):
            return None
        wanted, names, answer = self._tools, self._special, wish.grammar
        inside = self._is_inside(prompt)
        return call_grammar(
            wanted, wish.tools, self._reasoning, names, is_inside=inside, answer=answer
        )

    def rules(self, wish: Wish, prompt: Sequence[int], vocab_size: int) -> list[TokenConstraint]:
        """What the sampling parameters say of texts in the output of a prompt."""
        marks = MARKS.get(self._reasoning)
        if wish.grammar is not None and wish.tools is None:
            marks = None  # all of the output is the answer
        return rules_of(wish.sampling, self._tokenizer, vocab_size, prompt, marks)

    def _takes_apart(self, wish: Wish) -> bool:
        """A constraint is on all of the output, which is then one text, but beside tools."""
        if not isinstance(wish.fields, ChatFields):
            return False
        if wish.tools is not None:
            return True
        return wish.grammar is None and self._reasoning != "none"

    def _is_inside(self, prompt: Sequence[int]) -> bool:
        """Whether a prompt ended where the reasoning of the output begins."""
        marks = MARKS.get(self._reasoning)
        if marks is None or marks.again or self._tokenizer is None:
            return False
        return begins_inside(prompt, self._tokenizer, marks)

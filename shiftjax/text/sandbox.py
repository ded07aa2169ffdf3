"""Jinja for chat templates from strangers: no way out, and a budget for what they may do.

A template can reach nothing but its arguments (Jinja's immutable sandbox). It can still try to
take all time or memory, so everything that repeats or makes text draws on one budget:

    a loop step, a call                        _STEP units
    an entry of a list made                    _ENTRY units
    a character made                           1 unit
    one operation that multiplies its inputs   checked before it runs (replace, join, indent ...)

What is left between two draws is straight-line code and operations linear in data that was paid
for, so the deadline, looked at in every draw, is met but for the last such operation.
"""

import functools
import json
import math
import re
import string
import time
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.filters import do_round
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from shiftjax.text.errors import ChatRequestError, ChatTemplateError

MAX_UNITS = 1 << 28  # 268 million characters made, or one million loop steps
_STEP, _ENTRY = 256, 32
_MAX_INT_BITS = 4096

# Filters and methods whose result can be as long as the product of their arguments' sizes.
# fmt: off
_MULTIPLYING = frozenset([
    "batch", "center", "expandtabs", "indent", "join", "ljust", "rjust", "slice", "to_bytes",
    "tojson", "translate", "urlize", "wordwrap", "xmlattr", "zfill",
])
# Filters that hand on what they were given, without writing out its contents.
_STRUCTURAL = frozenset([
    "abs", "attr", "count", "d", "default", "dictsort", "first", "float", "groupby", "int",
    "items", "last", "length", "list", "map", "max", "min", "random", "reject", "rejectattr",
    "reverse", "select", "selectattr", "sort", "unique",
])
# fmt: on
_CONTAINERS = (list, tuple, set, type({}.keys()), type({}.values()), type({}.items()))
# Widths make text from nothing: five digits, or (`*`, nested braces) taken from an argument.
_WIDE_PERCENT = re.compile(r"%(?:\([^)]*\))?[-+ #0_^]*(?:\d*\.)?(?:\*|\d{5})")
_WIDE_BRACES = re.compile(r"\{|\d{5}")


class Budget:
    """What one rendering may still do: units left, and the time (`time.monotonic`) it must end."""

    def __init__(self, units: int, seconds: float) -> None:
        self._left = units
        self._seconds = seconds
        self._deadline = time.monotonic() + seconds

    def spend(self, units: int) -> None:
        """Take `units`; raises `ChatTemplateError` when they or the time are used up."""
        self._left -= units
        if self._left < 0:
            raise ChatTemplateError("The chat template loops without end or makes too much text.")
        if time.monotonic() > self._deadline:
            raise ChatTemplateError(f"The chat template took longer than {self._seconds} s.")


_BUDGET: ContextVar[Budget] = ContextVar("chat_template_budget")


def render(template: jinja2.Template, budget: Budget, variables: dict[str, Any]) -> str:
    """Render within `budget`; errors are the template's own and Jinja's."""
    token = _BUDGET.set(budget)
    try:
        return template.render(variables)
    finally:
        _BUDGET.reset(token)


class ChatEnvironment(ImmutableSandboxedEnvironment):
    """The Jinja dialect of Hugging Face chat templates, every operation within the budget."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols", _GenerationBlock],
            finalize=_writable,
        )
        self.filters |= {"tojson": _tojson, "round": _round}
        self.filters = {name: _budgeted(name, made) for name, made in self.filters.items()}
        del self.globals["lipsum"]
        self.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call a function, macro or method for the template."""
        _BUDGET.get().spend(_STEP)
        if isinstance(obj, LoopContext):  # a recursive loop goes down one level
            args = tuple(self.steps(arg) for arg in args)
        method = getattr(obj, "__wrapped__", obj)  # the sandbox wraps str.format
        if isinstance(method, types.BuiltinMethodType):
            _check(method.__name__, method.__self__, *args, *kwargs.values())
        return _paid(super().call(context, obj, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Compute `left operator right` unless the result would be huge."""
        if isinstance(left, int) and isinstance(right, int):
            _check_int(operator, left, right)
        elif operator == "*":
            _check_product("*", left, right)
        elif operator == "%" and isinstance(left, str):
            _check_format("%", left, right)
        return _paid(super().call_binop(context, operator, left, right))

    def concat(self, parts: Iterable[str]) -> str:  # type: ignore[reportIncompatibleVariableOverride]
        """Join the output of a template, a macro or a block."""
        return "".join(_paid(part) for part in parts)

    def join_values(self, *values: Any) -> str:
        """Compute `a ~ b ~ ...`."""
        return self.concat(str(_writable(value)) for value in values)

    def steps(self, iterable: Iterable[Any]) -> Iterator[Any]:
        """Iterate for a loop."""
        budget = _BUDGET.get()
        for item in iterable:
            budget.spend(_STEP)
            yield item

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        return _RouteThroughEnvironment(self).visit(super()._parse(source, name, filename))


class _RouteThroughEnvironment(NodeTransformer):
    """Makes loops and `~` call the environment, as Jinja's sandbox has no hook for them."""

    def __init__(self, environment: ChatEnvironment) -> None:
        self.environment = environment

    def visit_For(self, node: nodes.For) -> nodes.Node:
        node = self.generic_visit(node)  # type: ignore[reportAssignmentType]
        node.iter = self._call("steps", [node.iter])
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        node = self.generic_visit(node)  # type: ignore[reportAssignmentType]
        return self._call("join_values", node.nodes)

    def _call(self, method: str, args: Sequence[nodes.Node]) -> nodes.Call:
        place = {"lineno": args[0].lineno, "environment": self.environment}
        function = nodes.EnvironmentAttribute(method, **place)
        return nodes.Call(function, list(args), [], None, None, **place)


class _GenerationBlock(Extension):
    """`{% generation %}` marks assistant text for training; here it is only its contents."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's interface)

    def parse(self, parser: Any) -> nodes.Node:
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=lineno)


def _budgeted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a filter: its result is paid for, and checked beforehand if it could be huge."""

    @functools.wraps(function)  # copies Jinja's mark of filters that take the context first
    def call(*args: Any, **kwargs: Any) -> Any:
        _BUDGET.get().spend(_STEP)
        inputs = args[1:] if hasattr(function, "jinja_pass_arg") else args
        if name == "join":
            inputs = (list(inputs[0]), *inputs[1:])
            args = (*args[: len(args) - len(inputs)], *inputs)
        if name not in _STRUCTURAL:
            _check("%" if name == "format" else name, *inputs, *kwargs.values())
            _extent(inputs)
        return _paid(function(*args, **kwargs))

    return call


def _paid(result: Any) -> Any:
    """Draw what `result` costs, and return it."""
    if isinstance(result, str | bytes):
        _BUDGET.get().spend(len(result))
    elif isinstance(result, list | tuple | dict):
        _BUDGET.get().spend(_ENTRY * len(result))
    return result


def _writable(value: Any) -> Any:
    """Return `value`, about to be written out, unless it is nested to a huge size."""
    if not isinstance(value, str):
        _extent(value)
    return value


def _extent(value: Any) -> int:
    """Return about the size of `value` written out; raises if it is over a whole budget.

    An entry of a list counts `_STEP` and its contents, each time it stands there.
    """
    total, pending = 0, [value]
    while pending:
        item = pending.pop()
        if isinstance(item, str | bytes):
            total += len(item)
        elif isinstance(item, int):
            total += item.bit_length()
        elif isinstance(item, Namespace):
            pending.append(item._Namespace__attrs)  # type: ignore[reportAttributeAccessIssue]
        elif isinstance(item, dict):
            pending.extend((item.keys(), item.values()))
        elif isinstance(item, _CONTAINERS):
            total += _STEP * len(item)
            pending.extend(item)
        if total > MAX_UNITS:
            raise ChatTemplateError("The chat template makes too much text in one operation.")
    return total


def _check(name: str, *inputs: Any) -> None:
    """Refuse a filter or method, if it is one that multiplies, that would make a huge result."""
    if name in ("%", "format", "format_map"):
        _check_format(name, *inputs)
    elif name == "replace":
        _check_product(name, inputs[0], *inputs[2:])  # what is taken out makes nothing longer
    elif name in _MULTIPLYING:
        _check_product(name, *inputs)


def _check_product(name: str, *inputs: Any) -> None:
    """Refuse a result as long as the product of the inputs, of which an integer is a width."""
    sizes = (abs(value) if isinstance(value, int) else _extent(value) for value in inputs)
    if math.prod(max(1, size) for size in sizes) > MAX_UNITS:
        raise ChatTemplateError(f"The chat template makes too much text in one {name!r}.")


def _check_format(name: str, template: str, *inputs: Any) -> None:
    """Refuse wide fields, and more text than a rendering may make."""
    if name == "%":
        is_wide = _WIDE_PERCENT.search(template.replace("%%", "")) is not None
    else:
        specs = [spec or "" for _, _, spec, _ in string.Formatter().parse(template)]
        is_wide = any(_WIDE_BRACES.search(spec) for spec in specs)
    if is_wide:
        raise ChatTemplateError(
            "The chat template formats with a field that is wider than 9,999 characters, or as "
            "wide as an argument says."
        )
    _check_product(name, template, inputs)


def _check_int(operator: str, left: int, right: int) -> None:
    if operator == "**":
        bits = max(1, left.bit_length()) * abs(right)
    else:
        bits = left.bit_length() + right.bit_length()
    if bits > _MAX_INT_BITS:
        raise ChatTemplateError(
            f"The chat template computes a number of over {_MAX_INT_BITS} bits."
        )


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Write JSON as chat templates expect it: no HTML escapes, any script as it is."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _round(value: float, precision: int = 0, method: Any = "common") -> float:
    """Round as Jinja does, which computes 10 ** precision."""
    _check_int("**", 10, precision)
    return do_round(value, precision, method)


def _raise_exception(message: str) -> None:
    """Let the template refuse its messages."""
    raise ChatRequestError(f"The chat template refuses these messages: {message}")


def _strftime_now(pattern: str) -> str:
    """Return the local time, as Llama 3.1's template asks for it."""
    _check_format("%", pattern)
    return datetime.now().strftime(pattern)

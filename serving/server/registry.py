"""What plugins may add to the server; `shiftjax/registry.py` is of the engine. No JAX.

Each function adds a row to a table, and raises ValueError for a name that is taken.
"""

from serving.server.formats.tool_formats import FORMATS, CallMarks, ToolFormat, Written
from shiftjax.options import add_choice
from shiftjax.text.thinking import MARKS, ThinkingMarks

__all__ = [
    "CallMarks",
    "ThinkingMarks",
    "ToolFormat",
    "Written",
    "add_thinking_marks",
    "add_tool_format",
]


def add_tool_format(name: str, form: ToolFormat) -> None:
    """Offer a format of tool calls to the setting `tool_parser`.

    With `auto` it is taken for templates that have all its signs and those of no format before.
    """
    if name in (*FORMATS, "auto", "none"):
        raise ValueError(f"there is a format of tool calls {name!r} already")
    FORMATS[name] = form
    add_choice("tool_parser", name)


def add_thinking_marks(name: str, marks: ThinkingMarks) -> None:
    """Offer marks of a model's thoughts to the setting `reasoning_parser`.

    With `auto` they are taken for templates that have their end and no end of those before.
    """
    if name in (*MARKS, "auto", "none"):
        raise ValueError(f"there is a format of reasoning {name!r} already")
    MARKS[name] = marks
    add_choice("reasoning_parser", name)

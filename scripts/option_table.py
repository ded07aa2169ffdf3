"""Command lines from tables: name -> default, or (default, help or more keywords)."""

import argparse
from collections.abc import Mapping
from typing import Any


def parsed(documentation: str | None, table: Mapping[str, Any]) -> argparse.Namespace:
    """Return the arguments of a script with these options."""
    style = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=documentation, formatter_class=style)
    add_options(parser, table)
    return parser.parse_args()


def add_options(parser: argparse.ArgumentParser, table: Mapping[str, Any]) -> None:
    """Add options to a parser.

    A default says the type; False is a switch, a list takes several values, a type has no default.
    """
    for name, given in table.items():
        default, more = given if isinstance(given, tuple) else (given, {})
        one = default[0] if isinstance(default, list) else default
        keywords: dict[str, Any] = {"type": one} if isinstance(one, type) else {"type": type(one)}
        keywords |= {} if isinstance(one, type) else {"default": default}
        keywords |= {"nargs": "+"} if isinstance(default, list) else {}
        keywords = {"action": "store_true"} if default is False else keywords
        keywords |= {"help": more} if isinstance(more, str) else more
        parser.add_argument(name, **keywords)

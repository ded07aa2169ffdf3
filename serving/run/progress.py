"""Progress bars and tables for people at a terminal. No JAX."""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

ProgressCallback = Callable[[str, int, int], None]  # stage, done, total


@contextmanager
def progress_bars(console: Console | None = None) -> Iterator[ProgressCallback | None]:
    """A callback that draws a bar for every stage on stderr; None where nobody looks at it."""
    console = console or Console(stderr=True)
    if not console.is_terminal or not sys.stdout.isatty():
        yield None
        return
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
    tasks: dict[str, Any] = {}
    with Progress(*columns, TimeElapsedColumn(), console=console, transient=True) as bars:

        def show(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = bars.add_task(stage, total=total)
            bars.update(tasks[stage], completed=done, total=total)

        yield show


def print_table(title: str, rows: Mapping[str, Any], *, stderr: bool = True) -> None:
    """Print names and values; nested mappings become `outer.inner` rows."""
    table = Table(title=title, title_justify="left", show_header=False, box=None)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in _flatten(rows):
        table.add_row(name, _shown(value))
    Console(stderr=stderr, highlight=False).print(table)


def _shown(value: Any) -> str:
    if not isinstance(value, float):
        return str(value)
    return f"{value:,.1f}" if abs(value) >= 10 else f"{value:.3g}"


def _flatten(rows: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in rows.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def throughput(num_tokens: int, seconds: float) -> dict[str, Any]:
    """The rows of a table that say how many tokens came, and how fast."""
    rate = num_tokens / seconds if seconds > 0 else 0.0
    return {"output tokens": num_tokens, "seconds": seconds, "output tokens/s": rate}

"""Progress bars and tables for people at a terminal. No JAX."""

import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from serving.server.start_phases import Phase, Phases

if TYPE_CHECKING:
    from rich.console import Console

logger = logging.getLogger(__name__)
LOG_SECONDS = 10.0  # between lines of the log about one phase
ProgressCallback = Callable[[str, int, int], None]  # task, done, total


def is_watched(console: "Console") -> bool:
    """Whether somebody looks at it: a terminal, and nothing but it is written to."""
    return console.is_terminal and sys.stdout.isatty()


@contextmanager
def progress_bars(console: "Console | None" = None) -> Iterator[ProgressCallback | None]:
    """A callback that draws a bar for every task on stderr; None where nobody looks at it."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = console or Console(stderr=True)
    if not is_watched(console):
        yield None
        return
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
    tasks: dict[str, Any] = {}
    with Progress(*columns, TimeElapsedColumn(), console=console, transient=True) as bars:

        def show(task: str, done: int, total: int) -> None:
            if task not in tasks:
                tasks[task] = bars.add_task(task, total=total)
            bars.update(tasks[task], completed=done, total=total)

        yield show


@contextmanager
def shown_progress() -> Iterator[ProgressCallback]:
    """Show how far something has come: bars at a terminal, elsewhere lines on stderr."""
    with progress_bars() as bars:
        yield bars or progress_lines()


def progress_lines() -> ProgressCallback:
    """A callback that prints a line for a task every `LOG_SECONDS`, with what may be left."""
    begun: dict[str, float] = {}
    said_at = time.monotonic()

    def show(task: str, done: int, total: int) -> None:
        nonlocal said_at
        now = time.monotonic()
        passed = now - begun.setdefault(task, said_at)
        if now - said_at < LOG_SECONDS or not done:
            return
        said_at, left = now, passed * (total - done) / done
        words = f"{task}: {done:,} of {total:,}, {passed:.0f} s so far, about {left:.0f} s left"
        print(words, file=sys.stderr, flush=True)

    return show


@contextmanager
def shown_phases(phases: Phases) -> Iterator[None]:
    """Show a start: bars at a terminal, elsewhere lines of the log.

    There is a line when a phase has ended, and one every `LOG_SECONDS` while it lasts.
    """
    with progress_bars() as bars:
        if bars is not None:
            phases.on_change = lambda now, _: now and bars(now.name, now.done, now.total)
            yield
            return
        phases.on_change = lambda now, before: _log_end(phases, now, before)
        has_ended = threading.Event()
        threading.Thread(target=_log_now, args=(phases, has_ended), daemon=True).start()
        try:
            yield
        finally:
            has_ended.set()


def _log_now(phases: Phases, has_ended: threading.Event) -> None:
    """Say every `LOG_SECONDS` what the start does; not on its own thread, which is busy."""
    while not has_ended.wait(LOG_SECONDS):
        if phases.current is not None:
            logger.info("starting: %s", phases.words())


def _log_end(phases: Phases, now: Phase | None, before: Phase | None) -> None:
    if before is not None and (now is None or now.name != before.name):
        count = f"{before.done} of {before.total} in " if before.total > 1 else ""
        logger.info("started: %s, %s%.1f s", before.name, count, phases.seconds[before.name])
    if before is not None and now is None:
        logger.info("ready after %.1f s", sum(phases.seconds.values()))


def print_table(title: str, rows: Mapping[str, Any], *, stderr: bool = True) -> None:
    """Print names and values; nested mappings become `outer.inner` rows."""
    from rich.console import Console
    from rich.table import Table

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

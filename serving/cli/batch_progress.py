"""How far a batch is, for people: one bar at a terminal, elsewhere lines on stderr."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from serving.cli.batch_tally import Tally
from serving.run import progress


@contextmanager
def shown_tally(tally: Tally, console: Console | None = None) -> Iterator[None]:
    """Show it whenever it changes: the bar is as long as the part of the time that has passed."""
    console = console or Console(stderr=True)
    if not progress.is_watched(console):
        tally.on_change = _Lines(tally).show
        yield
        return
    columns = TextColumn("{task.description}"), BarColumn(20), TextColumn("{task.fields[rest]}")
    with Progress(*columns, TimeElapsedColumn(), console=console, transient=True) as bars:
        task = bars.add_task(tally.where(), total=1.0, rest="")
        tally.on_change = lambda: _update(bars, task, tally)
        yield


def _update(bars: Progress, task: TaskID, tally: Tally) -> None:
    left, passed = tally.seconds_left(), sum(tally.seconds.values())
    share = 0.0 if left is None else passed / max(passed + left, 1e-9)
    then = "" if left is None else f"  {timedelta(seconds=round(left))} left after"
    rest = f"{tally.num_written:,}/{tally.num_lines:,} lines{then}"
    bars.update(task, description=tally.where(), completed=share, rest=rest)


class _Lines:
    """A line every `progress.LOG_SECONDS`."""

    def __init__(self, tally: Tally):
        self.tally, self.said_at = tally, time.monotonic()

    def show(self) -> None:
        """Say it, if it is time."""
        now = time.monotonic()
        if now - self.said_at >= progress.LOG_SECONDS and self.tally.num_tokenized:
            self.said_at = now
            print(self.tally.words(), file=sys.stderr, flush=True)

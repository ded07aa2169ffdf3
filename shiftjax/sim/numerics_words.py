"""What the settings `numerics` cost beside each other, by predicted steps. No JAX."""

from dataclasses import replace
from typing import Any

from shiftjax.arch.numerics import NUMERICS
from shiftjax.costs.collectives import step_collectives
from shiftjax.costs.work import Work
from shiftjax.deploy.deployment import Deployment
from shiftjax.parallel.grid import Mode
from shiftjax.sim.experiments import as_text
from shiftjax.sim.modelled import Target, cost_model

DECODES, CONTEXT = (1, 64), 2048
Row = dict[str, Any]


def numerics_in_words(target: Target, deployment: Deployment) -> str:
    """Return `numerics_rows` as a table for people; "" where there are none."""
    rows = numerics_rows(target, deployment)
    words = "numerics, and what steps take and move with them:"
    return f"\n{words}\n{as_text(rows)}\n" if rows else ""


def numerics_rows(target: Target, deployment: Deployment) -> list[Row]:
    """Return a row for each setting; none where sums are `fast`, or nothing is summed.

    Steps of decodes in SHIFT, and the largest of prompts in BASE: seconds of devices, and bytes of
    the results of collectives on one device.
    """
    if deployment.numerics == "fast" or deployment.layout.num_devices == 1:
        return []
    return [_row(target, deployment, name) for name in NUMERICS]


def _row(target: Target, deployment: Deployment, name: str) -> Row:
    formats = replace(deployment.formats, sums=NUMERICS[name].name)
    one = replace(deployment, formats=formats)
    costs, layout = cost_model(target, one), one.layout
    most = one.max_num_batched_tokens
    steps = {
        f"{num} decodes": (layout.shift, Work.decode(num, CONTEXT), num) for num in DECODES
    } | {f"{most:,} of prompts": (layout.base, Work.prefill(most), most)}
    row: Row = {"numerics": name}
    for title, (mode, work, tokens) in steps.items():
        row[f"{title}, ms"] = round(1e3 * costs.device_seconds(mode, work), 2)
        row[f"{title}, MB"] = round(_bytes(one, mode, tokens, work.num_rows) / 1e6, 1)
    return row


def _bytes(deployment: Deployment, mode: Mode, tokens: int, rows: int) -> int:
    """Bytes of a step in the bucket that holds it."""
    bucket = next(b for b in deployment.buckets if b.holds(tokens, rows, rows))
    moves = step_collectives(deployment.layout, mode, *bucket[:2], deployment.formats)
    return sum(move.num_bytes * move.num_times for move in moves)

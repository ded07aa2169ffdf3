"""What the tests of `shiftjax batch` share."""

import json

from serving.cli.batch_formats import OPENAI, Format, Line
from serving.cli.batch_lines import run_lines
from serving.cli.batch_tally import Tally


def encoded(*lines: object) -> list[bytes]:
    return [
        line if isinstance(line, bytes) else json.dumps(line).encode() + b"\n" for line in lines
    ]


def run_through(server, lines: list[Line], form: Format = OPENAI) -> list[dict]:
    """The records of lines, two of them at once in a server's engine."""

    async def collect() -> list[dict]:
        tally = Tally(len(lines), 2)
        return [record async for record in run_lines(server.service, lines, tally, form)]

    return server.on_loop(collect())

"""Generations whose output is taken apart as a test says."""

from serving.server.formats.pieces import CallArguments, CallBegin, Piece, Reasoning, Text
from serving.server.handle import Delta, RequestHandle
from serving.server.schema import Wish
from serving.server.served import Generation
from shiftjax.core.request import Event, Request
from shiftjax.outputs import OutputAssembler

CITY = "Ulm"
# What comes of each delta, and of the end.
SCRIPT: list[list[Piece]] = [
    [Reasoning("hm, ")],
    [Reasoning("so"), Text("Look"), Text(":")],
    [CallBegin(0, "call_1", "weather"), CallArguments(0, '{"city"')],
    [CallArguments(0, f':"{CITY}"}}'), CallBegin(1, "call_2", "time")],
    [CallArguments(1, "{}")],
]


class Scripted:
    """Gives the pieces of a script, whatever the text is: all at once for a text that is whole."""

    def __init__(self, script: list[list[Piece]]):
        self._script = list(script)

    def feed(self, text: str) -> list[Piece]:
        if text == WHOLE:
            pieces, self._script = [each for part in self._script for each in part], [[]]
            return pieces
        return self._script.pop(0)

    def finish(self) -> list[Piece]:
        return self._script.pop(0)


WHOLE = "all of it"


def generation_of(
    wish: Wish,
    *,
    script: list[list[Piece]] = SCRIPT,
    finish: str = "stop",
    stop: str | int | None = None,
) -> Generation:
    """A generation that has ended, of 3 prompt tokens and 2 of output."""
    request = Request("r", [1, 2, 3], wish.sampling)
    assembler = OutputAssembler(request, None, None, lambda index: None)
    handle = RequestHandle(assembler, "r", lambda one: None, lambda one: None, None)
    handle.apply(Event("r", 0, (7, 8), finish_reason="length", is_last=True))
    (output,) = handle.output.outputs
    output.text, output.finish_reason, output.stop_reason = WHOLE, finish, stop
    return Generation("r", wish, "tiny", [handle], parser=lambda: Scripted(script))


def said(writer, script: list[list[Piece]], finish: str = "stop") -> list[dict]:
    """All events of a stream in which each part of the script but the last is a delta."""
    events = []
    for number in range(len(script) - 1):
        is_last = number == len(script) - 2
        delta = Delta(0, text="x", finish_reason=finish if is_last else None)
        events += writer.chunks(0, [delta])
    return events + writer.last_chunks()

"""A process that compiles grammars on trial: it can be killed, a thread cannot. No JAX.

llguidance bounds most of its work by fuel, but not all: `{"type": "integer", "multipleOf":
9999991}` keeps a thread busy for minutes. This file is also the program of that process.
"""

import contextlib
import resource
import select
import signal
import subprocess
import sys
from typing import IO, BinaryIO

import llguidance

TRIAL_SECONDS = 0.5  # of CPU time; large schemas of honest clients take a tenth of it
MAX_TRIAL_BYTES = 2 << 30  # of address space, most of it Python's
_LENGTH_BYTES = 4
_DONE = b"+"


def parser_limits() -> llguidance.LLParserLimits:
    """A fraction of llguidance's own: some 4 ms for compiling, 8 ms for the mask of one token."""
    return llguidance.LLParserLimits(
        initial_lexer_fuel=200_000,
        step_lexer_fuel=100_000,
        step_max_items=20_000,
        verbose_errors=False,
    )


class Trial:
    """The process as its parent sees it; for one thread at a time."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> subprocess.Popen[bytes]:
        """Begin, if need be, before there is work. Raises OSError if no process can start."""
        if self._process is None or self._process.poll() is not None:
            self.close()
            self._process = _start()
        return self._process

    def survives(self, grammar: str, seconds: float) -> bool:
        """Whether compiling ends with little CPU time, well or not.

        Raises TimeoutError where the process got so little CPU that nothing is known after so many
        seconds, and OSError as `start` does.
        """
        process, data, answer = self.start(), grammar.encode(), b""
        assert process.stdin is not None
        assert process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(len(data).to_bytes(_LENGTH_BYTES, "little") + data)
            process.stdin.flush()
            if not _can_be_read(process.stdout, seconds):
                self._restart()
                raise TimeoutError("The trial of a grammar got no CPU.")
            answer = process.stdout.read(1)
        if answer != _DONE:
            self._restart()
        return answer == _DONE

    def _restart(self) -> None:
        """Begin anew, so that the next one need not wait for it."""
        self.close()
        self.start()

    def close(self) -> None:
        """End the process, whatever it does."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            with contextlib.suppress(BrokenPipeError):
                process.communicate()


def _can_be_read(pipe: IO[bytes], seconds: float) -> bool:
    """Whether there is an answer, or the end, before long."""
    poll = select.poll()
    poll.register(pipe, select.POLLIN)
    return bool(poll.poll(1000 * seconds))


def _start() -> subprocess.Popen[bytes]:
    command = [sys.executable, "-P", __file__]  # -P: modules beside this file are not its own
    return subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C is for the parent, which drains
    )


def main(requests: BinaryIO, answers: BinaryIO) -> None:
    """Compile until the parent is gone. SIGPROF ends what takes too long, even within a call."""
    resource.setrlimit(resource.RLIMIT_AS, (MAX_TRIAL_BYTES, MAX_TRIAL_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    tokenizer = llguidance.LLTokenizer("byte")
    while head := requests.read(_LENGTH_BYTES):
        grammar = requests.read(int.from_bytes(head, "little")).decode()
        signal.setitimer(signal.ITIMER_PROF, TRIAL_SECONDS)
        matcher = llguidance.LLMatcher(tokenizer, grammar, log_level=0, limits=parser_limits())
        if not matcher.is_error():
            matcher.compute_bitmask()
        signal.setitimer(signal.ITIMER_PROF, 0)
        answers.write(_DONE)
        answers.flush()


if __name__ == "__main__":
    main(sys.stdin.buffer, sys.stdout.buffer)

"""A conversation at the terminal, or over a pipe."""

import argparse
import importlib
import sys
from contextlib import closing, suppress
from typing import TYPE_CHECKING

from serving.run.flags import sampling_with
from serving.run.progress import print_table
from serving.run.start import open_llm
from shiftjax.config import EngineConfig
from shiftjax.core.request import RequestError, SamplingParams
from shiftjax.text.errors import ChatRequestError

if TYPE_CHECKING:
    from shiftjax.llm import LLM

Messages = list[dict[str, str]]

HELP = "/reset forgets the conversation, /quit or Ctrl-D ends it, Ctrl-C stops an answer."


def chat(arguments: argparse.Namespace, config: EngineConfig, sampling: SamplingParams) -> int:
    """Hold a conversation until the input ends."""
    llm = open_llm(config, arguments.server)
    sampling = sampling_with(llm.sampling_defaults, arguments)
    _talk(llm, sampling, arguments.system)
    if arguments.stats:
        print_table("statistics", llm.stats())
    return 0


def _talk(llm: "LLM", sampling: SamplingParams, system: str | None) -> None:
    """Read messages from stdin until it ends, and stream the answers to stdout.

    A message or an answer that does not fit is reported on stderr and forgotten.
    """
    start: Messages = [{"role": "system", "content": system}] if system else []
    messages = list(start)
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        with suppress(ImportError):
            importlib.import_module("readline")  # input() then has history and editing
        print(HELP, file=sys.stderr)
    while (text := _read("> " if is_terminal else "")) is not None:
        if text == "/quit":
            return
        if text == "/reset":
            messages = list(start)
        elif text.startswith("/"):
            print(f"unknown command {text.split()[0]}. {HELP}", file=sys.stderr)
        elif text:
            messages = _exchange(llm, sampling, messages, text)


def _read(prompt: str) -> str | None:
    """The next line without outer blanks; None at the end of the input."""
    while True:
        try:
            return input(prompt).strip()
        except EOFError:
            return None
        except UnicodeDecodeError as error:
            print(f"not {error.encoding} text", file=sys.stderr)
        except KeyboardInterrupt:
            if not prompt:
                raise
            print(f"\n{HELP}", file=sys.stderr)


def _exchange(llm: "LLM", sampling: SamplingParams, messages: Messages, text: str) -> Messages:
    """The conversation after one more message and its answer, as far as it came."""
    asked = [*messages, {"role": "user", "content": text}]
    answer = ""
    try:
        with closing(llm.stream_chat(asked, sampling)) as stream:
            for _, delta, _ in stream:
                answer += delta
                print(delta, end="", flush=True)
    except (RequestError, ChatRequestError) as error:
        print(error, file=sys.stderr)
        return messages
    except KeyboardInterrupt:
        print(" [stopped]", end="")
    print()
    return [*asked, {"role": "assistant", "content": answer}] if answer else messages

"""The command `shiftjax`: generate, chat, convert, check, version. JAX is imported when needed."""

import argparse
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import shiftjax
from serving import commands
from serving.flags import (
    EXIT_CODES,
    UsageParser,
    add_config_flags,
    add_sampling_flags,
    parse_args,
    settle,
)
from shiftjax.engine.request import RequestError
from shiftjax.options import ConfigError
from shiftjax.settings import dump_yaml
from shiftjax.text.errors import ChatTemplateError, TokenizerError
from shiftjax.weights.source import DTYPES, CheckpointError

UNSHOWN = ("logprobs", "prompt_logprobs")  # plain text has no place for them
OK, FAILED, USAGE, NO_MODEL, INTERRUPTED = 0, 1, 2, 3, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code (see `EXIT_CODES`)."""
    return guarded(lambda: _run(list(sys.argv[1:] if argv is None else argv)))


def guarded(action: Callable[[], int]) -> int:
    """The exit code of an action: expected errors become lines on stderr, a bug its traceback."""
    try:
        return action()
    except ConfigError as error:
        return _fail(error.problems, USAGE)
    except RequestError as error:
        return _fail([str(error)], USAGE)
    except (CheckpointError, TokenizerError, ChatTemplateError) as error:
        return _fail(str(error).splitlines(), NO_MODEL)
    except BrokenPipeError:  # the reader went away, as `| head` does; nothing is left to flush to
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except KeyboardInterrupt:
        return INTERRUPTED


def _fail(problems: Iterable[str], code: int) -> int:
    for problem in problems:
        print(f"shiftjax: {problem}", file=sys.stderr)
    return code


def _run(argv: list[str]) -> int:
    arguments = parse_args(make_parser(), argv)
    config, sampling = settle(arguments)
    if arguments.configured and arguments.print_config:
        sys.stdout.write(dump_yaml(config))
        return OK
    return arguments.run(arguments, config, sampling)


def make_parser() -> argparse.ArgumentParser:
    """The whole command line."""
    parser = UsageParser(prog="shiftjax", description=shiftjax.__doc__, **_STYLE)
    parser.add_argument("--version", action="version", version=shiftjax.__version__)
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add_generate(subparsers)
    _add_chat(subparsers)
    _add_convert(subparsers)
    check = _add(subparsers, "check", commands.check, "check settings and model, print the plan")
    add_config_flags(check)
    _add(subparsers, "version", commands.version, "print the versions that matter")
    return parser


_STYLE: dict[str, Any] = {
    "epilog": EXIT_CODES,
    "formatter_class": argparse.RawDescriptionHelpFormatter,
    "allow_abbrev": False,
}


def _add(subparsers: Any, name: str, run: commands.Command, text: str) -> argparse.ArgumentParser:
    parser = subparsers.add_parser(name, help=text, description=text, **_STYLE)
    parser.set_defaults(run=run, parser=parser, configured=False)
    return parser


def _add_generate(subparsers: Any) -> None:
    parser = _add(subparsers, "generate", commands.generate, "continue prompts")
    parser.add_argument("prompt", nargs="*", help="one streams; several print a block each")
    parser.add_argument("--prompts", metavar="FILE", help="more prompts, one a line; - is stdin")
    parser.add_argument("--stats", action="store_true", help="print a table of steps by mode")
    add_sampling_flags(parser, without=UNSHOWN)
    add_config_flags(parser)


def _add_chat(subparsers: Any) -> None:
    parser = _add(subparsers, "chat", commands.chat, "talk to a model")
    parser.add_argument("--system", metavar="TEXT", help="the system message")
    parser.add_argument("--stats", action="store_true", help="print a table of steps by mode")
    # an answer ends by itself, or where the context does
    add_sampling_flags(parser, without=("n", *UNSHOWN), defaults={"max_tokens": None})
    add_config_flags(parser)


def _add_convert(subparsers: Any) -> None:
    parser = _add(subparsers, "convert", commands.convert, "write a model in another format")
    parser.add_argument("model", help="the model to read, as for --model of the other commands")
    parser.add_argument("output", type=Path, help="the directory to write, new or empty")
    parser.add_argument("--to", choices=("huggingface", "orbax"), required=True, help="format")
    parser.add_argument("--dtype", choices=tuple(DTYPES), help="number format; default: as stored")


if __name__ == "__main__":
    sys.exit(main())

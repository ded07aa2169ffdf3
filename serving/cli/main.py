"""The command `shiftjax`: generate, chat, serve, convert ...

A command is imported when it runs: --help costs argparse and the settings, no NumPy and no JAX.
"""

import argparse
import importlib
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import shiftjax
from serving.bench.flags import (
    OFFLINE,
    add_flags,
    add_kernels_flags,
    add_offline_flags,
    add_steps_flags,
)
from serving.cli import mesh_flags, reproduce_flags
from serving.cli.help import add_help, needing_more
from serving.run.flags import (
    EXIT_CODES,
    UsageParser,
    add_config_flags,
    add_model_word,
    add_sampling_flags,
    add_server_flags,
    parse_args,
    settle,
)
from serving.run.foreign_commands import translated_command
from serving.run.start import StartError
from shiftjax.config import SETTINGS
from shiftjax.core.errors import RequestError
from shiftjax.options import ConfigError, printable
from shiftjax.text.errors import ChatTemplateError, TokenizerError
from shiftjax.weights.errors import CheckpointError

UNSHOWN = ("logprobs", "prompt_logprobs")  # plain text has no place for them
OK, FAILED, USAGE, NO_MODEL, INTERRUPTED = 0, 1, 2, 3, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code (see `EXIT_CODES`)."""
    return guarded(lambda: _run(translated_command(sys.argv[1:] if argv is None else argv)))


def guarded(action: Callable[[], int]) -> int:
    """The exit code of an action: expected errors become lines on stderr, a bug its traceback."""
    try:
        return action()
    except ConfigError as error:
        return _fail(error.problems, USAGE)
    except (RequestError, StartError) as error:
        return _fail([str(error)], USAGE if isinstance(error, RequestError) else FAILED)
    except (CheckpointError, TokenizerError, ChatTemplateError) as error:
        return _fail(str(error).splitlines(), NO_MODEL)
    except OSError as error:
        return _system_failure(error)
    except KeyboardInterrupt:
        return INTERRUPTED


def _system_failure(error: OSError) -> int:
    """FAILED for a reader that went away and for a file that cannot be used; others are bugs."""
    if isinstance(error, BrokenPipeError):  # as `| head` does; nothing is left to flush to
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    if error.filename is None:
        raise error
    return _fail([f"{error.filename}: {error.strerror}"], FAILED)


def _fail(problems: Iterable[str], code: int) -> int:
    for problem in problems:
        print(f"shiftjax: {printable(problem)}", file=sys.stderr)
    return code


def _run(argv: list[str]) -> int:
    parser = make_parser()
    if alone := needing_more(parser, argv):
        alone.print_help()
        return USAGE
    arguments = parse_args(parser, argv)
    config, sampling = settle(arguments)
    for note in arguments.notes:
        print(f"shiftjax: {printable(note)}", file=sys.stderr)
    if arguments.configured and arguments.print_config:
        from shiftjax.settings import dump_part, dump_yaml

        sys.stdout.write(dump_yaml(config))
        if arguments.serves:
            sys.stdout.write("\n" + dump_part("server", asdict(arguments.server)))
        return OK
    module, _, name = arguments.run.rpartition(".")
    try:
        command = getattr(importlib.import_module(f"serving.{module}"), name)
    except ModuleNotFoundError as error:
        hint = "pip install 'shiftjax[serving]'"
        raise ConfigError([f"serving needs the package {error.name}: {hint}"]) from None
    return command(arguments, config, sampling)


def make_parser() -> argparse.ArgumentParser:
    """The whole command line."""
    parser = UsageParser(prog="shiftjax", description=shiftjax.__doc__, **_STYLE)
    parser.add_argument("--version", action="version", version=shiftjax.__version__)
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add_generate(subparsers)
    _add_chat(subparsers)
    serve = _add(subparsers, "serve", "run.serve.run_server", "answer requests over HTTP and gRPC")
    add_model_word(serve)
    add_config_flags(serve)
    add_server_flags(serve)
    serve.set_defaults(serves=True)
    _add_batch(subparsers)
    _add_embed(subparsers)
    _add_bench(subparsers)
    _add_convert(subparsers)
    text = "check settings and model, print the plan"
    check = _add(subparsers, "check", "cli.commands.check", text)
    add_model_word(check)
    add_config_flags(check)
    add_server_flags(check)
    check.set_defaults(serves=True)
    text = "look at devices and software, try the attention kernels, say what to do"
    doctor = _add(subparsers, "doctor", "cli.commands.doctor", text)
    add_model_word(doctor)
    doctor.add_argument("--json", type=Path, metavar="FILE", help="write everything there")
    add_config_flags(doctor)
    mesh_flags.add_commands(subparsers, _add)
    reproduce_flags.add_command(subparsers, _add)
    _add(subparsers, "version", "cli.commands.version", "print the versions that matter")
    add_help(parser)
    return parser


_STYLE: dict[str, Any] = {
    "epilog": EXIT_CODES,
    "formatter_class": argparse.RawDescriptionHelpFormatter,
    "allow_abbrev": False,
}


def _add(subparsers: Any, name: str, run: str | None, text: str) -> argparse.ArgumentParser:
    """Add a command, or a group of them; `run` says where in `serving` its function is."""
    parser = subparsers.add_parser(name, help=text, description=text, **_STYLE)
    parser.set_defaults(run=run, parser=parser, configured=False, serves=False)
    return parser


def _add_generate(subparsers: Any) -> None:
    parser = _add(subparsers, "generate", "cli.commands.generate", "continue prompts")
    parser.add_argument("prompt", nargs="*", help="one streams; several print a block each")
    parser.add_argument("--prompts", metavar="FILE", help="more prompts, one a line; - is stdin")
    parser.add_argument("--stats", action="store_true", help="print a table of steps by mode")
    add_sampling_flags(parser, without=UNSHOWN)
    add_config_flags(parser)


def _add_chat(subparsers: Any) -> None:
    parser = _add(subparsers, "chat", "cli.chat.chat", "talk to a model")
    add_model_word(parser)
    parser.add_argument("--system", metavar="TEXT", help="the system message")
    parser.add_argument("--stats", action="store_true", help="print a table of steps by mode")
    # an answer ends by itself, or where the context does
    add_sampling_flags(parser, without=("n", *UNSHOWN), defaults={"max_tokens": None})
    add_config_flags(parser)


def _add_batch(subparsers: Any) -> None:
    parser = _add(subparsers, "batch", "cli.batch.run_batch", "run a file of requests")
    add_model_word(parser, "input")
    parser.add_argument("input", type=Path, help="JSON lines: OpenAI's batch format, or plain")
    parser.add_argument("--output", type=Path, required=True, metavar="FILE", help="JSON lines")
    parser.add_argument("--resume", action="store_true", help="do what the output file lacks")
    text = "of records; plain: texts and token ids, and sampling flags are defaults of the lines"
    parser.add_argument("--format", choices=("openai", "plain"), default="openai", help=text)
    add_sampling_flags(parser)
    add_config_flags(parser)
    add_server_flags(parser, "served_model_name", "strict")


def _add_embed(subparsers: Any) -> None:
    parser = _add(subparsers, "embed", "cli.embed.run_embed", "embed the lines of a file")
    add_model_word(parser, "input", "output")
    parser.add_argument("input", type=Path, help="a text a line; .jsonl: strings or {text: ...}")
    parser.add_argument("output", type=Path, help="the matrix [texts, dimensions], a .npy file")
    parser.add_argument("--prompt-name", metavar="NAME", help="a prompt of the model, before each")
    parser.add_argument("--truncate", action="store_true", help="cut texts that are too long")
    add_config_flags(parser)


def _add_bench(subparsers: Any) -> None:
    parser = _add(subparsers, "bench", None, "measure")
    kinds = parser.add_subparsers(title="benchmarks", metavar="KIND", required=True)
    text = "put load on any OpenAI-compatible server"
    add_flags(_add(kinds, "serve", "bench.command.run", text))
    for kind, (text, _) in OFFLINE.items():
        parser = _add(kinds, kind, "bench.offline.run", text)
        add_model_word(parser)
        add_offline_flags(parser, kind)
        add_config_flags(parser)
    text = "time steps of a model and fit a machine file"
    steps = _add(kinds, "steps", "bench.steps.run_bench", text)
    add_model_word(steps)
    add_steps_flags(steps)
    text = "time the attention kernels of this GPU against its ceilings and the alternatives"
    add_kernels_flags(_add(kinds, "kernels", "bench.kernels.bench_kernels", text))


def _add_convert(subparsers: Any) -> None:
    dtypes = SETTINGS["dtype"].choices[1:]  # the first is "auto"
    parser = _add(subparsers, "convert", "cli.commands.convert", "write a model in another format")
    text = "format: a Hugging Face directory (two names for it), or Orbax"
    add_model_word(parser, "output")
    parser.add_argument("--model", help="the model to read")
    parser.add_argument("output", type=Path, help="the directory to write, new or empty")
    parser.add_argument("--to", choices=("hf", "huggingface", "orbax"), required=True, help=text)
    parser.add_argument("--dtype", choices=dtypes, help="number format; default: as stored")


if __name__ == "__main__":
    sys.exit(main())

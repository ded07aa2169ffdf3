"""What --help says beside the flags: examples, and the flags that one needs first. No JAX."""

import argparse
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from shiftjax.options import ConfigError, unknown_name


class Help(NamedTuple):
    """Of one command."""

    examples: tuple[str, ...]
    flags: tuple[str, ...] = ()  # those that one needs first


_ENGINE = ("--model", "--tp", "--sp", "--max-model-len", "--dtype")

_POISSON = "--set rate=4 --set seconds=60 --set prompt_tokens=4096 --set output_tokens=250"

HELP: Mapping[str, Help] = {
    "": Help(
        (
            "shiftjax generate 'The capital of France is'",
            "shiftjax serve smollm2-135m",
            "shiftjax plan llama-70b --machine h200x8",
        )
    ),
    "generate": Help(
        (
            "shiftjax generate 'The capital of France is' --max-tokens 16 --temperature 0",
            "shiftjax generate --prompts questions.txt --sp 4 --tp 2 --stats",
        ),
        ("--prompts", "--max-tokens", "--temperature", "--model", "--tp"),
    ),
    "chat": Help(
        (
            "shiftjax chat smollm2-135m",
            "shiftjax chat smollm2-135m --system 'Answer in one sentence.' --temperature 0.2",
        ),
        ("--system", "--temperature", "--max-tokens", "--tp", "--max-model-len"),
    ),
    "serve": Help(
        (
            "shiftjax serve smollm2-135m",
            "shiftjax serve meta-llama/Llama-3.1-70B --sp 4 --tp 2 --api-key-file keys.txt",
            "shiftjax serve MODEL --config engine.yaml --port 8080",
        ),
        ("--tp", "--sp", "--port", "--max-model-len", "--api-key-file"),
    ),
    "batch": Help(
        (
            "shiftjax batch smollm2-135m requests.jsonl --output results.jsonl",
            "shiftjax batch prompts.jsonl --format plain --output results.jsonl --resume",
            "shiftjax batch llama requests.jsonl --output results.jsonl --phases auto",
        ),
        ("--output", "--resume", "--format", "--model", "--tp"),
    ),
    "embed": Help(
        ("shiftjax embed minilm-l6 texts.txt matrix.npy",),
        ("--model", "--prompt-name", "--truncate", "--dtype", "--max-num-batched-tokens"),
    ),
    "bench": Help(
        (
            "shiftjax bench serve --rate 4 --seconds 60",
            "shiftjax bench latency smollm2-135m --tp 2",
        )
    ),
    "bench serve": Help(
        ("shiftjax bench serve --rate 4 --cv 3 --seconds 60 --ttft-limit 1 --json run.json",),
        ("--url", "--rate", "--seconds", "--prompt-tokens", "--output-tokens"),
    ),
    "bench latency": Help(("shiftjax bench latency smollm2-135m --tp 2",), _ENGINE),
    "bench throughput": Help(("shiftjax bench throughput smollm2-135m --sp 4 --tp 2",), _ENGINE),
    "bench startup": Help(("shiftjax bench startup smollm2-135m",), _ENGINE),
    "bench steps": Help(("shiftjax bench steps smollm2-135m --meshes 1x1,4x2",)),
    "bench kernels": Help(("shiftjax bench kernels",)),
    "convert": Help(
        (
            "shiftjax convert smollm2-135m smollm2-hf --to hf",
            "shiftjax convert model.gguf model-orbax --to orbax --dtype bfloat16",
        ),
    ),
    "check": Help(("shiftjax check smollm2-135m --sp 4 --tp 2",), _ENGINE),
    "doctor": Help(("shiftjax doctor", "shiftjax doctor MODEL --json report.json"), _ENGINE),
    "plan": Help(
        (
            "shiftjax plan",
            "shiftjax plan llama-70b --machine h200x8 --dtype fp8 --input 8000 --output 400",
        ),
        ("--model", "--machine", "--input", "--output", "--dtype"),
    ),
    "mesh": Help(
        (
            f"shiftjax mesh simulate --trace poisson {_POISSON}",
            "shiftjax mesh run experiments.yaml",
        )
    ),
    "mesh simulate": Help(
        (
            f"shiftjax mesh simulate llama-70b --trace poisson {_POISSON} --rates 0.5,1,2",
            "shiftjax mesh simulate --trace requests.csv --compare dp,tp,shift --out results",
            "shiftjax mesh simulate --trace requests.csv --compare shift policy=cost,tp=4",
        ),
        ("--trace", "--model", "--machine", "--compare", "--rates"),
    ),
    "mesh run": Help(("shiftjax mesh run experiments.yaml --out results",)),
    "reproduce": Help(
        (
            "shiftjax reproduce shift --out report",
            "shiftjax reproduce --traces traces --out report",
        )
    ),
    "version": Help(("shiftjax version",)),
}


def commands_of(
    parser: argparse.ArgumentParser, name: str = ""
) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """A parser and those below it, by the words that lead there."""
    yield name, parser
    for word, below in subcommands(parser).items():
        yield from commands_of(below, f"{name} {word}".strip())


def subcommands(parser: argparse.ArgumentParser) -> Mapping[str, argparse.ArgumentParser]:
    """The commands of a parser by their names; none of most."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            return action.choices
    return {}


def needing_more(
    parser: argparse.ArgumentParser, argv: Sequence[str]
) -> argparse.ArgumentParser | None:
    """The parser of a command that was given alone and can do nothing so; None: there is more.

    Raises ConfigError for a word that is no command, with the nearest one.
    """
    for word in argv:
        known = subcommands(parser)
        if not known or word.startswith("-"):
            return None
        if word not in known:
            raise ConfigError([unknown_name(word, known, "command")])
        parser = known[word]
    needs = any(action.required and action.nargs != "*" for action in parser._actions)
    return parser if needs else None


def add_help(parser: argparse.ArgumentParser) -> None:
    """Put the first flags in front and examples behind the help of every command."""
    for name, command in commands_of(parser):
        _put_first(command, HELP[name].flags)
        _shorten_usage(command)
        examples = "\n".join(f"  {line}" for line in HELP[name].examples)
        command.epilog = f"examples:\n{examples}\n\n{command.epilog or ''}".rstrip()


def _put_first(command: argparse.ArgumentParser, flags: tuple[str, ...]) -> None:
    """Show these flags in a group of their own, too, before all others."""
    if not flags:
        return
    group = command.add_argument_group("first of all")
    group._group_actions += [command._option_string_actions[flag] for flag in flags]
    groups = command._action_groups
    groups.insert(0, groups.pop())


def _shorten_usage(command: argparse.ArgumentParser) -> None:
    """A line instead of a page; flags that are needed are named."""
    words = [_usage_of(action) for action in command._actions]
    shown = [word for word in words if word]
    if len(command._actions) - len(shown) > 1:
        command.usage = " ".join([command.prog, *shown, "[flags]"])


def _usage_of(action: argparse.Action) -> str:
    """What the usage says of an argument; nothing of a flag that may be left out."""
    name = str(action.metavar or action.dest).replace("_", "-")
    if action.option_strings:
        choices = "|".join(map(str, action.choices or ()))
        return f"{action.option_strings[0]} {choices or name.upper()}" if action.required else ""
    if isinstance(action, argparse._SubParsersAction):
        return f"{name} ..."
    return {"?": f"[{name}]", "*": f"[{name} ...]"}.get(str(action.nargs), name)

"""What the commands of `shiftjax` do, once flags and settings are known."""

import argparse
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import shiftjax
from serving.run.access import check_access
from serving.run.flags import sampling_with
from serving.run.jax_log import shorten_jax_log
from serving.run.progress import print_table, throughput
from serving.run.start import look_for_server, open_llm
from shiftjax.config import EngineConfig
from shiftjax.core.request import SamplingParams
from shiftjax.options import ConfigError
from shiftjax.settings import make_virtual_devices

if TYPE_CHECKING:
    from shiftjax.llm import Deltas
    from shiftjax.outputs import RequestOutput


def generate(arguments: argparse.Namespace, config: EngineConfig, sampling: SamplingParams) -> int:
    """Continue the prompts: one is streamed, several come as blocks in their order."""
    prompts = [*arguments.prompt, *_read_prompts(arguments.prompts)]
    if not prompts:
        raise ConfigError(["no prompt was given: write one, or name a file with --prompts"])
    llm = open_llm(config, arguments.server)
    sampling = sampling_with(llm.sampling_defaults, arguments)
    start = time.monotonic()
    is_one = len(prompts) == 1 and sampling.n == 1
    with closing(llm.stream(prompts, sampling)) as stream:
        outputs = list(_streamed(stream) if is_one else _blocks(stream, prompts))
    if arguments.stats:
        num_tokens = sum(len(one.token_ids) for out in outputs for one in out.outputs)
        rows = llm.stats() | throughput(num_tokens, time.monotonic() - start)
        print_table("statistics", rows)
    errors = [one.error for out in outputs for one in out.outputs if one.finish_reason == "error"]
    for error in errors:
        print(f"shiftjax: {error}", file=sys.stderr)
    return 1 if errors else 0


def _read_prompts(file: str | None) -> list[str]:
    if file is None:
        return []
    try:
        text = sys.stdin.read() if file == "-" else Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError([f"--prompts {file}: cannot be read: {error}"]) from None
    return [line for line in text.splitlines() if line.strip()]


def _streamed(stream: "Deltas") -> Iterator["RequestOutput"]:
    for _, delta, output in stream:
        print(delta, end="", flush=True)
        if output is not None:
            yield output
    print()


def _blocks(stream: "Deltas", prompts: list[str]) -> Iterator["RequestOutput"]:
    finished = ((index, output) for index, _, output in stream if output is not None)
    for index, output in enumerate(in_order(finished)):
        print(_block(index, prompts[index], output), flush=True)
        yield output


def in_order[T](pairs: Iterable[tuple[int, T]]) -> Iterator[T]:
    """The values of (place, value) pairs by place from 0, each as soon as those before it."""
    waiting: dict[int, T] = {}
    place = 0
    for key, value in pairs:
        waiting[key] = value
        while place in waiting:
            yield waiting.pop(place)
            place += 1


def _block(index: int, prompt: str, output: "RequestOutput") -> str:
    short = prompt if len(prompt) <= 60 else prompt[:57] + "..."
    many = len(output.outputs) > 1
    blocks = (
        f"--- {index + 1}{f'.{one.index + 1}' if many else ''}: {short!r}\n{one.text}"
        for one in output.outputs
    )
    return "\n".join(blocks)


def convert(arguments: argparse.Namespace, config: EngineConfig, sampling: SamplingParams) -> int:
    """Write the model as a Hugging Face or Orbax directory."""
    from shiftjax.weights.convert import convert as convert_model

    output = arguments.output
    if arguments.model is None:
        raise ConfigError(["no model was given: name it before the output, or with --model"])
    if output.exists() and not (output.is_dir() and not any(output.iterdir())):
        raise ConfigError([f"{output} exists and is not an empty directory"])
    format = "orbax" if arguments.to == "orbax" else "huggingface"
    print(convert_model(arguments.model, output, format, arguments.dtype))
    return 0


def check(arguments: argparse.Namespace, config: EngineConfig, sampling: SamplingParams) -> int:
    """Read settings and model headers, and print the mesh and the memory they lead to."""
    check_access(arguments.server)
    if arguments.server.kv_events != "none":  # whose packages the base install lacks
        from serving.server.kv_events import check_kv_events

        check_kv_events(arguments.server, config)
    if arguments.server.otlp_traces_endpoint is not None:
        from serving.traces.plug import check_traces
        from shiftjax.settings import environ_beside

        check_traces(arguments.server, environ_beside())
    if arguments.server.simulate is not None:
        from serving.run.simulated import open_simulated

        simulated = open_simulated(config, arguments.server)
        print_table("plan", simulated.served.info, stderr=False)
        return 0
    files = look_for_server(config, arguments.server)
    shorten_jax_log()
    make_virtual_devices(config)
    from serving.cli.check import make_plan

    print_table("plan", make_plan(config, files), stderr=False)
    return 0


def doctor(arguments: argparse.Namespace, config: EngineConfig, sampling: SamplingParams) -> int:
    """Look at devices and software, try the attention kernels, and say what to do."""
    make_virtual_devices(config)
    from serving.cli.doctor import run_doctor

    return run_doctor(arguments, config, sampling)


def version(arguments: argparse.Namespace, config: EngineConfig, sampling: SamplingParams) -> int:
    """Print the versions of ShiftJAX, Python and JAX."""
    from importlib.metadata import version as installed

    python = ".".join(map(str, sys.version_info[:3]))
    print(f"shiftjax {shiftjax.__version__}, python {python}, jax {installed('jax')}")
    return 0

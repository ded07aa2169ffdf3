"""The flags of all kinds of `shiftjax bench`. No JAX."""

import argparse
from pathlib import Path

from shiftjax.options import ConfigError

MADE_UP = {"prompt_tokens": 128, "output_tokens": 64}
# What shapes each kind of load, with defaults; a flag of another kind is refused.
LOADS = {
    "trace": {"speed": 1.0, "seconds": 30.0},
    "clients": {"requests": 100, **MADE_UP},
    "rate": {"rate": 2.0, "cv": 1.0, "seconds": 30.0, "load_seed": 0, **MADE_UP},
}
COUNTS = {
    "batch": ("sequences at a time", 8),
    "requests": ("requests in all", 64),
    "prompt-tokens": ("of every prompt", 128),
    "output-tokens": ("of every answer", 64),
    "rounds": ("measured after one that warms up", 5),
    "starts": ("with a warm cache, after a cold one", 3),
}
STEPS_MODEL = "smollm2-135m"
LENGTHS = ("prompt-tokens", "output-tokens")
OFFLINE = {
    "latency": ("time one batch, again and again", ("batch", *LENGTHS, "rounds")),
    "throughput": ("time many requests that come at once", ("requests", *LENGTHS)),
    "startup": ("time starts with an empty and a full compilation cache", ("starts",)),
}


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the command."""
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="of the server")
    parser.add_argument("--served-model", metavar="NAME", help="model of the requests")
    parser.add_argument("--key-file", metavar="FILE", help="file with the API key")
    load = parser.add_argument_group("load", "a trace, or arrivals at a rate, or a closed loop")
    load.add_argument("--trace", metavar="FILE", help="Azure, Mooncake, BurstGPT or shiftjax")
    load.add_argument("--speed", type=float, help="replay the trace so much faster; default 1")
    load.add_argument("--seconds", type=float, help="of a trace or arrivals; default 30")
    load.add_argument("--rate", type=float, help="requests per second; default 2")
    load.add_argument("--cv", type=float, help="1, the default: Poisson; more is burstier")
    load.add_argument("--clients", type=int, help="closed loop of so many clients")
    load.add_argument("--requests", type=int, help="of a closed loop; default 100")
    load.add_argument("--prompt-tokens", type=int, help="of a made-up request; default 128")
    load.add_argument("--output-tokens", type=int, help="of a made-up request; default 64")
    load.add_argument("--load-seed", type=int, help="of the arrivals; default 0")
    out = parser.add_argument_group("results")
    out.add_argument("--ttft-limit", type=float, help="seconds; goodput counts what keeps it")
    out.add_argument("--tpot-limit", type=float, help="seconds; goodput counts what keeps it")
    out.add_argument("--json", metavar="FILE", help="write the numbers; - is stdout")
    out.add_argument("--plots", metavar="DIR", help="write plots (needs matplotlib)")


def add_offline_flags(parser: argparse.ArgumentParser, kind: str) -> None:
    """Add the flags of one kind of measurement."""
    group = parser.add_argument_group("measurement")
    for name in OFFLINE[kind][1]:
        text, default = COUNTS[name]
        group.add_argument(f"--{name}", type=int, default=default, help=f"{text}; {default}")
    group.add_argument("--json", metavar="FILE", help="write the numbers; - is stdout")
    parser.set_defaults(kind=kind)


def add_steps_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `bench steps`."""
    parser.add_argument("--model", help=f"model to measure with; default {STEPS_MODEL}")
    parser.add_argument("--meshes", default="1x1,4x2", help="SPxTP, ...; default 1x1,4x2")
    parser.add_argument("--repeats", type=int, default=5, help="runs per point, default 5")
    parser.add_argument("--out", type=Path, default=Path("machine.yaml"), help="file to write")


def meshes_of(text: str, flag: str) -> list[tuple[int, int]]:
    """(SP, TP) of every mesh in a text like 1x1,4x2. Raises ConfigError."""
    pairs = [mesh.split("x") for mesh in text.split(",")]
    if not all(len(sizes) == 2 and all(n.isdigit() and int(n) for n in sizes) for sizes in pairs):
        raise ConfigError([f"{flag}: {text!r} is not SPxTP,..., say 4x2"])
    return [(int(sp), int(tp)) for sp, tp in pairs]


def add_kernels_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `bench kernels`."""
    parser.add_argument("--head-dim", type=int, choices=(64, 128, 256), default=128)
    parser.add_argument("--block-size", type=int, default=16, help="tokens, default 16")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there, too")
    machine = "write a machine file with the measured efficiencies, for --machine"
    parser.add_argument("--out", type=Path, metavar="FILE", help=machine)

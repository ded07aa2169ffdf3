"""The flags of `shiftjax bench serve`, `latency`, `throughput` and `startup`. No JAX."""

import argparse

COUNTS = {
    "batch": ("sequences at a time", 8),
    "requests": ("requests in all", 64),
    "prompt-tokens": ("of every prompt", 128),
    "output-tokens": ("of every answer", 64),
    "rounds": ("measured after one that warms up", 5),
    "starts": ("with a warm cache, after a cold one", 3),
}
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
    load.add_argument("--speed", type=float, default=1.0, help="replay the trace so much faster")
    load.add_argument("--seconds", type=float, default=30.0, help="length of the load")
    load.add_argument("--rate", type=float, default=2.0, help="requests per second")
    load.add_argument("--cv", type=float, default=1.0, help="1: Poisson; more is burstier")
    load.add_argument("--clients", type=int, help="closed loop of so many clients")
    load.add_argument("--requests", type=int, default=100, help="of a closed loop")
    load.add_argument("--prompt-tokens", type=int, default=128, help="of a made-up request")
    load.add_argument("--output-tokens", type=int, default=64, help="of a made-up request")
    load.add_argument("--load-seed", type=int, default=0, help="of the arrivals")
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

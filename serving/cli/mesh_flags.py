"""The flags of `plan`, `mesh simulate` and `mesh run`: all that --help has to import of them."""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from serving.run.flags import add_fleet_flags, add_model_word
from shiftjax.config import SERVER_BUDGETS, SETTINGS
from shiftjax.costs.machine_files import engine_names, machine_names
from shiftjax.lora_options import NO_LORA

Add = Callable[[Any, str, str | None, str], argparse.ArgumentParser]
PERCENTILES = (50, 90, 99)
PROMPT, OUTPUT = 4096, 250  # tokens
GOALS = ("ttft", "tpot", "latency", "throughput")  # of `sim/planning.py`
LENGTH_CV = 1.0  # of a load without a trace; shiftjax/sim/load.py says why
MARGIN = 0.05  # of the limits
MOST_USERS = -1  # `--users most`
MODEL, COMPARED = "llama-70b", "dp,tp,sp,shift"
_CONFIG = "the engine's settings: `config` in the table; flags win over it, all else follows it"


def add_commands(subparsers: Any, add: Add) -> None:
    """Register the commands; `add` makes a subparser the way the rest of the command line does."""
    parser = add(subparsers, "plan", "cli.simulate.plan", "say how to deploy a model on a machine")
    _add_target(parser)
    text = f"prompt tokens, default {PROMPT}, or what the model takes if that is less"
    parser.add_argument("--input", type=int, help=text)
    parser.add_argument("--output", type=int, help=f"output tokens, default {OUTPUT}")
    parser.add_argument(
        "--compile", nargs="?", const="", metavar="SPxTP,...", help="compile the steps, see docs"
    )
    text = "what the recommended row is best in; default: near the best in all columns"
    parser.add_argument("--goal", choices=GOALS, help=text)
    _add_goal(parser.add_argument_group("the least GPUs for a load, or the most load", _GOAL))
    parser.add_argument("--out", type=Path, metavar="DIR", help="write rows and a report there")
    mesh = add(subparsers, "mesh", None, "compare mesh configurations")
    commands = mesh.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add_simulate(commands, add)
    text = "run the experiments of a file, measured and modelled"
    run = add(commands, "run", "cli.mesh_run.run_file", text)
    run.add_argument("file", type=Path, help="YAML file of experiments, see docs/simulator.md")
    run.add_argument("--out", type=Path, default=Path("mesh-results"), metavar="DIR")


def _add_goal(group: Any) -> None:
    group.add_argument("--rate", type=float, help="requests/s of all GPUs that are looked for")
    text = "users in place of a rate, who ask again when they have an answer; with --gpus: most"
    group.add_argument("--users", type=_users, metavar="N", help=text)
    text = "seconds that a user thinks before each request, on average; default 0"
    group.add_argument("--think", type=float, metavar="SECONDS", help=text)
    text = "so many, whose largest rate is looked for, or with --users most their users"
    group.add_argument("--gpus", type=int, metavar="N", help=text)
    group.add_argument("--ttft", type=float, help="seconds to the first token, at most")
    group.add_argument("--tpot", type=float, help="seconds per token after it, at most")
    text = "share of requests that get both: 50, 90 or 99, default 90"
    group.add_argument("--percentile", type=int, choices=PERCENTILES, help=text)
    text = "of a device and hour: 2.5, or h200x8=4,l4x8=0.8; then the least cost is found"
    group.add_argument("--gpu-price", metavar="DOLLARS", help=text)
    text = f"what predictions stay below the limits, as a share of them; default {MARGIN:g}"
    group.add_argument("--margin", type=float, metavar="SHARE", help=text)
    text = f"coefficient of variation of --input and --output, log-normal; default {LENGTH_CV:g}"
    group.add_argument("--length-cv", type=float, metavar="CV", help=f"{text}; 0: all alike")
    text = "file of requests, instead of --input and --output; --rate is its own by default"
    group.add_argument("--trace", help=text)
    group.add_argument("--window", metavar="START:SECONDS", help="of the trace; default 0:900")


def _users(text: str) -> int:
    """A number of users; `MOST_USERS`: as many as there can be. Raises ValueError for others."""
    return MOST_USERS if text == "most" else int(text)


def _add_simulate(commands: Any, add: Add) -> None:
    text = "replay a trace on a modelled machine"
    parser = add(commands, "simulate", "cli.simulate.simulate", text)
    _add_target(parser)
    parser.add_argument(
        "--trace", required=True, help="trace file, or poisson, gamma, on_off, closed"
    )
    parser.add_argument("--window", metavar="START:SECONDS", help="of a file; default 0:900")
    text = f"names, as {COMPARED} (default), or settings, as shift,tp=8; with --config also config"
    parser.add_argument("--compare", nargs="+", metavar="NAMES", help=text)
    text = "multiples of the trace's rate, or of a loop's users, e.g. 0.5,1,2"
    parser.add_argument("--rates", default="1", help=text)
    parser.add_argument(
        "--shift-threshold", type=int, metavar="TOKENS", help="of shift; default 256"
    )
    parser.add_argument("--host-memory", metavar="BYTES", help=_HOST)
    parser.add_argument("--no-prefix-caching", action="store_true", help="compute every prompt")
    parser.add_argument("--acceptance", metavar="P", help=_ACCEPTANCE)
    text = "so many adapters with --loras slots: each request has one, by Zipf's law"
    parser.add_argument("--adapters", type=int, metavar="N", help=text)
    parser.add_argument("--set", action="append", default=[], metavar="NAME=X", help=_SET)
    add_fleet_flags(parser)
    parser.add_argument("--out", type=Path, metavar="DIR", help="write rows and a report there")


_GOAL = "given --ttft, --tpot and one of --rate, --users and --gpus:"
_ACCEPTANCE = (
    "let all deployments draft, right so often: a probability, one for each place (0.8,0.6), or a "
    "replay's tokens_per_step=X,accepted_of_drafted=Y"
)
_HOST = "of phases (pp8:tp8), for parked KV, as 400GiB; default: half of the machine's"
_SET = (
    "argument of a synthetic trace, as rate=4 or prompt_tokens=4096; repeat for more; of a file, "
    "users=64 makes a closed loop of it"
)


def _add_target(parser: argparse.ArgumentParser) -> None:
    add_model_word(parser)
    machines, engines = ", ".join(machine_names()), ", ".join(engine_names())
    parser.add_argument("--config", metavar="FILE", help=_CONFIG)
    parser.add_argument("--model", help=f"preset, checkpoint or config.json; default {MODEL}")
    parser.add_argument("--machine", default="h200x8", help=f"{machines}, or a .yaml file")
    text = "as many machines as one, joined by their network; default 1, or what a file says"
    parser.add_argument("--hosts", type=int, metavar="N", help=text)
    text = "measured kernels, CSV or JSON: the machine's constants are fitted to them, see docs"
    parser.add_argument("--kernels", type=Path, metavar="FILE", help=text)
    parser.add_argument("--engine", default="shiftjax", help=f"overhead: {engines}, or a file")
    plain, codes = SETTINGS["dtype"].choices[1:], SETTINGS["quantization"].choices[2:]
    dtypes = ", ".join((*plain, *codes))  # without auto, and none
    parser.add_argument(
        "--dtype", help=f"of weights, default the checkpoint's, or bfloat16: {dtypes}"
    )
    parser.add_argument("--kv-cache-dtype", help="default: that of --dtype, or bfloat16")
    parser.add_argument("--block-size", type=int, help="of the KV cache, default 16")
    text = "adapters (LoRA) that devices hold at once; every step is taken to have some"
    parser.add_argument("--loras", type=int, metavar="N", help=text)
    text = f"largest rank of an adapter, default {NO_LORA.max_lora_rank}"
    parser.add_argument("--lora-rank", type=int, metavar="RANK", help=text)
    for name, default in SERVER_BUDGETS.items():
        flag = "--" + name.replace("_", "-")
        parser.add_argument(flag, type=int, help=f"of a replica, default {default}")

"""What a mesh and a weight strategy cost: start-up, memory per device, step time, tokens/s.

    python scripts/bench.py mesh --sp 8 --tp 1 [--weights alias|slice|replicate] [--model ...]

On virtual CPU devices all devices share the machine's cores, so step times say what the host can
do in total, not what a device would; memory and the ratios between strategies are what to read.

The physics of memory per device: the base shard, w / TP; `replicate` adds w / (SP * TP), `alias`
nothing; `slice` adds nothing to the weights but its slices to the temporaries of a step. A cold
start compiles every (bucket, mode); a warm one reads them from the cache: run it twice with
`--cache-dir` of an empty directory.
"""

import argparse
import statistics
import time
from collections.abc import Iterator
from typing import Any

from serving.bench.offline import answer_seconds
from shiftjax import LLM

PROMPT_TOKENS, OUTPUT_TOKENS = 128, 48
OPTIONS = {  # settings of the engine, and the baselines of its weights
    "--model": "smollm2-135m",
    "--sp": 1,
    "--tp": 1,
    "--weights": ("alias", {"choices": ("alias", "slice", "replicate")}),
    "--policy": ("threshold", {"choices": ("threshold", "base", "shift")}),
    "--sequences": 8,
    "--cache-dir": "none",
}


def device_bytes(llm: LLM) -> tuple[int, int]:
    """Return bytes of weights on one device, each buffer once, and of the largest temporaries."""
    (runner,) = llm.runners
    device = runner.step.mesh.devices.flat[0]
    spans = sorted(
        {
            (shard.data.unsafe_buffer_pointer(), shard.data.nbytes)
            for arrays in map(runner.memory.params, runner.step.weights.modes)
            for array in arrays
            for shard in array.addressable_shards
            if shard.device == device
        }
    )
    total = end = 0
    for start, size in spans:  # a view lies inside a span that has been counted
        total += max(0, start + size - max(start, end))
        end = max(end, start + size)
    return total, max(program.temporary_bytes for program in runner.programs)


def measure(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Start an engine, run one batch, and yield a row."""
    batch = arguments.sequences
    start = time.perf_counter()
    controls = {} if arguments.weights == "alias" else {"shift_weights": arguments.weights}
    own = {name: getattr(arguments, name) for name in ("sp", "tp", "policy", "cache_dir")}
    own |= {"max_num_batched_tokens": 512, "token_buckets": [batch, 512], "controls": controls}
    sizes = {"max_model_len": 512, "max_num_seqs": batch, "prefix_caching": False}
    llm = LLM(arguments.model, **own, **sizes)
    startup = time.perf_counter() - start
    whole = [answer_seconds(llm, 0, batch, PROMPT_TOKENS, OUTPUT_TOKENS) for _ in range(4)][1:]
    prefill = [answer_seconds(llm, 0, batch, PROMPT_TOKENS, 1) for _ in range(3)]
    decode = statistics.median(whole) - statistics.median(prefill)
    weights, temporaries = device_bytes(llm)
    yield {
        "mesh": f"sp={arguments.sp} tp={arguments.tp}",
        "weights": arguments.weights,
        "startup_seconds": round(startup, 1),
        "weight_mb_per_device": round(weights / 1e6, 1),
        "temporary_mb_per_device": round(temporaries / 1e6, 1),
        "decode_step_ms": round(1e3 * decode / (OUTPUT_TOKENS - 1), 2),
        "decode_tokens_per_second": round(batch * (OUTPUT_TOKENS - 1) / decode, 1),
        "prefill_tokens_per_second": round(batch * PROMPT_TOKENS / statistics.median(prefill), 1),
        "steps": llm.stats()["steps_by_mode"],
    }

"""Find settings of the attention kernels: prune candidates anywhere, measure the rest on a GPU.

    JAX_PLATFORMS=cpu python scripts/tune_kernels.py prune      without a GPU, minutes
    python scripts/tune_kernels.py measure                      on a Hopper GPU

`prune` compiles every candidate for an H200 (see tests/compile/aot.py for what that needs) and
writes those that fit shared memory and do not spill registers to `scripts/kernel_candidates.json`.
`measure` times them and writes the best to the table that comes with the package,
`pallas_kernels/tuned.json`, one row for this GPU, head dim and block size. Best is the least sum of
logarithms of times over the shapes, so that no shape counts more for being longer.
"""

import json
import math
import sys
from collections.abc import Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from option_table import parsed

from pallas_kernels.call import AttentionOptions, PagedKV
from pallas_kernels.decode import decode_attention
from pallas_kernels.decode_work import DecodeConfig, divide_decode
from pallas_kernels.measure import DecodeShape, Effort, PrefillShape, kernel_seconds
from pallas_kernels.prefill import prefill_attention
from pallas_kernels.prefill_work import PrefillConfig, divide_prefill
from pallas_kernels.rows import Rows, Sequences
from pallas_kernels.step_work import KernelConfig
from pallas_kernels.tuned import FILE, to_row

ROOT = Path(__file__).resolve().parent.parent
CANDIDATES = Path(__file__).with_name("kernel_candidates.json")
TABLE = ROOT / "pallas_kernels" / FILE
KERNELS = {"prefill": (PrefillShape, PrefillConfig), "decode": (DecodeShape, DecodeConfig)}
HEAD_DIMS, BLOCK_SIZES = (64, 128), (16, 32, 64, 128)
PREFILL_TILES, PREFILL_STAGES = (64, 128), (2, 3, 4)
# The warpgroups take turns; or do not; or take turns, and each begins its next product early.
SCHEDULES = (
    {"ping_pong": True, "overlap": False},
    {"ping_pong": False, "overlap": False},
    {"ping_pong": True, "overlap": True},
)
# thread blocks on each of 132 multiprocessors, and the shared memory that leaves each of them
DECODE_BLOCKS = ((132, 227 * 1024), (264, 113 * 1024), (396, 75 * 1024))
DECODE_TILES = (64, 128)
DECODE_SHAPES = ((8, 4096), (64, 2048), (256, 1024))  # sequences, context
PREFILL_SHAPES = ((2048, 0), (8192, 0), (2048, 14_336))  # tokens, context before


class Candidate(NamedTuple):
    """Settings of one kernel for one head dim and block size."""

    kernel: str
    head_dim: int
    block_size: int
    settings: dict[str, Any]


def all_candidates(head_dims: list[int], block_sizes: list[int]) -> Iterator[Candidate]:
    """Every combination; most cannot be compiled."""
    for head_dim, block_size in product(head_dims, block_sizes):
        for tile, stages, schedule in product(PREFILL_TILES, PREFILL_STAGES, SCHEDULES):
            settings = {"kv_tile": tile, "stages": stages, **schedule}
            yield Candidate("prefill", head_dim, block_size, settings)
        for (blocks, memory), tile in product(DECODE_BLOCKS, DECODE_TILES):
            settings = {"kv_tile": tile, "num_blocks": blocks, "shared_memory_bytes": memory}
            yield Candidate("decode", head_dim, block_size, settings)


def small_call(candidate: Candidate, mesh: Any, aot: Any) -> tuple[Any, ...]:
    """A function that runs the candidate, and abstract arguments: 8 sequences, Llama-8B's heads."""
    seqs, tokens, heads, kv_heads, blocks = 8, 256, 32, 8, 64
    _, head_dim, block_size, settings = candidate
    lens, starts = np.zeros(seqs, np.int32), np.zeros(seqs + 1, np.int32)
    q = jax.ShapeDtypeStruct((tokens, heads, head_dim), jnp.bfloat16)
    pool = jax.ShapeDtypeStruct((blocks, kv_heads, block_size, head_dim), jnp.bfloat16)
    tables = jax.ShapeDtypeStruct((seqs, 8), jnp.int32)
    if candidate.kernel == "prefill":
        config = PrefillConfig(**settings)
        attend = partial(prefill_attention, config=config)
        sizes = {"num_tokens": tokens, "heads": (heads, kv_heads)}
        work = divide_prefill(Sequences(lens, starts, 0), **sizes, config=config)
    else:
        config = DecodeConfig(**settings)
        work = divide_decode(Rows(lens[:0], lens[:0]), seqs, kv_heads=kv_heads, config=config)
        attend = partial(decode_attention, config=config)

    def call(q, kv, work):
        return attend(q, kv, work, AttentionOptions(head_dim**-0.5))

    return call, *aot.on_device(mesh, (q, PagedKV(pool, pool, tables, lens), work))


def prune(chip: str, head_dims: list[int], block_sizes: list[int]) -> None:
    """Write the candidates that compile in place of those with the same head dim and block size."""
    sys.path.insert(0, str(ROOT / "tests" / "compile"))
    import aot  # pyright: ignore[reportMissingImports]

    if reason := aot.unavailable():
        raise SystemExit(f"nothing can be compiled for a GPU here: {reason}")
    mesh = aot.make_mesh(chip, (1,), ("x",))
    rows = json.loads(CANDIDATES.read_text(encoding="utf-8")) if CANDIDATES.exists() else []
    done = set(product(head_dims, block_sizes))
    rows = [row for row in rows if (row["head_dim"], row["block_size"]) not in done]
    for candidate in all_candidates(head_dims, block_sizes):
        try:
            aot.compile_for(mesh, *small_call(candidate, mesh, aot))
            rows, said = [*rows, candidate._asdict()], "compiles"
        except Exception as error:  # whatever the compiler says is the reason
            said = str(error).strip().splitlines()[0][:160]
        print(json.dumps([*candidate, said]), flush=True)
    write_rows(CANDIDATES, rows)
    print(f"{len(rows)} candidates compile for {chip}: {CANDIDATES}")


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write a JSON list, a row a line."""
    lines = ",\n".join(json.dumps(row) for row in rows)
    path.write_text(f"[\n{lines}\n]\n", encoding="utf-8")


def candidates_for(kernel: str, head_dim: int, block_size: int) -> list[dict[str, Any]]:
    """The settings that `prune` has kept."""
    rows = json.loads(CANDIDATES.read_text(encoding="utf-8"))
    key = kernel, head_dim, block_size
    return [row["settings"] for row in rows if (*list(row.values())[:3],) == key]


def tune(
    kernel: str,
    candidates: list[dict[str, Any]],
    sizes: dict[str, int],
    shapes: Any,
    effort: Effort,
) -> Iterator[dict[str, Any]]:
    """Yield a row for every candidate, `score` being the geometric mean of its times."""
    kind, config_type = KERNELS[kernel]
    for settings in candidates:
        chosen = KernelConfig(**{kernel: config_type(**settings)})
        seconds = [kernel_seconds(kind(*shape, **sizes), chosen, effort) for shape in shapes]
        row = {"kernel": kernel, **sizes, "settings": settings, "us": [s * 1e6 for s in seconds]}
        yield row | {"score": math.exp(sum(map(math.log, seconds)) / len(seconds))}


def write_best(device_kind: str, rows: list[dict[str, Any]], path: Path = TABLE) -> dict[str, Any]:
    """Put the best settings of both kernels in a table; `rows`: of one head dim and block size."""
    sizes = rows[0]["head_dim"], rows[0]["block_size"]
    best = {
        kernel: min((row for row in rows if row["kernel"] == kernel), key=lambda row: row["score"])
        for kernel in KERNELS
    }
    config = KernelConfig(**{k: KERNELS[k][1](**row["settings"]) for k, row in best.items()})
    new = to_row(device_kind, *sizes, config)
    table = json.loads(path.read_text(encoding="utf-8") if path.exists() else "[]")
    place = ("gpu", "head_dim", "block_size")
    kept = [row for row in table if any(row[name] != new[name] for name in place)]
    write_rows(path, [*kept, new])
    return new


def measure(head_dims: list[int], block_sizes: list[int]) -> None:
    """Time the candidates on this GPU and renew its rows of the table."""
    device = jax.devices()[0]
    if device.platform != "gpu":
        raise SystemExit(f"measure needs a Hopper GPU: JAX sees only {device.platform} here")
    for head_dim, block_size in product(head_dims, block_sizes):
        sizes, rows = {"head_dim": head_dim, "block_size": block_size}, []
        for kernel, shapes in (("prefill", PREFILL_SHAPES), ("decode", DECODE_SHAPES)):
            candidates = candidates_for(kernel, head_dim, block_size)
            for row in tune(kernel, candidates, sizes, shapes, Effort(repeats=3, calls=8)):
                print(json.dumps(row), flush=True)
                rows.append(row)
        print(json.dumps(write_best(device.device_kind, rows)), flush=True)


def main() -> None:
    """Run one of the two halves."""
    options = {
        "half": (str, {"choices": ("prune", "measure")}),
        "--chip": ("h200", "prune: h100 or h200"),
        "--head-dim": list(HEAD_DIMS),
        "--block-size": list(BLOCK_SIZES),
    }
    arguments = parsed(__doc__, options)
    if arguments.half == "prune":
        prune(arguments.chip, arguments.head_dim, arguments.block_size)
    else:
        measure(arguments.head_dim, arguments.block_size)


if __name__ == "__main__":
    main()

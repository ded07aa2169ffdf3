"""Published tables of measured kernels, as `plan --kernels` reads them: CSV on stdout.

    python scripts/labs/kernel_tables.py PATH... > kernels.csv

PATH is a file, or a folder with files, of a system's data in ai-dynamo/aiconfigurator (Apache-2.0;
`systems/data/h200_sxm` and others): `gemm_perf`, `context_attention_perf`,
`generation_attention_perf`, `moe_perf`, `nccl_perf` and `custom_allreduce_perf`, as Parquet, which
needs pyarrow, or as CSV (.txt). What they time, by their collectors: a product with the quantising
of its input, attention with the write of its keys and values, all of a layer's experts, one
collective of so many elements of two bytes. Only what a deployment meets is taken: rows that a step
is padded to (1, 8, 16, 32 ... 16,384), matrices of 1,024 to 16,384 rows and columns, 4 or 8 query
heads on a KV head of 128, contexts that fill a GPU (8 sequences times KV heads or more), balanced
experts on one device, and collectives of 8 devices and up to 64 MB, in graphs.
"""

import argparse
import csv
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from shiftjax.options import ConfigError

Row = Mapping[str, Any]
BUCKETS = {1, *(2**k for k in range(3, 15))}
MATRICES = {2**k for k in range(10, 15)}
GROUPS = (4, 8)  # query heads on a KV head
LEAST_PARALLEL = 8  # sequences x KV heads: fewer leave a GPU idle, unless contexts are split
FORMATS = {"bfloat16": "bfloat16", "fp8": "fp8"}
LAUNCHES = {"generation_attention": 3, "context_attention": 2, "moe": 5}
COLUMNS = (
    *("kernel", "format", "us", "launches", "quantises", "rows", "inner", "columns", "tokens"),
    *("hidden", "width", "experts", "own", "k", "chosen", "seqs", "context", "heads", "kv_heads"),
    *("head_dim", "devices", "bytes"),
)
ELEMENT_BYTES, DEVICES, MOST_BYTES = 2, 8, 64 << 20  # of a collective


def product(row: Row) -> Row | None:
    """Return a row of `gemm_perf`, if it is wanted."""
    rows, columns, inner = (int(row[name]) for name in ("m", "n", "k"))
    if row["gemm_dtype"] not in FORMATS or rows not in BUCKETS or not {inner, columns} <= MATRICES:
        return None
    sizes = {"rows": rows, "inner": inner, "columns": columns}
    is_fp8 = row["gemm_dtype"] == "fp8"
    return {"kernel": "product", "format": row["gemm_dtype"], "quantises": int(is_fp8)} | sizes


def attention(row: Row) -> Row | None:
    """Return a row of either attention, if it is wanted."""
    heads, kv_heads, seqs = (
        int(row[name]) for name in ("num_heads", "num_key_value_heads", "batch_size")
    )
    kv, plain = row["kv_cache_dtype"], row["attn_dtype"] == "bfloat16"
    wanted = plain and int(row["head_dim"]) == 128 and not int(row.get("window_size") or 0)
    if not wanted or kv not in FORMATS or heads not in [each * kv_heads for each in GROUPS]:
        return None
    found = {"format": kv, "seqs": seqs, "heads": heads, "kv_heads": kv_heads, "head_dim": 128}
    found["launches"] = LAUNCHES[str(row["op_name"])]
    length, before = int(row["isl"]), int(row["step"])
    if row["op_name"] == "context_attention":
        own = {"kernel": "prefill", "tokens": length, "context": before}
        return found | own if length >= 16 else None
    is_wide = seqs * kv_heads >= LEAST_PARALLEL
    return found | {"kernel": "decode", "context": length + before} if is_wide else None


def experts(row: Row) -> Row | None:
    """Return a row of `moe_perf`, if it is wanted."""
    tokens, hidden, width, k, every = (
        int(row[name])
        for name in ("num_tokens", "hidden_size", "inter_size", "topk", "num_experts")
    )
    alone = int(row["moe_tp_size"]) == int(row["moe_ep_size"]) == 1
    wanted = alone and row["distribution"] == "balanced" and "nongated" not in row["kernel_source"]
    if not wanted or row["moe_dtype"] not in FORMATS or tokens not in BUCKETS:
        return None
    found = {"kernel": "experts", "format": row["moe_dtype"], "launches": LAUNCHES["moe"]}
    sizes = {"tokens": tokens, "hidden": hidden, "width": width, "k": k}
    return found | sizes | {"experts": every, "own": every, "chosen": min(every, tokens * k)}


def collective(row: Row) -> Row | None:
    """Return a row of NCCL's or a library's collectives, if it is wanted."""
    kinds = {"alltoall": "all-to-all"}
    kind = kinds.get(str(row["op_name"]), str(row["op_name"]).replace("_", "-"))
    dtype = row.get("nccl_dtype") or row.get("allreduce_dtype")
    if dtype not in ("half", "bfloat16") or "eager" in str(row.get("backend")):
        return None
    if "nccl_dtype" in row and kind == "all-reduce":
        return None  # libraries have kernels of their own for small ones; their tables have both
    num_bytes, devices = ELEMENT_BYTES * int(row["message_size"]), int(row["num_gpus"])
    if devices != DEVICES or num_bytes > MOST_BYTES:
        return None
    if kind == "reduce-scatter":  # of what all give, a device keeps one part
        num_bytes //= devices
    return {"kernel": kind, "devices": devices, "bytes": num_bytes}


TABLES: Mapping[str, Callable[[Row], Row | None]] = {
    "gemm_perf": product,
    "context_attention_perf": attention,
    "generation_attention_perf": attention,
    "moe_perf": experts,
    "nccl_perf": collective,
    "custom_allreduce_perf": collective,
}


def tables_of(path: Path) -> list[Path]:
    """Return the tables in a folder, or the file itself."""
    found = sorted(path.rglob("*")) if path.is_dir() else [path]
    return [one for one in found if any(one.stem.endswith(name) for name in TABLES)]


def rows_of(path: Path) -> Iterator[Row]:
    """Yield the rows of one file. Raises ConfigError where Parquet cannot be read."""
    if path.suffix != ".parquet":
        with path.open(newline="", encoding="utf-8") as file:
            yield from csv.DictReader(file)
        return
    try:
        from pyarrow import parquet  # type: ignore[import-not-found]
    except ImportError:
        raise ConfigError([f"{path}: Parquet is read by pyarrow: pip install pyarrow"]) from None
    yield from parquet.read_table(path).to_pylist()


def converted(path: Path) -> Iterator[Row]:
    """Yield the rows of one file that are wanted, in microseconds."""
    convert = next(make for name, make in TABLES.items() if path.stem.endswith(name))
    for row in rows_of(path):
        if (found := convert(row)) is not None:
            yield {**found, "us": round(1e3 * float(row["latency"]), 3)}


def main(words: Sequence[str] | None = None) -> int:
    """Write all wanted rows of the files and folders that are named."""
    parser = argparse.ArgumentParser(description="published kernel tables, for plan --kernels")
    parser.add_argument("paths", nargs="+", type=Path, metavar="PATH", help="a table, or a folder")
    paths = [one for path in parser.parse_args(words).paths for one in tables_of(path)]
    writer = csv.DictWriter(sys.stdout, COLUMNS, restval="")
    writer.writeheader()
    try:
        for path in paths:
            writer.writerows(converted(path))
    except (OSError, ConfigError) as error:
        print(f"kernel_tables: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

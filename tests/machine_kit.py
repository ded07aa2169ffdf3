"""A machine of round numbers, and the model that it runs."""

from shiftjax.arch.formats import Formats
from shiftjax.arch.presets import PRESETS
from shiftjax.costs.machine import Machine, Transfer

TINY = PRESETS["tiny"]  # hidden 64, intermediate 128, 2 layers, 8 query and 4 KV heads of 8
WAY = (Transfer(1.0, 10.0),)
PLAIN = Machine(
    "plain",
    num_devices=8,
    memory_bytes=1e9,
    memory_bytes_per_second=1000.0,
    memory_efficiency=1.0,
    kv_efficiency={"bfloat16": 1.0},
    matmul_flops={"float32": 1e30},
    matmul_efficiency=1.0,
    attention_efficiency=1.0,
    compute_units=1,
    tile_rows=(8,),
    tile_columns=8,
    tile_seconds=0.0,
    kernel_seconds=0.0,
    all_reduce=WAY,
    all_to_all=WAY,
    all_gather=WAY,
    point_to_point=WAY,
)
FLOAT32 = Formats("float32", "float32", "float32")

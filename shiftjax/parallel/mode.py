"""The parallel modes of a step, and the names of the mesh axes. No JAX."""

import enum
from typing import Any

Device = Any  # a jax.Device: jaxlib ships no stubs, so a type checker cannot know it
AXES = ("pp", "sp", "tp")
KV_AXES = ("tp", "sp")
SHARDED_AXES = ("vocab", "heads", "kv_heads", "intermediate", "lm_vocab")


class Mode(enum.Enum):
    """Which parallelism a step uses; the value is the label in metrics and options."""

    BASE = "base"
    SHIFT = "shift"


WEIGHT_AXES = {Mode.BASE: ("tp",), Mode.SHIFT: KV_AXES}

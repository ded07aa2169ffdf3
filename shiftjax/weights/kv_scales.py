"""What the codes of a KV cache are in units of, as checkpoints have it: a few numbers a layer.

    model.layers.{i}.self_attn.k_scale    and v_scale: one number, or one for each KV head

They come from calibration (compressed-tensors, ModelOpt, Quark). Where there are none, codes are in
units of 1.
"""

import hashlib
import logging

import numpy as np

from shiftjax.arch.weights import kv_scales_of
from shiftjax.weights.errors import CheckpointError
from shiftjax.weights.source import TensorSource

logger = logging.getLogger(__name__)


def read_scale(source: TensorSource, name: str, num_heads: int) -> np.ndarray:
    """Return the scale of every KV head, `[num_heads]` float32; ones where there is no tensor.

    Raises CheckpointError for another number of them, and for what is not positive and finite.
    """
    if name not in source.tensors:
        return np.ones(num_heads, np.float32)
    info, scale = source.tensors[name], source.read(name).astype(np.float32).reshape(-1)
    wrong = ""
    if scale.size not in (1, num_heads):
        wrong = f"expected one number, or one for each of {num_heads} KV heads, found {scale.size}"
    elif not (np.isfinite(scale) & (scale > 0)).all():
        wrong = f"expected positive numbers, found {scale.min() if scale.size == 1 else scale}"
    if wrong:
        raise CheckpointError(f"{info.file}: tensor {name}: {wrong}")
    return np.broadcast_to(scale, num_heads)


def identify_scales(source: TensorSource) -> str:
    """Check all scales of a checkpoint, and name them: equal ones have equal names.

    Warns, once, of keys or values whose codes are in units of 1. Raises CheckpointError.
    """
    scales = kv_scales_of(source.config)
    names = list(dict.fromkeys(name for weight in scales for name in weight.stacked))
    num_heads, total = source.config.num_kv_heads, hashlib.blake2b(digest_size=8)
    for name in names:
        total.update(read_scale(source, name, num_heads).tobytes())
    if missing := [name for name in names if name not in source.tensors]:
        logger.warning(
            "%s: %d of %d scales of an fp8 KV cache are missing (%s ...): such codes are in units "
            "of 1, and keys or values beyond 448 become 448",
            source.location,
            len(missing),
            len(names),
            missing[0],
        )
    return total.hexdigest()

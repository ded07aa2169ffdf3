"""From the numbers of a head to scores. No JAX."""

import numpy as np

from shiftjax.arch.pooling import Activation


def activated(logits: np.ndarray, activation: Activation) -> np.ndarray:
    """Scores of each text, float32 `[texts, labels]`: shares of one, between 0 and 1, or as is."""
    wide = logits.astype(np.float64)
    match activation:
        case "sigmoid":
            wide = np.exp(-np.logaddexp(0.0, -wide))
        case "softmax":
            powers = np.exp(wide - wide.max(axis=1, keepdims=True))
            wide = powers / powers.sum(axis=1, keepdims=True)
    return wide.astype(np.float32)

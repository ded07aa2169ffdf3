"""What a sampler should do, in NumPy float64 with plain sorting; imports nothing of ShiftJAX.

One row at a time. `asked` maps the names of sampling parameters to values; what is missing is off.
"""

import numpy as np


def processed_logits(logits: np.ndarray, asked: dict) -> np.ndarray:
    """Logits after allowed tokens, bias and penalties: what greedy takes the argmax of."""
    x = logits.astype(np.float64)
    if asked.get("allowed") is not None:
        x[np.setdiff1d(np.arange(len(x)), asked["allowed"])] = -np.inf
    for token, bias in asked.get("bias", {}).items():
        x[token] += np.float32(bias)
    prompt, output = asked.get("prompt", []), asked.get("output", [])
    for token in {*prompt, *output}:
        penalty = np.float32(asked.get("repetition_penalty", 1.0))
        x[token] = x[token] / penalty if x[token] > 0 else x[token] * penalty
    for token in set(output):
        x[token] -= np.float32(asked.get("frequency_penalty", 0.0)) * output.count(token)
        x[token] -= np.float32(asked.get("presence_penalty", 0.0))
    return x


def probabilities(logits: np.ndarray, asked: dict, slack: float = 0.0) -> np.ndarray:
    """Probability of every token; `slack` moves the thresholds by as much, relatively.

    Ties at the threshold of top_k and top_p stay together.
    """
    x = processed_logits(logits, asked)
    p = softmax(x / np.float64(np.float32(asked["temperature"])))
    p = keep(p, np.float32(asked.get("min_p", 0.0)) * p.max() * (1 + slack))
    if asked.get("top_k", 0) > 0:
        p = keep(p, np.sort(p)[::-1][min(asked["top_k"], len(p)) - 1] * (1 + slack))
    top_p = np.float32(asked.get("top_p", 1.0))
    if top_p < 1:
        best_first = np.sort(p)[::-1]
        needed = np.searchsorted(np.cumsum(best_first), top_p * (1 + slack))
        p = keep(p, best_first[min(needed, len(p) - 1)] * (1 - 1e-12))
    return p


def softmax(x: np.ndarray) -> np.ndarray:
    """Exponentials of x, normalised."""
    e = np.exp(x - x.max())
    return e / e.sum()


def log_softmax(x: np.ndarray) -> np.ndarray:
    """Logarithm of the softmax of each row, in float64."""
    shifted = x.astype(np.float64) - x.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def keep(p: np.ndarray, threshold: float) -> np.ndarray:
    """Zero what is below the threshold, but never everything, and renormalise."""
    p = np.where(p >= min(threshold, p.max()), p, 0.0)
    return p / p.sum()


def noise(words: np.ndarray, num_tokens: int) -> np.ndarray:
    """Exponential noise of the tokens of a row, from its two random words.

    The hash is lowbias32 (github.com/skeeto/hash-prospector), twice.
    """
    bits = np.arange(num_tokens, dtype=np.uint64)
    for word in words:
        bits ^= np.uint64(word)
        for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B), (16, 1)):
            bits = (bits ^ bits >> np.uint64(shift)) * np.uint64(factor) % np.uint64(2**32)
    return -np.log1p(-(bits + 0.5) / 2**32)


def winners(p: np.ndarray, row_noise: np.ndarray, tolerance: float) -> set[int]:
    """Tokens of the largest p / noise, all that are closer to it than a relative `tolerance`."""
    scores = p / row_noise
    return {int(token) for token in np.flatnonzero(scores >= scores.max() * (1 - tolerance))}

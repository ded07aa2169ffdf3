"""What a drafting model sees of its target: hidden states and choices along given texts."""

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from forward_pass import Params, final_states, head_name, read_params
from target_texts import CONTEXT

from shiftjax.arch.config import ModelConfig
from shiftjax.weights.source import TensorSource

PASS = CONTEXT  # tokens computed at a time
WINDOWS = (PASS // 4, PASS * 3 // 8, PASS // 2, PASS)  # that a text is padded to


class Features(NamedTuple):
    """Rows of texts, one for the last prompt token and each token of the output.

    A draft begins in a row with its hidden state and the token that follows; the tokens to guess
    are the `choice` of the next rows of the same text.
    """

    hidden: np.ndarray  # [rows, hidden] float16, after the final norm
    following: np.ndarray  # [rows] int32, the token after the row; -1 in the last row of a text
    choice: np.ndarray  # [rows] int32, the target's most likely token after the row
    left: np.ndarray  # [rows] int32, rows of the same text behind this one

    def save(self, file: Path) -> None:
        """Write an .npz, all of it or nothing."""
        partial_file = file.with_suffix(".part.npz")
        np.savez(partial_file, **self._asdict())
        partial_file.rename(file)

    @classmethod
    def load(cls, file: Path) -> "Features":
        """Read what `save` wrote."""
        with np.load(file) as arrays:
            return cls(**arrays)


def compute_features(source: TensorSource, texts: Path) -> Features:
    """Prefill every text of a file that `target_texts.answer` wrote."""
    params, config = read_params(source, jnp.bfloat16), source.config
    rows = [json.loads(line) for line in texts.read_text().splitlines()]
    found = [
        _of_text(row, *states)
        for batch in _passes(rows)
        for row, states in zip(batch, _prefill(params, config, batch), strict=True)
    ]
    return Features(*(np.concatenate(arrays) for arrays in zip(*found, strict=True)))


def _length(row: dict) -> int:
    return len(row["prompt"]) + len(row["output"])


def _window(row: dict) -> int:
    return next(window for window in WINDOWS if _length(row) <= window)


def _passes(rows: list[dict]) -> Iterator[list[dict]]:
    """Texts of the same window, as many as a pass holds."""
    for window in WINDOWS:
        alike = [row for row in rows if _window(row) == window]
        size = PASS // window
        yield from (alike[start : start + size] for start in range(0, len(alike), size))


def _prefill(
    params: Params, config: ModelConfig, batch: list[dict]
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield the hidden states `[window, hidden]` and choices `[window]` of each text."""
    window = _window(batch[0])
    ids = np.zeros((PASS // window, window), np.int32)
    for line, row in zip(ids, batch, strict=False):
        line[: _length(row)] = row["prompt"] + row["output"]
    hidden, choice = jax.device_get(_states(params, config, jnp.asarray(ids)))
    return zip(hidden[: len(batch)], choice[: len(batch)], strict=True)


@partial(jax.jit, static_argnums=1)
def _states(params: Params, config: ModelConfig, ids: jax.Array) -> tuple[jax.Array, jax.Array]:
    x = final_states(params, config, ids)
    logits = jnp.einsum(
        "ti,oi->to", x, params[head_name(config)], preferred_element_type=jnp.float32
    )
    hidden = x.astype(jnp.float16).reshape(*ids.shape, -1)
    return hidden, jnp.argmax(logits, axis=-1).astype(jnp.int32).reshape(ids.shape)


def _of_text(row: dict, hidden: np.ndarray, choice: np.ndarray) -> Features:
    """The rows from the last prompt token on."""
    first, end = len(row["prompt"]) - 1, _length(row)
    following = np.array([*row["output"], -1], np.int32)
    left = np.arange(end - first - 1, -1, -1, dtype=np.int32)
    return Features(hidden[first:end], following, choice[first:end], left)

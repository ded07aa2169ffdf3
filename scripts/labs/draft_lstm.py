"""An LSTM speculator to be trained: drafts, how often they are right, and where training begins."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from target_features import Features

from shiftjax.models.speculator import LSTMWeights, embedding_scale, lstm_step, scaled_input

DRAFTS = 3
EVALUATED = 1024  # rows of a pass


class Weights(NamedTuple):
    """What is trained, float32. Arctic's LSTM, but that the table of embeddings is the target's
    times a matrix, which is as expressive as few tokens can teach, and multiplied out at the end.
    """

    projections: tuple[jax.Array, jax.Array]  # [inner, 4, in] of the first draft and of the others
    norms: tuple[jax.Array, jax.Array, jax.Array, jax.Array]  # [inner] of cell, state: weight, bias
    embedding: jax.Array  # [hidden, inner]
    head: jax.Array  # [draft_vocab, inner]


@partial(jax.jit, static_argnums=1)
def next_state(
    weights: Weights, index: int, state: jax.Array, cell: jax.Array, given: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """State and cell of a draft, from those before; products in bfloat16.

    `given` [rows, hidden] is the target's embedding of the token before.
    """
    inner = weights.embedding.shape[1]
    embedded = (given.astype(jnp.bfloat16) @ weights.embedding.astype(jnp.bfloat16))[:, None]
    projection = weights.projections[min(index, 1)].astype(jnp.bfloat16)
    step = LSTMWeights(projection, *weights.norms)
    return lstm_step(step, state, cell, embedded, embedding_scale(DRAFTS, inner))


def begin(weights: Weights, hidden: jax.Array) -> tuple[jax.Array, jax.Array]:
    """State and cell before the first draft."""
    cell = jnp.zeros((hidden.shape[0], weights.embedding.shape[1]), jnp.float32)
    return scaled_input(hidden.astype(jnp.float32)).astype(jnp.bfloat16), cell


def logits_of(head: jax.Array, state: jax.Array) -> jax.Array:
    """Of bfloat16 states, `[rows, draft_vocab]` in float32."""
    head = head.astype(jnp.bfloat16)
    return jnp.einsum("ri,vi->rv", state, head, preferred_element_type=jnp.float32)


@jax.jit
def greedy_drafts(
    weights: Weights, table: jax.Array, hidden: jax.Array, following: jax.Array
) -> jax.Array:
    """Draft as at run time, `[rows, drafts]`, each from the one before."""
    (state, cell), token, drafted = begin(weights, hidden), following, []
    for i in range(DRAFTS):
        state, cell = next_state(weights, i, state, cell, table[token])
        token = jnp.argmax(logits_of(weights.head, state), axis=-1)
        drafted.append(token)
    return jnp.stack(drafted, axis=1)


def acceptance(
    features: Features, draft: Callable[[np.ndarray, np.ndarray], jax.Array]
) -> list[float]:
    """How often drafts 0..i all are what the target would say, for each i.

    `draft(hidden, following)` gives `[rows, drafts]`. The texts must be the target's greedy ones:
    then its choices after a draft that is right are those after the text. A step that drafts gives
    1 + sum(acceptance) tokens.
    """
    starts = np.flatnonzero(features.left >= DRAFTS)
    kept = np.zeros(DRAFTS)
    for start in range(0, len(starts), EVALUATED):
        rows = np.resize(starts[start : start + EVALUATED], EVALUATED)  # of one size
        count = min(EVALUATED, len(starts) - start)
        drafted = np.asarray(draft(features.hidden[rows], features.following[rows]))[:count]
        wanted = features.choice[rows[:count, None] + np.arange(1, DRAFTS + 1)]
        kept += np.cumprod(drafted == wanted, axis=1).sum(axis=0)
    return (kept / len(starts)).tolist()


# ---------------------------------------------------------------------- before training


def initial_weights(features: Features, table: np.ndarray, head: np.ndarray) -> Weights:
    """A speculator that guesses the target's next hidden state and asks the target's own head.

    The guess x is a ridge regression on the hidden state and the embedding of the token after it;
    later drafts have their own state in place of the target's. It passes the LSTM nearly as it is:
    the other gates see of it what comes from the token, and stand about half open; of x + 2 gelu
    changes little, and the head, whose rows sum to 0, does not see what is added. The forget gate
    is closed by the mean of the state, which is 1.

    `table` [vocab, hidden] is the target's embedding, `head` [draft_vocab, hidden] part of its own.
    """
    inner = features.hidden.shape[1]
    one, zero = jnp.ones(inner), np.zeros((inner, inner), np.float32)
    rows = np.flatnonzero(features.left > 1)
    wide = features.hidden.astype(np.float32)
    scale = np.sqrt(np.mean(wide**2, axis=0))

    state = np.asarray(scaled_input(jnp.asarray(wide[rows])))
    given = table[features.following[rows]]
    solved = ridge(np.concatenate([state, given], axis=1), wide[rows + 1] / scale)
    of_state, of_token = np.split(solved, [inner])
    guess = state @ of_state + given @ of_token
    head = head * (2 * scale * np.sqrt(np.mean(guess**2)))
    head = head - head.mean(axis=1, keepdims=True)
    embedding = of_token / embedding_scale(DRAFTS, inner)

    def gates(forget: np.ndarray, candidate: np.ndarray) -> jax.Array:
        return jnp.asarray(np.stack([forget, zero, zero, candidate], axis=1))

    def weights(later: np.ndarray) -> Weights:
        """Of drafts whose first state is guessed, and the next ones by `later` [inner, inner]."""
        return Weights(
            projections=(gates(zero, of_state.T), gates(zero - 6 / inner, later.T)),
            norms=(one, 2 * one, 5**0.5 * one, 0 * one),
            embedding=jnp.asarray(embedding),
            head=jnp.asarray(head),
        )

    first = weights(zero)
    second, _ = next_state(first, 0, *begin(first, jnp.asarray(wide[rows])), jnp.asarray(given))
    rest = wide[rows + 2] / scale - table[features.following[rows + 1]] @ of_token
    return weights(ridge(np.asarray(second, np.float32), rest))


def ridge(x: np.ndarray, y: np.ndarray, penalty: float = 1e-4) -> np.ndarray:
    """argmin |x W - y|^2 + penalty * mean(diag(x^T x)) * |W|^2."""
    gram = (x.T @ x).astype(np.float64)
    gram += penalty * np.trace(gram) / len(gram) * np.eye(len(gram))
    return np.linalg.solve(gram, (x.T @ y).astype(np.float64)).astype(np.float32)

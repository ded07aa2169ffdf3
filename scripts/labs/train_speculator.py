"""Train a small LSTM speculator for a model, from texts of its own, on a CPU.

    python scripts/labs/train_speculator.py --work WORK --output OUT --test spec_bench.jsonl \
        --prompts gsm8k_train_first500.jsonl vicuna_bench.jsonl

The phases leave files in WORK, and what is there already is not made again:

    {train,test}.jsonl   the target's answers to the prompts (`target_texts.py`)
    {train,test}.npz     hidden states and choices along them (`target_features.py`)
    OUT                  a speculator under the names of Arctic Inference's checkpoints

It learns to say what the target would: from the hidden state of a row and the token after it,
draft i is to have the target's distribution i + 2 places on, where the tokens between are those of
the text (teacher forcing; the losses of later drafts weigh 0.8 and 0.64, as Medusa's, arXiv
2401.10774, section 2.2). Acceptance is measured as it comes about at run time: drafts are greedy
and each is fed the one before.

Of SmolLM2-135M 95,732 tokens of 512 answers gave 7.7 million numbers in 1,880 CPU seconds (answers
920, hidden states 520, training 440); of greedy answers to Spec-Bench the first draft is right with
probability 0.317, the first two with 0.113, all three with 0.045: 1.475 tokens a step.
"""

import argparse
import json
import random
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from draft_lstm import (
    DRAFTS,
    Weights,
    acceptance,
    begin,
    greedy_drafts,
    initial_weights,
    logits_of,
    next_state,
)
from forward_pass import head_name
from target_features import Features, compute_features
from target_texts import answer, invent, open_engine, read_questions

from shiftjax.arch.config import ModelConfig, Speculator
from shiftjax.arch.weights import EMBEDDING, LSTM_GATES
from shiftjax.weights.hf_config import class_of
from shiftjax.weights.locate import open_source, resolve_model
from shiftjax.weights.speculator_checkpoints import save_speculator

LOSS_WEIGHTS = (1.0, 0.8, 0.64)
TEST_TOKENS = 128  # of an answer that is held out
# Invented prompts begin with these, one after the other: freely, and as common tasks do.
OPENINGS = ("", "Summarize: ", "", "Translate German to English: ", "Who ", "")


class Batch(NamedTuple):
    """Rows where drafts begin, and what follows, in the order of drafts."""

    hidden: jax.Array  # [1 + drafts, rows, hidden] float16, of the row and of those after it
    given: jax.Array  # [drafts, rows, hidden] the target's embedding of the token before each draft
    counts: jax.Array  # [drafts, rows] 1, or 0 behind the end of a text


def losses(weights: Weights, head: jax.Array, batch: Batch) -> jax.Array:
    """The mean cross entropy of each draft, `[drafts]`, to the target's softmax over its ids.

    `head` [draft_vocab, hidden] is the target's, bfloat16.
    """
    (state, cell), found = begin(weights, batch.hidden[0]), []
    for i in range(DRAFTS):
        state, cell = next_state(weights, i, state, cell, batch.given[i])
        wanted = logits_of(head, batch.hidden[i + 1].astype(jnp.bfloat16))
        wrong = optax.losses.softmax_cross_entropy(
            logits_of(weights.head, state), jax.nn.softmax(wanted)
        )
        found.append(jnp.sum(wrong * batch.counts[i]) / jnp.maximum(jnp.sum(batch.counts[i]), 1))
    return jnp.stack(found)


@partial(jax.jit, static_argnums=0)
def update(
    optimizer: optax.GradientTransformation,
    weights: Weights,
    state: optax.OptState,
    head: jax.Array,
    batch: Batch,
) -> tuple[Weights, optax.OptState, jax.Array]:
    """One step of training; returns weights, the optimizer's state and the losses."""

    def objective(weights: Weights) -> tuple[jax.Array, jax.Array]:
        each = losses(weights, head, batch)
        return jnp.dot(each, jnp.asarray(LOSS_WEIGHTS)), each

    gradient, each = jax.grad(objective, has_aux=True)(weights)
    with jax.numpy_dtype_promotion("standard"):  # optax mixes whole numbers with others
        change, state = optimizer.update(gradient, state, weights)
    return cast(Weights, optax.apply_updates(weights, change)), state, each


def batch_at(features: Features, rows: np.ndarray, table: np.ndarray) -> Batch:
    """What is trained on when drafts begin in these rows; `table` is the target's embedding."""
    at = np.minimum(rows + np.arange(DRAFTS + 1)[:, None], len(features.left) - 1)
    counts = features.left[rows] > np.arange(DRAFTS)[:, None]
    given = table[features.following[at[:-1]]]
    return Batch(*map(jnp.asarray, (features.hidden[at], given, counts.astype(np.float32))))


class Training(NamedTuple):
    """How long and how boldly to train."""

    epochs: int
    batch_size: int
    learning_rate: float


def train(
    features: Features, table: np.ndarray, head: np.ndarray, weights: Weights, training: Training
) -> Iterator[tuple[Weights, np.ndarray]]:
    """Yield the weights after each epoch, and its mean losses `[drafts]`.

    AdamW, whose rate rises over 100 steps, or a tenth of all, and falls as a cosine.
    """
    rows, rng = np.flatnonzero(features.left > 0), np.random.default_rng(0)
    epochs, batch_size, learning_rate = training
    per_epoch = max(1, len(rows) // batch_size)
    steps = max(1, epochs * per_epoch)
    schedule = optax.warmup_cosine_decay_schedule(0.0, learning_rate, min(100, steps // 10), steps)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.98))
    state, of_target = optimizer.init(weights), jnp.asarray(head, jnp.bfloat16)
    for _ in range(epochs):
        history = []
        for chosen in np.array_split(rng.permutation(rows), per_epoch):
            # of one size: a batch of another would compile again
            batch = batch_at(features, chosen[:batch_size], table)
            weights, state, each = update(optimizer, weights, state, of_target, batch)
            history.append(each)
        yield weights, np.mean(history, axis=0)


def export(weights: Weights, table: jax.Array, target: ModelConfig, directory: Path) -> None:
    """Write `config.json` and `model.safetensors`, bfloat16."""
    head, inner = weights.head.shape
    speculator = Speculator(
        "lstm",
        DRAFTS,
        inner,
        tie_weights=True,
        tie_lstm_embs=True,
        scale_input=True,
        draft_vocab=head,
    )
    config = replace(target, speculator=speculator)
    gates = {
        f"{gate}_proj.{i}.weight": projection[:, j]
        for i, projection in enumerate(weights.projections)
        for j, gate in enumerate(LSTM_GATES)
    }
    names = [f"{norm}_ln.0.{part}" for norm in ("cell", "state") for part in ("weight", "bias")]
    tensors = {
        **gates,
        **dict(zip(names, weights.norms, strict=True)),
        f"{LSTM_GATES[0]}_emb.0.weight": table @ weights.embedding,
        "head.0.weight": weights.head,
    }
    directory.mkdir(parents=True, exist_ok=True)
    stored = {name: np.asarray(x.astype(jnp.bfloat16)) for name, x in tensors.items()}
    save_speculator(config, stored, directory, class_of(target.architecture))


@contextmanager
def timed(phase: str, seconds: dict[str, dict[str, float]]) -> Iterator[None]:
    """Note what a phase takes, on the clock and of the CPU."""
    wall, cpu = time.monotonic(), time.process_time()
    yield
    spent = {"wall": time.monotonic() - wall, "cpu": time.process_time() - cpu}
    seconds[phase] = {name: round(value, 1) for name, value in spent.items()}
    print(f"{phase}: {seconds[phase]}", file=sys.stderr)


def make_texts(args: argparse.Namespace) -> None:
    """Have the target answer, greedily and at temperature 1 to learn from, greedily to test."""
    llm, invented = open_engine(args.model), args.work / "invented.jsonl"
    if not invented.exists():
        rows = [json.dumps({"question": each}) for each in invent(llm, OPENINGS, args.invented)]
        invented.write_text("".join(f"{row}\n" for row in rows))
    questions = read_questions([*args.prompts, invented])
    random.Random(0).shuffle(questions)
    answer(llm, questions[: args.texts], args.work / "train.jsonl", args.max_tokens, (0.0, 1.0))
    held_out = read_questions([args.test])[:: args.test_stride]
    answer(llm, held_out, args.work / "test.jsonl", TEST_TOKENS, (0.0,))
    llm.close()


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Train an LSTM speculator")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--work", type=Path, required=True, help="for what phases leave")
    parser.add_argument("--output", type=Path, required=True, help="for the speculator")
    parser.add_argument("--prompts", type=Path, nargs="*", default=[], help="JSON lines")
    parser.add_argument("--invented", type=int, default=700, help="prompts that the target makes")
    parser.add_argument("--texts", type=int, default=512, help="prompts of all these to answer")
    parser.add_argument("--test", type=Path, required=True, help="JSON lines held out")
    parser.add_argument("--test-stride", type=int, default=3, help="take every third of them")
    parser.add_argument("--max-tokens", type=int, default=256, help="of an answer")
    parser.add_argument("--draft-vocab", type=int, default=8192, help="ids below it are drafted")
    parser.add_argument("--epochs", type=int, default=3, help="0: the closed form")
    parser.add_argument("--batch", type=int, default=256, help="rows")
    parser.add_argument("--rate", type=float, default=1e-3)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> dict:
    """Generate, compute features, train, measure; print and return what came out."""
    args, seconds = parse(arguments), {}
    args.work.mkdir(parents=True, exist_ok=True)
    texts = {split: args.work / f"{split}.jsonl" for split in ("train", "test")}
    if not all(file.exists() for file in texts.values()):
        with timed("texts", seconds):
            make_texts(args)
    source = open_source(resolve_model(args.model))
    for split, file in texts.items():
        if not file.with_suffix(".npz").exists():
            with timed(f"{split} features", seconds):
                compute_features(source, file).save(file.with_suffix(".npz"))
    learn, test = (Features.load(file.with_suffix(".npz")) for file in texts.values())
    table = np.asarray(source.read(EMBEDDING), np.float32)
    head = source.read(head_name(source.config), np.s_[: args.draft_vocab,]).astype(np.float32)
    with timed("training", seconds):
        settings = Training(args.epochs, args.batch, args.rate)
        weights = initial_weights(learn, table, head)
        for trained, loss in train(learn, table, head, weights, settings):
            print(f"losses {loss.round(3)}", file=sys.stderr)
            weights = trained
        export(weights, jnp.asarray(table), source.config, args.output)
    with timed("evaluation", seconds):
        kept = acceptance(test, partial(greedy_drafts, weights, jnp.asarray(table)))
    in_vocab = [round(float(np.mean(f.choice < args.draft_vocab)), 4) for f in (learn, test)]
    report = {
        "train_tokens": int(np.sum(learn.left > 0)),
        "test_tokens": int(np.sum(test.left > 0)),
        "parameters": sum(x.size for x in jax.tree.leaves(weights)),
        "in_draft_vocab": in_vocab,
        "acceptance": [round(each, 4) for each in kept],
        "tokens_per_step": round(1 + sum(kept), 3),
        "seconds": seconds,
    }
    print(json.dumps(report))
    return report


if __name__ == "__main__":
    main()

"""Make SwiftKV models of an ordinary Llama, without training, and say what each depth costs.

    python scripts/labs/make_swiftkv.py --train train.txt --test test.txt --output DIR

With SwiftKV (arXiv 2410.03960) the keys and values of layers from a depth on are made of the hidden
state at that depth. Published models learn these projections by distillation. Here they are the
closed form of a ridge regression: x is the hidden state at the depth, brought to unit root mean
square, y are the keys (before the rotation) and values that a late layer makes of its own input,

    W = argmin |X W - Y|^2 + ridge * mean(diag(X^T X)) * |W|^2

over the tokens of a text; queries and all else stay. The perplexities of a second text say what
is lost: no more than a demonstration on real weights, but every number of it can be made again.
DIR/depth-N is a checkpoint that `shiftjax generate DIR/depth-N` and all others take.
"""

import argparse
import json
import math
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from forward_pass import (
    SWIFTKV_NORM,
    Params,
    attention_of,
    final_states,
    head_name,
    hidden_states,
    read_params,
)

from shiftjax.arch.config import ModelConfig
from shiftjax.models.layers import rms_norm
from shiftjax.text.tokenizer import load_tokenizer
from shiftjax.weights.huggingface import save_huggingface
from shiftjax.weights.locate import open_source, resolve_model
from shiftjax.weights.source import TensorInfo, TensorSource

WINDOW, BATCH = 512, 4  # tokens of a context, contexts of a pass


@partial(jax.jit, static_argnums=(1, 3))
def moments(
    params: Params, config: ModelConfig, ids: jax.Array, depths: tuple[int, ...]
) -> dict[int, tuple[jax.Array, jax.Array]]:
    """X^T X and X^T Y of every depth: keys of its late layers, then values, layer by layer."""
    states, eps = list(hidden_states(params, config, ids)), config.rms_norm_eps
    inputs = [
        rms_norm(states[i], params[f"model.layers.{i}.input_layernorm.weight"], eps)
        for i in range(config.num_layers)
    ]
    found = {}
    for depth in depths:
        x = rms_norm(states[depth], jnp.ones(config.hidden_size), eps)
        y = [
            inputs[i] @ params[f"{attention_of(i)}.{n}_proj.weight"].T
            for n in "kv"
            for i in range(depth, config.num_layers)
        ]
        found[depth] = x.T @ x, x.T @ jnp.concatenate(y, axis=1)
    return found


@partial(jax.jit, static_argnums=1)
def loss(params: Params, config: ModelConfig, ids: jax.Array) -> jax.Array:
    """Mean negative log-likelihood of every token but the first of each window."""
    logits = final_states(params, config, ids) @ params[head_name(config)].T
    logprobs = jax.nn.log_softmax(logits.reshape(BATCH, WINDOW, -1)[:, :-1], axis=-1)
    wanted = ids[:, 1:, None]
    return -jnp.take_along_axis(logprobs, wanted, axis=-1).mean()


def projections(
    gram: np.ndarray, moment: np.ndarray, config: ModelConfig, depth: int, ridge: float
) -> dict[str, np.ndarray]:
    """Solve for the tensors that a model of this depth has and the original has not."""
    penalty = ridge * np.trace(gram) / len(gram)
    solved = np.linalg.solve(gram + penalty * np.eye(len(gram)), moment).T.astype(np.float32)
    names = [
        f"{attention_of(i)}.{n}_proj_swiftkv.weight"
        for n in "kv"
        for i in range(depth, config.num_layers)
    ]
    tensors = dict(zip(names, np.split(solved, len(names)), strict=True))
    return tensors | {SWIFTKV_NORM: np.ones(config.hidden_size, np.float32)}


class SwiftKVSource:
    """A TensorSource: the original's tensors, with late queries renamed, and some in memory."""

    def __init__(self, original: TensorSource, depth: int, made: dict[str, np.ndarray]):
        config = original.config
        self.config = replace(config, architecture="llama_swiftkv", num_kv_layers=depth)
        self.location = f"{original.location}, SwiftKV from layer {depth} on"
        self._original, self._made = original, made
        late = tuple(f"{attention_of(i)}." for i in range(depth, config.num_layers))
        self._names = {
            name.replace("q_proj.", "q_proj_swiftkv.") if name.startswith(late) else name: name
            for name in original.tensors
            if not (name.startswith(late) and ("k_proj." in name or "v_proj." in name))
        }
        self.tensors = {name: original.tensors[old] for name, old in self._names.items()}
        self.tensors |= {name: TensorInfo(x.shape, x.dtype, "made") for name, x in made.items()}

    def read(self, name: str, index: tuple[slice, ...] = ()) -> np.ndarray:
        """See `TensorSource.read`."""
        if name in self._made:
            return np.ascontiguousarray(self._made[name][index])
        return self._original.read(self._names[name], index)


def batches(file: Path, tokenizer_path: Path, limit: int) -> list[jax.Array]:
    """Cut a text into passes of whole windows, `[BATCH, WINDOW]`; at most `limit` tokens."""
    ids = load_tokenizer(tokenizer_path).encode(file.read_text(), add_special_tokens=False)[:limit]
    size = BATCH * WINDOW
    count = len(ids) // size
    if not count:
        raise SystemExit(f"{file}: {len(ids)} tokens are less than one pass of {size}")
    return list(jnp.asarray(ids[: count * size], jnp.int32).reshape(count, BATCH, WINDOW))


def perplexity(params: Params, config: ModelConfig, texts: list[jax.Array]) -> float:
    """exp of the mean loss."""
    return math.exp(np.mean([float(loss(params, config, ids)) for ids in texts]))


def fit(
    params: Params, config: ModelConfig, texts: list[jax.Array], depths: tuple[int, ...]
) -> dict[int, tuple[np.ndarray, np.ndarray]]:
    """Sum the moments of every depth over a text, in float64."""
    size = config.hidden_size
    columns = 2 * config.num_kv_heads * config.head_dim
    sums = {
        depth: (np.zeros((size, size)), np.zeros((size, columns * (config.num_layers - depth))))
        for depth in depths
    }
    for ids in texts:
        for depth, found in moments(params, config, ids, depths).items():
            for total, part in zip(sums[depth], found, strict=True):
                total += np.asarray(part, np.float64)  # noqa: PLW2901 in place
    return sums


def write(swiftkv: SwiftKVSource, directory: Path, tokenizer_path: Path) -> None:
    """Write a checkpoint with its tokenizer."""
    directory.mkdir(parents=True)
    save_huggingface(swiftkv, directory)
    load_tokenizer(tokenizer_path).save(directory)


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="SwiftKV models by ridge regression")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--train", type=Path, required=True, help="a text to fit")
    parser.add_argument("--test", type=Path, required=True, help="another, to measure")
    parser.add_argument("--depths", type=int, nargs="+", default=[15, 20, 25])
    parser.add_argument("--train-tokens", type=int, default=50_000)
    parser.add_argument("--test-tokens", type=int, default=10_000)
    parser.add_argument("--ridge", type=float, default=1e-4, help="times the mean of diag(X^T X)")
    parser.add_argument("--output", type=Path, help="where to write a directory for each depth")
    return parser.parse_args()


def main() -> None:
    """Fit, measure, write."""
    args = parse()
    location = resolve_model(args.model)
    assert location.path is not None, f"{args.model} has no tokenizer"
    source = open_source(location)
    config, params, start = source.config, read_params(source), time.process_time()
    train = batches(args.train, location.path, args.train_tokens)
    test = batches(args.test, location.path, args.test_tokens)
    found = {config.num_layers: perplexity(params, config, test)}
    for depth, sums in fit(params, config, train, tuple(args.depths)).items():
        swiftkv = SwiftKVSource(source, depth, projections(*sums, config, depth, args.ridge))
        found[depth] = perplexity(read_params(swiftkv), swiftkv.config, test)
        if args.output:
            write(swiftkv, args.output / f"depth-{depth}", location.path)
    print("layers with KV of their own | perplexity")
    for depth, value in found.items():
        print(f"{depth:27} | {value:.2f}")
    counts = {"train_tokens": sum(x.size for x in train), "test_tokens": sum(x.size for x in test)}
    print(json.dumps({"perplexity": found, **counts, "cpu_seconds": time.process_time() - start}))


if __name__ == "__main__":
    main()

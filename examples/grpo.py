"""GRPO in one process: a trainer in Flax and optax, and rollouts, on the same devices.

Group Relative Policy Optimization (DeepSeekMath, arXiv 2402.03300, section 4.1), on a tiny model of
random weights whose reward is the share of even token ids. Every step samples groups, compares the
trainer's log-probabilities of their tokens with the rollout's, takes one step of Adam, and gives
the new weights to the engine.

python examples/grpo.py [steps [numerics]]

The engine also scores the answers as prompts, in other steps and sizes than those that drew them.
With strict `numerics` (invariant, integer: bfloat16) these are the rollout's to the bit.
"""

import sys
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from shiftjax import LLM, SamplingParams
from shiftjax.arch.config import ModelConfig

NUM_PROMPTS, GROUP, NUM_TOKENS = 4, 8, 12
LEARNING_RATE, CLIP = 2e-2, 0.2


class Projection(nnx.Module):
    """A matrix as checkpoints have it, `[out, in]`."""

    def __init__(self, out: int, width: int, rngs: nnx.Rngs):
        self.weight = nnx.Param(rngs.params.normal((out, width)) * width**-0.5)

    def __call__(self, x: jax.Array) -> jax.Array:
        """`[..., in]` to `[..., out]`."""
        return x @ self.weight[...].T


class Norm(nnx.Module):
    """RMSNorm."""

    def __init__(self, width: int, eps: float):
        self.weight, self.eps = nnx.Param(jnp.ones(width)), eps

    def __call__(self, x: jax.Array) -> jax.Array:
        """Of the last dimension."""
        scale = jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + self.eps)
        return x * scale * self.weight[...]


class Attention(nnx.Module):
    """Causal attention of grouped heads with rotary positions."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        c, self.config = config, config
        self.q_proj = Projection(c.num_heads * c.head_dim, c.hidden_size, rngs)
        self.k_proj = Projection(c.num_kv_heads * c.head_dim, c.hidden_size, rngs)
        self.v_proj = Projection(c.num_kv_heads * c.head_dim, c.hidden_size, rngs)
        self.o_proj = Projection(c.hidden_size, c.num_heads * c.head_dim, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """`[texts, tokens, hidden]`."""
        texts, length, _ = x.shape
        q, k, v = (
            project(x).reshape(texts, length, -1, self.config.head_dim)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = self._turned(q), self._turned(k)
        # Query heads of a group are neighbours.
        k, v = (jnp.repeat(each, q.shape[2] // each.shape[2], axis=2) for each in (k, v))
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * self.config.head_dim**-0.5
        mask = jnp.tril(jnp.ones((length, length), bool))
        weights = jax.nn.softmax(jnp.where(mask, scores, -jnp.inf), axis=-1)
        found = jnp.einsum("bhqk,bkhd->bqhd", weights, v)
        return self.o_proj(found.reshape(texts, length, -1))

    def _turned(self, x: jax.Array) -> jax.Array:
        half = self.config.head_dim // 2
        speeds = self.config.rope_theta ** (-jnp.arange(half) / half)
        angles = (jnp.arange(x.shape[1])[:, None] * speeds)[:, None]
        one, two = jnp.split(x, 2, axis=-1)
        cos, sin = jnp.cos(angles), jnp.sin(angles)
        return jnp.concatenate([one * cos - two * sin, two * cos + one * sin], axis=-1)


class Mlp(nnx.Module):
    """SwiGLU."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        self.gate_proj = Projection(config.intermediate_size, config.hidden_size, rngs)
        self.up_proj = Projection(config.intermediate_size, config.hidden_size, rngs)
        self.down_proj = Projection(config.hidden_size, config.intermediate_size, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """`[..., hidden]`."""
        return self.down_proj(jax.nn.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nnx.Module):
    """One layer of a Llama."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        self.input_layernorm = Norm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, rngs)
        self.post_attention_layernorm = Norm(config.hidden_size, config.rms_norm_eps)
        self.mlp = Mlp(config, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """`[texts, tokens, hidden]`."""
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class Table(nnx.Module):
    """The embedding."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        self.weight = nnx.Param(rngs.params.normal((config.vocab_size, config.hidden_size)))


class Body(nnx.Module):
    """All but the head."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        self.embed_tokens = Table(config, rngs)
        self.layers = nnx.List([Layer(config, rngs) for _ in range(config.num_layers)])
        self.norm = Norm(config.hidden_size, config.rms_norm_eps)

    def __call__(self, ids: jax.Array) -> jax.Array:
        """Hidden states of `[texts, tokens]`."""
        x = self.embed_tokens.weight[...][ids]
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


class Llama(nnx.Module):
    """A Llama whose parameters have the names of its checkpoint."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        self.model = Body(config, rngs)
        self.lm_head = Projection(config.vocab_size, config.hidden_size, rngs)

    def __call__(self, ids: jax.Array) -> jax.Array:
        """Log-probabilities `[texts, tokens - 1]` of all tokens but the first."""
        logits = self.lm_head(self.model(ids))[:, :-1]
        found = jnp.take_along_axis(logits, ids[:, 1:, None], axis=-1)[..., 0]
        return found - jax.nn.logsumexp(logits, axis=-1)


class Batch(NamedTuple):
    """What one step learns from: all answers to all prompts."""

    ids: np.ndarray  # [answers, prompt and answer]
    logprobs: np.ndarray  # [answers, tokens of an answer], of the rollout
    advantages: np.ndarray  # [answers]
    reward: float  # in the mean


def rollout(llm: LLM, prompts: list[list[int]], seed: int) -> Batch:
    """Sample a group of answers to each prompt, with their rewards against the group's mean."""
    sampling = SamplingParams(
        n=GROUP, temperature=1.0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=0, seed=seed
    )
    ids, logprobs, advantages, rewards = [], [], [], []
    for output in llm.generate(prompts, sampling):
        reward = np.array([np.mean([t % 2 == 0 for t in o.token_ids]) for o in output.outputs])
        advantages += list((reward - reward.mean()) / (reward.std() + 1e-4))
        rewards += list(reward)
        ids += [[*output.prompt_token_ids, *o.token_ids] for o in output.outputs]
        logprobs += [[each.logprob for each in o.logprobs or ()] for o in output.outputs]
        assert {o.weight_version for o in output.outputs} == {llm.weight_version}
    found = np.array(logprobs, np.float32), np.array(advantages, np.float32)
    return Batch(np.array(ids, np.int32), *found, float(np.mean(rewards)))


def scored(llm: LLM, batch: Batch) -> np.ndarray:
    """Log-probabilities `[answers, tokens]` that the engine gives to the answers, as prompts."""
    outputs = llm.generate(batch.ids.tolist(), SamplingParams(max_tokens=0, prompt_logprobs=0))
    found = [(output.prompt_logprobs or [])[-NUM_TOKENS:] for output in outputs]
    return np.array([[each.logprob for each in text if each] for text in found], np.float32)


@nnx.jit
def learn(
    model: Llama, optimizer: nnx.Optimizer, batch: tuple[jax.Array, ...]
) -> tuple[jax.Array, jax.Array]:
    """One step; returns the loss and the trainer's log-probabilities before it."""
    ids, old, advantages = batch

    def loss(model: Llama) -> tuple[jax.Array, jax.Array]:
        logprobs = model(ids)[:, -NUM_TOKENS:]
        ratio = jnp.exp(logprobs - old)
        clipped = jnp.clip(ratio, 1 - CLIP, 1 + CLIP)
        gain = jnp.minimum(ratio * advantages[:, None], clipped * advantages[:, None])
        return -gain.mean(), logprobs

    (value, logprobs), gradients = nnx.value_and_grad(loss, has_aux=True)(model)
    optimizer.update(model, gradients)
    return value, logprobs


def split(model: Llama, mesh: Mesh) -> None:
    """Split every parameter over the mesh where its first dimension allows it."""

    def put(array: jax.Array) -> jax.Array:
        spec = P("devices") if array.shape[0] % mesh.size == 0 else P()
        return jax.device_put(array, NamedSharding(mesh, spec))

    nnx.update(model, jax.tree.map(put, nnx.state(model)))


def train(steps: int, **options: Any) -> list[float]:
    """Train; returns the mean reward of each step. `options` are those of the engine."""
    sizes: dict[str, Any] = {
        "max_model_len": 64,
        "max_num_seqs": 32,
        "num_blocks": 400,
        "token_buckets": [64],
    }
    sizes |= {"dtype": "float32", "block_size": 4, "max_num_batched_tokens": 64}
    sizes |= {"sp": 2, "tp": 2} | options
    llm = LLM("random:tiny", **sizes)
    config = llm.deployment.layout.model
    mesh = Mesh(np.array(jax.devices()[: llm.deployment.layout.num_devices]), ("devices",))
    model = Llama(config, nnx.Rngs(0))
    split(model, mesh)
    optimizer = nnx.Optimizer(model, optax.adam(LEARNING_RATE), wrt=nnx.Param)
    everywhere = NamedSharding(mesh, P())
    rng, rewards = np.random.default_rng(0), []
    for step in range(steps):
        llm.update_weights(nnx.state(model, nnx.Param), version=step + 1)
        prompts = rng.integers(3, config.vocab_size, (NUM_PROMPTS, 6)).tolist()
        batch = rollout(llm, prompts, seed=step)
        given = jax.device_put((batch.ids, batch.logprobs, batch.advantages), everywhere)
        _, logprobs = learn(model, optimizer, given)
        apart = np.abs(np.asarray(logprobs) - batch.logprobs)
        same = (scored(llm, batch) == batch.logprobs).mean()
        rewards.append(batch.reward)
        print(
            f"step {step}: reward {batch.reward:.3f}, log-probabilities differ by "
            f"{apart.mean():.1e} in the mean, {apart.max():.1e} at most; scored again, "
            f"{same:.1%} have the same bits"
        )
    llm.close()
    return rewards


if __name__ == "__main__":
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 30
    numerics = sys.argv[2] if len(sys.argv) > 2 else "fast"
    train(steps, numerics=numerics, dtype="float32" if numerics == "fast" else "bfloat16")

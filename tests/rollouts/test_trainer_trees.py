"""Trees of tunix and MaxText are the tensors of the checkpoints that they were made of.

How these trainers have parameters is written down here a second time, from a checkpoint to them:
as their own conversions go (tunix/models/qwen3/params.py, MaxText's param_mapping.py).
"""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engines import build_tiny, run, tokens
from rollouts_kit import GREEDY
from safetensors.numpy import load_file

from shiftjax.rollouts.trainer_trees_device import in_checkpoint_names
from shiftjax.weights.errors import CheckpointError
from shiftjax.weights.hf_config import parse_config
from shiftjax.weights.typed_fields import read_json

PARITY = Path(__file__).parent.parent / "data" / "parity"
FAMILIES = ["llama", "qwen2", "qwen3", "qwen3_moe"]


def of_family(name: str):
    data = read_json(PARITY / name / "config.json")
    config = parse_config(data, name, "config.json")
    return config, load_file(PARITY / name / "model.safetensors")


def nested(flat: dict) -> dict:
    """As pytrees of modules are: dictionaries in dictionaries."""
    tree: dict = {}
    for name, array in flat.items():
        *path, last = name.split(".")
        place = tree
        for part in path:
            place = place.setdefault(part, {})
        place[last] = array
    return tree


def layer_of(config, tensors, layer: int) -> dict[str, np.ndarray]:
    """A layer as both trainers have it, by short names: turned, heads and experts apart."""
    at, heads = f"model.layers.{layer}.", {"q": config.num_heads}
    own = {n.removeprefix(at): x for n, x in tensors.items() if n.startswith(at)}
    found = {one: own[f"{one}_layernorm.weight"] for one in ("input", "post_attention")}
    for one in "qkv":
        x, num = own[f"self_attn.{one}_proj.weight"], heads.get(one, config.num_kv_heads)
        found[one] = x.T.reshape(-1, num, config.head_dim)
        for kind, name in (("bias", f"{one}_proj.bias"), ("norm", f"{one}_norm.weight")):
            if (x := own.get(f"self_attn.{name}")) is not None:
                found[f"{one}_{kind}"] = x
    o = own["self_attn.o_proj.weight"]
    found["o"] = o.T.reshape(-1, config.head_dim, len(o))
    if "mlp.gate.weight" in own:
        found["router"] = own["mlp.gate.weight"].T
    for one in ("gate", "up", "down"):
        if "router" in found:
            each = (own[f"mlp.experts.{e}.{one}_proj.weight"].T for e in range(config.experts.num))
            found[f"experts {one}"] = np.stack(list(each))
        else:
            found[one] = own[f"mlp.{one}_proj.weight"].T
    return found


TUNIX = {
    **{"input": "input_layernorm.w", "post_attention": "post_attention_layernorm.w"},
    **{one: f"attn.{one}_proj.w" for one in "qkvo"},
    **{f"{one}_bias": f"attn.{one}_bias" for one in "qkv"},
    **{f"{one}_norm": f"attn.{one}_norm.w" for one in "qk"},
    **{one: f"mlp.{one}_proj.kernel" for one in ("gate", "up", "down")},
    **{f"experts {one}": f"mlp.{one}_proj" for one in ("gate", "up", "down")},
    "router": "mlp.router.kernel",
}
WORDS = {"q": "query", "k": "key", "v": "value", "o": "out"}
MAXTEXT = {
    "input": "pre_self_attention_layer_norm.scale",
    "post_attention": "post_self_attention_layer_norm.scale",
    **{one: f"self_attention.{word}.kernel" for one, word in WORDS.items()},
    **{f"{one}_bias": f"self_attention.{WORDS[one]}.bias" for one in "qkv"},
    **{f"{one}_norm": f"self_attention.{WORDS[one]}_norm.scale" for one in "qk"},
    **{"gate": "mlp.wi_0.kernel", "up": "mlp.wi_1.kernel", "down": "mlp.wo.kernel"},
    "experts gate": "moe_block.wi_0",
    "experts up": "moe_block.wi_1",
    "experts down": "moe_block.wo",
    "router": "moe_block.gate.kernel",
}


def tunix(config, tensors) -> dict:
    flat = {
        "embedder.input_embedding": tensors["model.embed_tokens.weight"],
        "final_norm.w": tensors["model.norm.weight"],
    }
    if "lm_head.weight" in tensors:
        flat["lm_head.w"] = tensors["lm_head.weight"].T
    for layer in range(config.num_layers):
        own = layer_of(config, tensors, layer)
        flat |= {f"layers.{layer}.{TUNIX[name]}": x for name, x in own.items()}
    return nested(flat)


def neighbours(x: np.ndarray) -> np.ndarray:
    """Pairs half a head apart, side by side."""
    half = x.shape[-1] // 2
    return np.stack([x[..., :half], x[..., half:]], -1).reshape(x.shape)


def maxtext(config, tensors, *, scan: bool) -> dict:
    table = tensors["model.embed_tokens.weight"]
    flat = {
        "decoder.decoder_norm.scale": tensors["model.norm.weight"],
        "token_embedder.embedding": np.pad(table, ((0, 5), (0, 0))),  # vocabularies are padded
    }
    if "lm_head.weight" in tensors:
        flat["decoder.logits_dense.kernel"] = tensors["lm_head.weight"].T
    layers = [layer_of(config, tensors, layer) for layer in range(config.num_layers)]
    for own in layers if config.architecture == "llama" else ():
        own["q"] = neighbours(own["q"]) * np.float32(config.head_dim**-0.5)
        own["k"] = neighbours(own["k"])
    if scan:
        stacked = {name: np.stack([own[name] for own in layers], 1) for name in layers[0]}
        flat |= {f"decoder.layers.{MAXTEXT[name]}": x for name, x in stacked.items()}
    for layer, own in enumerate(() if scan else layers):
        flat |= {f"decoder.layers_{layer}.{MAXTEXT[name]}": x for name, x in own.items()}
    return {"params": {"params": nested(flat)}}


KINDS = {
    "tunix": tunix,
    "maxtext": lambda *given: maxtext(*given, scan=False),
    "maxtext, stacked": lambda *given: maxtext(*given, scan=True),
}


def flat_of(tree: dict, path: str = "") -> dict[str, np.ndarray]:
    found = {}
    for name, x in tree.items():
        found |= flat_of(x, f"{path}{name}.") if isinstance(x, dict) else {f"{path}{name}": x}
    return found


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", KINDS)
def test_every_tensor_is_that_of_the_checkpoint(kind, family):
    config, tensors = of_family(family)
    if family == "qwen3_moe" and "stacked" in kind:  # what is stacked is alike
        sparse, at = "model.layers.1.", "model.layers.{}."
        own = {n.removeprefix(sparse): x for n, x in tensors.items() if n.startswith(sparse)}
        tensors = {n: x for n, x in tensors.items() if "layers" not in n}
        for layer in range(config.num_layers):
            tensors |= {at.format(layer) + n: x + layer for n, x in own.items()}
    found = in_checkpoint_names(flat_of(KINDS[kind](config, tensors)), config)
    assert set(found) == set(tensors)
    for name, wanted in tensors.items():
        got = np.asarray(found[name])
        if config.architecture == "llama" and "q_proj" in name and kind != "tunix":
            np.testing.assert_allclose(got, wanted, rtol=3e-7, err_msg=name)  # scaled twice
        else:
            np.testing.assert_array_equal(got, wanted, err_msg=name)


@pytest.mark.costs(12)
def test_an_engine_takes_a_trainers_tree_of_arrays_on_devices():
    """Wrong weights first; what it says then is what transformers say."""
    config, tensors = of_family("qwen3")
    built = build_tiny(PARITY / "qwen3", sp=2, tp=2)
    data = np.load(PARITY / "qwen3" / "expected.npz")
    prompt = data["token_ids_0"].tolist()
    before = tokens(run(built.engine, [prompt], [GREEDY])[0, 0])
    built.rollouts.update(nested({n: x * 1.5 for n, x in tensors.items()}), 0.0)
    assert tokens(run(built.engine, [prompt], [GREEDY])[0, 0]) != before
    tree = jax.tree.map(jnp.asarray, maxtext(config, tensors, scan=True))
    built.rollouts.update(tree, 0.0)
    assert tokens(run(built.engine, [prompt], [GREEDY])[0, 0]) == before


@pytest.mark.parametrize(
    ("family", "names", "words"),
    [
        ("qwen3", ["layers.0.attn.q_proj.w", "layers.0.attn.r_proj.w"], "expected no such tensor"),
        ("gemma2", ["layers.0.attn.q_proj.w"], "read for llama, qwen2, qwen3, qwen3_moe, not"),
    ],
)
def test_what_is_not_known_is_refused(family, names, words):
    config, _ = of_family(family)
    with pytest.raises(CheckpointError, match=words):
        in_checkpoint_names(dict.fromkeys(names, np.ones((2, 2, 2))), config)


def test_a_tree_of_a_checkpoints_names_stays_as_it_is():
    config, tensors = of_family("llama")
    assert in_checkpoint_names(tensors, config) is tensors

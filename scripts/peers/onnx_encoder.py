"""MiniLM in ONNX Runtime, with the fused operators that its own optimiser makes of BERT.

    pip install onnxruntime onnx tokenizers safetensors numpy

The graph is written here from the checkpoint: EmbedLayerNormalization, then per layer Attention,
MatMul, SkipLayerNormalization, MatMul, BiasGelu, MatMul, SkipLayerNormalization (contributed
operators, https://github.com/microsoft/onnxruntime/blob/main/docs/ContribOperators.md), then the
mean over real tokens, to length 1. Engines like fastembed run such a graph over padded batches.
"""

# pyright: reportMissingImports=false
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np

CONTRIBUTED = "com.microsoft"


def build(directory: Path) -> bytes:
    """The model of a directory: ids and mask `[texts, length]` int32 to `[texts, hidden]`."""
    from onnx import TensorProto, helper, numpy_helper
    from safetensors.numpy import load_file

    config = json.loads((directory / "config.json").read_text())
    tensors, nodes, constants = load_file(directory / "model.safetensors"), [], []

    def constant(name: str, value: np.ndarray) -> str:
        constants.append(numpy_helper.from_array(np.ascontiguousarray(value), name))
        return name

    def tensor(name: str) -> str:
        value = tensors[name]
        return constant(name, value.T if name.endswith("dense.weight") else value)

    def node(kind: str, inputs: list[str], output: str, domain: str = "", **attributes) -> str:
        nodes.append(helper.make_node(kind, inputs, [output], domain=domain, **attributes))
        return output

    def norm(name: str) -> list[str]:
        return [tensor(f"{name}.LayerNorm.weight"), tensor(f"{name}.LayerNorm.bias")]

    def dense(name: str, x: str) -> str:
        return node("MatMul", [x, tensor(f"{name}.dense.weight")], f"{name}.product")

    def add_and_norm(name: str, x: str) -> str:
        inputs = [dense(name, x), skips[-1], *norm(name), tensor(f"{name}.dense.bias")]
        skips.append(node("SkipLayerNormalization", inputs, name, CONTRIBUTED, epsilon=epsilon))
        return name

    epsilon = config["layer_norm_eps"]
    words = tensors["embeddings.word_embeddings.weight"]
    words = constant("words", words + tensors["embeddings.token_type_embeddings.weight"][0])
    positions = tensor("embeddings.position_embeddings.weight")
    inputs = ["ids", "", words, positions, "", *norm("embeddings"), "mask"]
    outputs = ["embedded", "lengths"]
    nodes.append(
        helper.make_node(
            "EmbedLayerNormalization", inputs, outputs, domain=CONTRIBUTED, epsilon=epsilon
        )
    )
    skips = ["embedded"]
    for index in range(config["num_hidden_layers"]):
        layer = f"encoder.layer.{index}"
        parts = [f"{layer}.attention.self.{part}" for part in ("query", "key", "value")]
        weight = np.concatenate([tensors[f"{part}.weight"].T for part in parts], 1)
        bias = np.concatenate([tensors[f"{part}.bias"] for part in parts])
        qkv = [constant(f"{layer}.weight", weight), constant(f"{layer}.bias", bias)]
        heads, name = config["num_attention_heads"], f"{layer}.attention"
        inputs = [skips[-1], *qkv, "mask"]
        seen = node("Attention", inputs, name, CONTRIBUTED, num_heads=heads)
        x = add_and_norm(f"{layer}.attention.output", seen)
        up = f"{layer}.intermediate"
        inputs = [dense(up, x), tensor(f"{up}.dense.bias")]
        add_and_norm(f"{layer}.output", node("BiasGelu", inputs, f"{up}.gelu", CONTRIBUTED))
    axis = {"last": np.array([-1]), "tokens": np.array([1])}
    last, tokens = (constant(name, value) for name, value in axis.items())
    weights = node("Cast", ["mask"], "weights", to=TensorProto.FLOAT)
    real = node("Mul", [skips[-1], node("Unsqueeze", [weights, last], "column")], "real")
    total = node("ReduceSum", [real, tokens], "total", keepdims=0)
    node("LpNormalization", [total], "embeddings", axis=-1, p=2)
    value, ints, floats = helper.make_tensor_value_info, TensorProto.INT32, TensorProto.FLOAT
    shape = ["texts", "length"]
    graph = helper.make_graph(
        nodes,
        "encoder",
        [value("ids", ints, shape), value("mask", ints, shape)],
        [value("embeddings", floats, ["texts", config["hidden_size"]])],
        constants,
    )
    imports = [helper.make_opsetid("", 17), helper.make_opsetid(CONTRIBUTED, 1)]
    return helper.make_model(graph, opset_imports=imports, ir_version=8).SerializeToString()


def encoder(directory: Path) -> tuple[Callable, Callable]:
    """Return what makes ids of texts, and what embeds a batch of ids, on one thread."""
    import onnxruntime
    from tokenizers import Tokenizer

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    session = onnxruntime.InferenceSession(
        build(directory), options, providers=["CPUExecutionProvider"]
    )
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    tokenizer.enable_truncation(256)
    tokenizer.no_padding()

    def embed(some: list[list[int]]) -> np.ndarray:
        lengths = np.array([len(ids) for ids in some])[:, None]
        mask = (np.arange(lengths.max()) < lengths).astype(np.int32)
        ids = np.zeros_like(mask)
        ids[mask == 1] = np.concatenate(some)
        return session.run(["embeddings"], {"ids": ids, "mask": mask})[0]

    return lambda texts: [each.ids for each in tokenizer.encode_batch(texts)], embed

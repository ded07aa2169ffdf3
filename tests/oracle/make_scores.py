"""Write `tests/data/encoders/*-scores`: what transformers' heads make of texts and pairs of texts.

Both the script and the record of the oracle. It runs in an environment with torch and
transformers, which the project itself never needs:

    python tests/oracle/make_scores.py [tests/data/encoders]

Each is a tiny random model of a class `...ForSequenceClassification`, every parameter drawn
(`make_parity.py` says why): `config.json`, `model.safetensors`, `tokenizer.json`, and `scores.json`
with texts, pairs, their token ids and types, and the logits of each, in float32.
"""

import json
import sys
from pathlib import Path

import tokenizers
import torch
import transformers
from tokenizers import models, pre_tokenizers, processors

SEED = 20261125
COMMON = {
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
}
WORDS = [
    "a",
    "mode",
    "says",
    "how",
    "many",
    "ways",
    "step",
    "splits",
    "its",
    "tokens",
    "shift",
    "base",
    "query",
    "document",
    "about",
]
MODELS = {
    "bert-scores": ("bert", {"max_position_embeddings": 40, "num_labels": 1}),
    "xlm-roberta-scores": (
        "xlm-roberta",
        {
            "max_position_embeddings": 42,
            "type_vocab_size": 1,
            "layer_norm_eps": 1e-5,
            "id2label": {0: "contradiction", 1: "entailment", 2: "neutral"},
        },
    ),
}
MODELS["qwen3-scores"] = (
    "qwen3",
    {"num_key_value_heads": 1, "head_dim": 8, "num_labels": 1, "max_position_embeddings": 64},
)
TEXTS = ["a mode says how many ways", "shift", "base query unknown"]
PAIRS = [
    ["how many tokens", "a step splits its tokens"],
    ["query", "document about mode a mode a base"],
    ["a", "a"],
]


def tokenizer_of(kind: str) -> tokenizers.Tokenizer:
    """Words, between the special tokens that the kind has."""
    marks = {
        "bert": ("[PAD]", "[CLS]", "[SEP]"),
        "xlm-roberta": ("<s>", "<pad>", "</s>"),
        "qwen3": ("<|endoftext|>",),
    }[kind]
    vocab = {word: index for index, word in enumerate([*marks, "[UNK]", *WORDS])}
    backend = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens(list(marks))
    if kind == "bert":
        first, last = ("[CLS]", vocab["[CLS]"]), ("[SEP]", vocab["[SEP]"])
        backend.post_processor = processors.BertProcessing(last, first)
    elif kind == "xlm-roberta":
        first, last = ("<s>", vocab["<s>"]), ("</s>", vocab["</s>"])
        backend.post_processor = processors.RobertaProcessing(
            last, first, trim_offsets=False, add_prefix_space=False
        )
    return backend


def build(kind: str, settings: dict, vocab: int, generator: torch.Generator) -> torch.nn.Module:
    """Make one model and draw all of its parameters."""
    config = transformers.AutoConfig.for_model(kind, vocab_size=vocab, **(COMMON | settings))
    config.dtype = torch.float32
    model = transformers.AutoModelForSequenceClassification.from_config(
        config, attn_implementation="eager"
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            x = torch.randn(parameter.shape, generator=generator)
            is_norm = name.endswith(("LayerNorm.weight", "norm.weight"))
            small = 0.3 if name.endswith(".bias") or is_norm else parameter.shape[-1] ** -0.5
            parameter.copy_(small * x + float(is_norm))
    return model.eval()


def write(directory: Path, name: str) -> None:
    """Write the folder of one model."""
    kind, settings = MODELS[name]
    generator = torch.Generator().manual_seed(SEED + list(MODELS).index(name))
    backend = tokenizer_of(kind)
    model = build(kind, settings, backend.get_vocab_size(), generator)
    model.save_pretrained(directory / name)
    backend.save(str(directory / name / "tokenizer.json"))
    cases = []
    for given in [*TEXTS, *map(tuple, PAIRS)]:
        encoded = backend.encode(*([given] if isinstance(given, str) else given))
        types = {"token_type_ids": torch.tensor([encoded.type_ids])} if kind == "bert" else {}
        logits = model(input_ids=torch.tensor([encoded.ids]), **types).logits[0]
        cases.append(
            {
                "input": given,
                "token_ids": encoded.ids,
                "type_ids": encoded.type_ids,
                "logits": [float(f"{x:.9g}") for x in logits.tolist()],
            }
        )
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    text = json.dumps({"made_by": versions, "cases": cases})
    (directory / name / "scores.json").write_text(text.replace("}, {", "},\n{") + "\n")


def main() -> None:
    """Write everything."""
    default = Path(__file__).parent.parent / "data" / "encoders"
    directory = Path(sys.argv[1]) if len(sys.argv) > 1 else default
    with torch.inference_mode():
        for name in MODELS:
            write(directory, name)


if __name__ == "__main__":
    main()

"""Mutants of reading checkpoints of other families: configurations, GGUF, what layers compute."""

from mutant import Mutant

DEFAULTS, LAYERS = (f"shiftjax/weights/{name}.py" for name in ("hf_defaults", "hf_layers"))
FAMILY, GGUF = (f"shiftjax/weights/{name}.py" for name in ("family_config", "gguf_families"))
LLAMA, EXPERTS = (f"shiftjax/models/{name}.py" for name in ("llama", "experts"))
TEST_ABSENT = "tests/weights/test_absent_fields.py"
TEST_GGUF = "tests/weights/test_gguf_families.py"
TEST_PARITY = "tests/models/test_parity.py"

# fmt: off
ROWS = (
    Mutant(
        "a null is no default", "configs", DEFAULTS,
        "if not (v is None and n in self.null and n != ROPE)", "",
        (TEST_ABSENT,), "GLM never stops",
    ),
    Mutant(
        "aliases of fields are unknown", "configs", DEFAULTS,
        "self.aliases.get(name, name): data[name]", "name: data[name]",
        ("tests/weights/test_experts_loading.py",),
        "a model has 128 experts where its file says 8",
    ),
    Mutant(
        "a file without rotary parameters is not stretched", "configs", LAYERS,
        "inner = _inner(fields, parameters or _stretched(architecture))\n    owner",
        "inner = _inner(fields, parameters)\n    owner",
        (TEST_ABSENT,), "gpt-oss reads no context beyond 4,096 tokens",
    ),
    Mutant(
        "layers that see everything are rotated", "configs", LAYERS,
        "return has_window  # what", "return [True] * len(has_window)  # what",
        (TEST_GGUF,), "EXAONE 4 and Cohere 2 are other models",
    ),
    Mutant(
        "windows of Qwen2-MoE begin late", "configs", LAYERS,
        "i < last and i % 2 == 0", "i >= last and i % 2 == 0",
        (TEST_ABSENT,), "layers see other keys than they were trained with",
    ),
    Mutant(
        "Gemma 3 has a soft cap of scores", "configs", FAMILY,
        'caps.pop("attention_soft_cap", None)', "pass",
        ("tests/weights/test_hf_config.py",), "scores are capped that transformers does not cap",
    ),
    Mutant(
        "chunks of Llama 4 slide", "configs", LAYERS,
        "return LayerKind(reach, theta, scaling, chunk=chunk)",
        "return LayerKind(chunk or reach, theta, scaling)",
        (TEST_PARITY,), "tokens of other chunks are seen",
    ),
    Mutant(
        "queries of Llama 4 grow in rotary layers, too", "configs", "shiftjax/arch/config.py",
        "if growth is not None and growth.in_rotary != kind.has_rope:", "if False:",
        (TEST_PARITY,), "late tokens of rotary layers look too sharply",
    ),
    Mutant(
        "queries of Llama 4 grow a token late", "configs", "shiftjax/models/layers.py",
        "times = (positions + growth.first) // growth.context",
        "times = positions // growth.context",
        (TEST_PARITY,), "the last token of every step of growth is of the one before",
    ),
    Mutant(
        "longrope is of the longest context", "configs", "shiftjax/deploy/resolve.py",
        "with_freed_blocks(config, served_within(model, longest), longest)",
        "with_freed_blocks(config, model, longest)",
        ("tests/models/test_longrope.py",), "short contexts take the long factors",
    ),
    Mutant(
        "a GPU has the steps of a CPU", "configs", "shiftjax/sim/modelled.py",
        "self.machine.shared_cores > 0", "True",
        ("tests/sim/test_own_settings.py",), "a server on GPUs has steps of 1,024 tokens",
    ),
    Mutant(
        "sequences are more than a step has tokens", "configs", "shiftjax/deploy/budgets.py",
        "min(suited.max_num_seqs, tokens)", "suited.max_num_seqs",
        ("tests/deploy/test_budgets.py",), "a small step alone is refused",
    ),
    Mutant(
        "an expert's weight is of what it gives", "configs", EXPERTS,
        "x, gains = _times(x, gains), jnp.ones_like(gains)", "pass",
        (TEST_PARITY,), "Llama 4's experts read tokens of another size",
    ),
    Mutant(
        "the MLP reads what attention has added", "configs", LLAMA,
        "if config.parallel_block:", "if False:",
        (TEST_GGUF,), "Command R is another model",
    ),
    Mutant(
        "queries grow from the first position on", "configs", "shiftjax/models/layers.py",
        "(positions + growth.first) // growth.context",
        "(positions + growth.first) / growth.context",
        (TEST_PARITY,), "Ministral 3 is another model",
    ),
    Mutant(
        "residuals are added whole", "configs", "shiftjax/models/layers.py",
        "stream.whole(reduce, config.residual_scale)",
        "stream.whole(reduce)",
        (TEST_GGUF,), "Granite is another model",
    ),
    Mutant(
        "norms of Gemma in GGUF keep their 1", "configs", GGUF,
        'GgufFamily("gemma2", adds_one=True)', 'GgufFamily("gemma2")',
        (TEST_GGUF,), "Gemma 2 multiplies by 2 and more",
    ),
    Mutant(
        "heads of Granite in GGUF are taken as they lie", "configs", GGUF,
        'GgufFamily("granite", is_permuted=True)', 'GgufFamily("granite")',
        (TEST_GGUF,), "rotary embeddings turn other pairs",
    ),
)

"""Mutants of models whose layers have heads of several shapes: Gemma 4."""

from mutant import Mutant

LAYOUT = "shiftjax/parallel/layout.py"
LLAMA = "shiftjax/models/llama.py"
COPIES = "shiftjax/host_tier/copies_device.py"
CONFIG = "shiftjax/weights/gemma4_config.py"
PARITY = "tests/models/test_parity.py"
GEMMA4 = "tests/models/test_gemma4.py"
ABSENT = "tests/weights/test_absent_fields.py"

# fmt: off
ROWS = (
    Mutant(
        "all heads are split as the first ones", "heads", LAYOUT,
        "return self.shapes[heads], name", "return self, name",
        (PARITY,), "layers that see everything have other rows of their weights",
    ),
    Mutant(
        "values are not normed", "heads", LLAMA,
        "v = unit_norm(v, self.config.rms_norm_eps)", "pass",
        (PARITY,), "Gemma 4 is another model",
    ),
    Mutant(
        "values are keys that are normed and rotated", "heads", LLAMA,
        "return parallel.scatter_heads(q, k, v)",
        "v = k if self.kind.keys_are_values else v\n"
        "        return parallel.scatter_heads(q, k, v)",
        (PARITY,), "Gemma 4 31B is another model",
    ),
    Mutant(
        "all frequencies turn", "heads", "shiftjax/arch/rotary.py",
        "* (i < turning)", "",
        (PARITY,), "layers that see everything rotate whole heads",
    ),
    Mutant(
        "extents of all shapes are one", "heads", COPIES,
        "Alike(cache.heads, alike)", "Alike(0, alike)",
        (GEMMA4,), "a swapped sequence comes back with another layer's keys",
    ),
    Mutant(
        "other layers have their number of KV heads always", "heads", CONFIG,
        'has_own = fields.flag("attention_k_eq_v")', "has_own = True",
        (ABSENT,), "a file means other weights than in transformers",
    ),
    Mutant(
        "layers read the cache of the first of their kind", "heads", "shiftjax/arch/config.py",
        "for layer, kind in enumerate(kinds[:first])}  # the last of each",
        "for layer, kind in reversed(list(enumerate(kinds[:first])))}",
        (PARITY, GEMMA4), "Gemma 4 E2B is another model",
    ),
    Mutant(
        "inputs of layers are those of the layer before", "heads", "shiftjax/models/gemma4.py",
        "return [both[:, layer] for", "return [both[:, layer - 1] for",
        (PARITY, GEMMA4), "Gemma 4 E2B is another model",
    ),
    Mutant(
        "experts read what the MLP reads", "heads", "shiftjax/models/gemma4.py",
        "self._experts(residual, layer,", "self._experts(x, layer,",
        (PARITY, GEMMA4), "Gemma 4 26B-A4B is another model",
    ),
    Mutant(
        "experts weigh as their logits say", "heads", "shiftjax/models/experts.py",
        "gains if self.scales is None else gains * self.scales[chosen]", "gains",
        (PARITY, GEMMA4), "Gemma 4 26B-A4B is another model",
    ),
    Mutant(
        "tensors that no layer reads are refused", "heads", "shiftjax/weights/hf_names.py",
        "found is not None and num > 0 and", "found is not None and num < 0 and",
        ("tests/weights/test_hf_names.py",), "published checkpoints of E2B do not load",
    ),
    Mutant(
        "blocks of a fleet may have two sizes", "heads", "shiftjax/deploy/resolve.py",
        "if len(times) > 1:", "if len(times) > 2:",
        ("tests/deploy/test_head_shapes.py",), "blocks that move lose tokens of some layers",
    ),
)

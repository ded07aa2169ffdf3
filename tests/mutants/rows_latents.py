"""Mutants of latent attention: DeepSeek-V2 and V3, Kimi K2, GLM-5."""

from mutant import Mutant

MLA = "shiftjax/models/mla.py"
LATENT = "shiftjax/arch/latent.py"
CONFIG = "shiftjax/weights/latent_config.py"
PARITY = "tests/models/test_parity.py"
MODELS = "tests/device/test_latent_models.py"
HF_CONFIG = "tests/weights/test_hf_config.py"
ROUTES = "tests/models/test_experts.py"

# fmt: off
ROWS = (
    Mutant(
        "values in latents have a scale of their own", "latents", "shiftjax/arch/weights.py",
        'sides = "kv" if config.latent is None else "kk"', 'sides = "kv"',
        ("tests/device/test_latent_codes.py",), "what latents sum is in other units",
    ),
    Mutant(
        "scales of latents are forgotten", "latents", MLA,
        "None if scales is None else scales[...].T", "None",
        ("tests/device/test_latent_codes.py",), "most of them are beyond the largest code",
    ),
    Mutant(
        "latents are normed as hidden states are", "latents", MLA,
        "normed = rms_norm(down[:, :rank], self.kv_norm[...], EPSILON)",
        "normed = rms_norm(down[:, :rank], self.kv_norm[...], self.config.rms_norm_eps)",
        (PARITY,), "Kimi K2 and GLM-5 are other models",
    ),
    Mutant(
        "narrow queries are normed as hidden states are", "latents", MLA,
        "self.q_norm[...], EPSILON)", "self.q_norm[...], self.config.rms_norm_eps)",
        (PARITY,), "Kimi K2 and GLM-5 are other models",
    ),
    Mutant(
        "the gain of yarn counts once", "latents", LATENT,
        "self.query_dim**-0.5 * gain**2", "self.query_dim**-0.5 * gain",
        (PARITY, HF_CONFIG), "DeepSeek-V3 is another model beyond its first context, and within",
    ),
    Mutant(
        "scores are those of cached rows", "latents", LATENT,
        "self.query_dim**-0.5 * gain**2", "self.width**-0.5 * gain**2",
        (PARITY, HF_CONFIG), "all models with latents are others",
    ),
    Mutant(
        "neighbours are always rotated", "latents", CONFIG,
        'found["rope_interleaved"] = fields.flag("rope_interleave")',
        'found["rope_interleaved"] = True',
        (PARITY,), "files that say otherwise are read as another model",
    ),
    Mutant(
        "what makes keys and values becomes codes", "latents", "shiftjax/arch/weights.py",
        'f"{source}.weight", "latent_up")', 'f"{source}.weight")',
        (MODELS,), "codes are multiplied as if they were numbers",
    ),
    Mutant(
        "softmax ranks groups by their two best", "latents", "shiftjax/models/experts.py",
        "_of_best_groups(logits, experts, 1)", "_of_best_groups(logits, experts, 2)",
        (ROUTES, PARITY), "DeepSeek-V2 is another model",
    ),
    Mutant(
        "weights of softmax have no scale", "latents", "shiftjax/models/experts.py",
        "gains if experts.scale == 1 else gains * experts.scale, chosen", "gains, chosen",
        (ROUTES, PARITY), "DeepSeek-V2 is another model",
    ),
    Mutant(
        "blocks of o are as wide as cached rows", "latents", "shiftjax/parallel/layout.py",
        "q_per_kv, model.value_dim)", "q_per_kv, model.head_dim)",
        (MODELS,), "o cannot be stored as codes",
    ),
    Mutant(
        "contexts beyond an indexer's choice are served", "latents", "shiftjax/arch/contexts.py",
        "wanted > most", "False",
        ("tests/arch/test_contexts.py",), "GLM-5 attends to all, and answers otherwise, unasked",
    ),
)
# fmt: on

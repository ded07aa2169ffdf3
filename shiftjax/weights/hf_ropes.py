"""How rotary frequencies are stretched: the kinds of `rope_type` in `config.json`, and back."""

import math
from typing import Any

from shiftjax.arch.config import RopeScaling
from shiftjax.weights.gemma4_config import GEMMA4
from shiftjax.weights.typed_fields import Fields


def scaling_of(
    fields: Fields, inner: Fields, architecture: str, rotary_dim: int
) -> RopeScaling | None:
    """Return the scaling that rotary parameters say; None: there is none, or a problem."""
    kind = inner.data.get("rope_type", inner.data.get("type", "default"))
    if kind == "su" or (kind == "yarn" and architecture == "phi3"):  # as Phi-3's first files say
        kind = "longrope"
    if kind == "default":
        return None
    own = _OF_GEMMA4 if architecture in GEMMA4 else _KINDS
    if kind in own:
        return own[kind](fields, inner, rotary_dim)
    *others, last = ("default", *own)
    inner.problem(
        f"rope_type must be {', '.join(others)} or {last}, found {kind!r}; leave the field out to "
        "use the model up to the context that it was trained with"
    )
    return None


def _linear(fields: Fields, inner: Fields, rotary_dim: int) -> RopeScaling:
    return RopeScaling("linear", inner.positive("factor"))


def _proportional(fields: Fields, inner: Fields, rotary_dim: int) -> RopeScaling:
    part = inner.positive("partial_rotary_factor", 1.0)
    return RopeScaling("proportional", inner.positive("factor", 1.0), part=part)


def _llama3(fields: Fields, inner: Fields, rotary_dim: int) -> RopeScaling:
    low, high = inner.positive("low_freq_factor"), inner.positive("high_freq_factor")
    if high < low and not inner.problems:  # equal ones blend nothing (Llama 4 Scout)
        inner.problem(f"high_freq_factor {high} must be {low} at least, as low_freq_factor is")
    return RopeScaling("llama3", inner.positive("factor"), low, high, original_of(fields, inner))


def original_of(fields: Fields, inner: Fields) -> int:
    """Return the context that the model was trained with first."""
    name = "original_max_position_embeddings"
    owner = fields if fields.has(name) else inner
    return owner.count(name, fields.count("max_position_embeddings"))


def _yarn(fields: Fields, inner: Fields, rotary_dim: int) -> RopeScaling:
    """Scaling of arXiv 2309.00071; `attention_factor` as there, or by DeepSeek's two `mscale`."""
    original = original_of(fields, inner)
    factor = inner.positive("factor", fields.count("max_position_embeddings") / original)
    low, high = inner.positive("beta_slow", 1.0), inner.positive("beta_fast", 32.0)

    def gain(scale: float) -> float:
        return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0

    usual = gain(1.0)
    if inner.has("mscale") and inner.has("mscale_all_dim"):
        usual = gain(inner.positive("mscale")) / gain(inner.positive("mscale_all_dim"))
    gain_of_file = inner.positive("attention_factor", usual)
    truncate = inner.flag("truncate") if inner.has("truncate") else True
    return RopeScaling("yarn", factor, low, high, original, gain_of_file, truncate)


def _longrope(fields: Fields, inner: Fields, rotary_dim: int) -> RopeScaling:
    """Scaling of arXiv 2402.13753, a divisor for each frequency."""
    original = original_of(fields, inner)
    factor = inner.positive("factor", fields.count("max_position_embeddings") / original)
    usual = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 < original else 1.0
    gain = inner.positive("attention_factor", usual)
    short, long = (
        _divisors(inner, f"{kind}_factor", rotary_dim // 2) for kind in ("short", "long")
    )
    return RopeScaling("longrope", factor, 1.0, 4.0, original, gain, True, short, long)


def _divisors(fields: Fields, name: str, count: int) -> tuple[float, ...]:
    values = fields.data.get(name)
    is_list = isinstance(values, list) and all(type(v) in (int, float) and v > 0 for v in values)
    if not isinstance(values, list) or not is_list or len(values) != count:
        fields.problem(f"{name} must be a list of {count} numbers above 0")
        return (1.0,) * count
    return tuple(map(float, values))


_KINDS = {"linear": _linear, "llama3": _llama3, "yarn": _yarn, "longrope": _longrope}
_OF_GEMMA4 = {"proportional": _proportional}


def scaling_json(scaling: RopeScaling | None) -> dict[str, Any] | None:
    """Return the rotary parameters from which `scaling_of` makes the same."""
    if scaling is None:
        return None
    data: dict[str, Any] = {"rope_type": scaling.kind, "factor": scaling.factor}
    if scaling.kind == "linear":
        return data
    if scaling.kind == "proportional":
        return data | {"partial_rotary_factor": scaling.part}
    data["original_max_position_embeddings"] = scaling.original_max_position_embeddings
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    if scaling.kind == "llama3":
        return data | {"low_freq_factor": low, "high_freq_factor": high}
    data["attention_factor"] = scaling.attention_factor
    if scaling.kind == "yarn":
        return data | {"beta_slow": low, "beta_fast": high, "truncate": scaling.truncate}
    factors = {"short_factor": scaling.short_factors, "long_factor": scaling.long_factors}
    return data | {name: list(values) for name, values in factors.items()}

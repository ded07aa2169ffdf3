"""How the layers of a Hugging Face model attend: windows and rotary embeddings of `config.json`.

Which layers have a window is a list (`layer_types`), a pattern, or said by the architecture; rotary
embeddings are `rope_parameters` (transformers 5, by kind of layer where there are two) or the older
`rope_scaling`, `rope_theta` and `rope_local_base_freq`.
"""

from collections.abc import Mapping
from typing import Any

from shiftjax.arch.config import LayerKind, ModelConfig, QueryGrowth, RopeScaling
from shiftjax.weights.gemma4_config import GEMMA4, with_heads
from shiftjax.weights.hf_defaults import ROPE, defaults_of
from shiftjax.weights.hf_ropes import original_of, scaling_json, scaling_of
from shiftjax.weights.latent_config import LATENT, with_mscale
from shiftjax.weights.typed_fields import Fields

_PLAIN = ("rope_theta", "partial_rotary_factor")  # what older files have outside
_LISTED_ROPES = ("smollm3", "llama4_text")
_GROWTH = "llama_4_scaling_beta"
FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"
_ALL_SLIDE = ("mistral", "ministral3", "mixtral", "phi3")
_QWEN = ("qwen2", "qwen3", "qwen2_moe", "qwen3_moe")
_MAY_SLIDE = (*_QWEN, "smollm3")  # where `use_sliding_window` says so
# Every such layer sees everything; of some a file says which.
_PATTERNS = {"gemma2": 2, "gpt_oss": 2, "olmo3": 4, **dict.fromkeys(GEMMA4, 6)}
_OWN_PATTERNS = {"gemma3_text": 6, "exaone4": 4, "cohere2": 4}
_ALTERNATE = (*_PATTERNS, *_OWN_PATTERNS)
_PARTIAL = ("phi3", "glm", "glm4", "glm4_moe", "minimax_m2")  # rotate a part of a head
_LOCAL_ROPES = ("gemma3_text", "olmo3", *GEMMA4)  # layers with a window have another one

Rope = tuple[float, RopeScaling | None]


def read_layers(fields: Fields, architecture: str, head_dim: int) -> dict[str, Any]:
    """Return the fields of ModelConfig that say how layers attend; problems go to `fields`."""
    full, rotary_dim = _rope(fields, architecture, head_dim)
    sliding = _local_rope(fields, architecture, full)
    window = _window(fields, architecture)
    num_layers = fields.count("num_hidden_layers")
    may_slide = _may_slide(fields, architecture, num_layers)
    has_window = [each and window is not None for each in may_slide]
    has_rope = _have_rope(fields, architecture, has_window, window)
    chunks = _chunks(fields, architecture, has_rope)

    def kind(slides: bool, rotates: bool, chunk: int | None) -> LayerKind:
        reach = window if slides else None
        theta, scaling = sliding if slides else full
        if not rotates:
            return LayerKind(reach, has_rope=False, chunk=chunk)
        return LayerKind(reach, theta, scaling, chunk=chunk)

    kinds = [kind(*each) for each in zip(has_window, has_rope, chunks, strict=True)]
    if architecture in GEMMA4:
        kinds = with_heads(fields, kinds)
    growth = _query_growth(fields, architecture)
    return {"rotary_dim": rotary_dim, **growth, **kinds_as_fields(kinds)}


def kinds_as_fields(kinds: list[LayerKind]) -> dict[str, Any]:
    """Return how layers attend as ModelConfig says it: alike, or in the shortest repeated list."""
    if len(set(kinds)) == 1:
        (kind,) = set(kinds)
        if not kind.has_rope or kind.chunk:
            return {"layer_kinds": (kind,)}
        return {
            "sliding_window": kind.sliding_window,
            "rope_theta": kind.rope_theta,
            "rope_scaling": kind.rope_scaling,
        }
    lengths = range(2, len(kinds) + 1)
    period = next(n for n in lengths if all(k == kinds[i % n] for i, k in enumerate(kinds)))
    return {"layer_kinds": tuple(kinds[:period])}


def layers_json(config: ModelConfig) -> dict[str, Any]:
    """Return the fields of `config.json` that say it, in the layout of transformers 4."""
    sliding = [kind for kind in config.kinds if kind.sliding_window]
    full = [kind for kind in config.kinds if not kind.sliding_window] or sliding
    roped = [kind for kind in (*full, *sliding) if kind.has_rope] or full
    data: dict[str, Any] = {
        "rope_theta": roped[0].rope_theta,
        "rope_scaling": with_mscale(config, scaling_json(roped[0].rope_scaling)),
    }
    architecture = config.architecture
    if data["rope_scaling"] is None and _usual(architecture, FULL).get("rope_type") != "default":
        data["rope_scaling"] = {"rope_type": "default"}  # a null means more
    if architecture in _PARTIAL:
        data["partial_rotary_factor"] = (config.rotary_dim or config.head_dim) / config.head_dim
    growth = config.query_growth
    if growth is not None and growth.in_rotary:
        own = {_GROWTH: growth.beta, "original_max_position_embeddings": growth.context}
        data["rope_scaling"] = (data["rope_scaling"] or {"rope_type": "default"}) | own
    scaling = roped[0].rope_scaling
    if architecture == "phi3" and scaling is not None:  # whose class has a default of this
        data["original_max_position_embeddings"] = scaling.original_max_position_embeddings
    if architecture == "olmo3" and sliding:
        data[ROPE] = {SLIDING: {"rope_type": "default", "rope_theta": sliding[0].rope_theta}}
    if architecture in GEMMA4:  # which has no older layout
        ropes = {SLIDING if kind.sliding_window else FULL: kind for kind in roped}
        data = {ROPE: {name: _rope_json(kind) for name, kind in ropes.items()}}
    if architecture == "gemma3_text":
        data["rope_local_base_freq"] = (
            sliding[0].rope_theta if sliding else _local_theta(architecture)
        )
    if architecture in (*_ALL_SLIDE, *_MAY_SLIDE, *_ALTERNATE):
        data["sliding_window"] = sliding[0].sliding_window if sliding else None
    if architecture in _LISTED_ROPES:
        data["no_rope_layers"] = [int(kind.has_rope) for kind in config.kinds]
    if architecture in _MAY_SLIDE:
        data |= {"use_sliding_window": bool(sliding), "max_window_layers": 0}
    if architecture == "llama4_text":
        data |= _chunks_json(config)
    elif config.layer_kinds or architecture in (*_ALTERNATE, "qwen2_moe"):
        data["layer_types"] = [SLIDING if kind.sliding_window else FULL for kind in config.kinds]
    return data


def _window(fields: Fields, architecture: str) -> int | None:
    """Return the sliding window in tokens; None if no layer of the model has one."""
    if architecture in _MAY_SLIDE and not fields.flag("use_sliding_window"):
        return None
    if architecture not in (*_ALL_SLIDE, *_MAY_SLIDE, *_ALTERNATE):
        return None
    return fields.count("sliding_window") if fields.has("sliding_window") else None


def _may_slide(fields: Fields, architecture: str, num_layers: int) -> list[bool]:
    """Return, for each layer, whether it uses sliding-window attention, if there is a window."""
    if architecture in LATENT:  # `layer_types` say that an indexer chooses keys
        return [False] * num_layers
    kinds = fields.data.get("layer_types")
    if kinds is not None and architecture != "llama4_text":
        if not isinstance(kinds, list) or set(map(str, kinds)) - {FULL, SLIDING}:
            fields.problem(f"layer_types must be a list of {FULL} and {SLIDING}, found {kinds!r}")
        elif len(kinds) != num_layers and not fields.problems:
            fields.problem(f"layer_types must have {num_layers} entries, found {len(kinds)}")
        elif architecture == "qwen3_moe" and len(set(kinds)) > 1:
            fields.problem(f"layer_types must be alike in all layers of {architecture}")
        else:
            slide = [kind == SLIDING for kind in kinds]
            return [*slide[:-1], False] if architecture in GEMMA4 else slide  # as transformers
        return [False] * num_layers
    if architecture in GEMMA4:
        return [*_slide_by_default(fields, architecture, num_layers)[:-1], False]
    return _slide_by_default(fields, architecture, num_layers)


def _slide_by_default(fields: Fields, architecture: str, num_layers: int) -> list[bool]:
    """Return the same of a file that does not list its layers."""
    if architecture in _ALTERNATE:
        name = "sliding_window_pattern"
        name = name if fields.has(name) else f"_{name}"  # as transformers 4.52 and later write it
        own = _OWN_PATTERNS.get(architecture)
        every = fields.count(name, own) if own else _PATTERNS[architecture]
        return [(i + 1) % every != 0 for i in range(num_layers)]
    if architecture == "smollm3":
        return [not has_rope for has_rope in _listed_ropes(fields, num_layers)]
    if architecture not in _MAY_SLIDE or architecture == "qwen3_moe":
        return [True] * num_layers  # Qwen3-MoE's `max_window_layers` means nothing
    last = fields.count("max_window_layers", minimum=0)
    if architecture == "qwen2_moe":
        return [i < last and i % 2 == 0 for i in range(num_layers)]
    return [i >= last for i in range(num_layers)]


def _have_rope(
    fields: Fields, architecture: str, has_window: list[bool], window: int | None
) -> list[bool]:
    """Return, for each layer, whether it has rotary positions."""
    if architecture in _LISTED_ROPES:
        return _listed_ropes(fields, len(has_window))
    if architecture == "cohere2" or (architecture == "exaone4" and window is not None):
        return has_window  # what sees everything tells positions by its causal mask alone
    return [True] * len(has_window)


def _chunks(fields: Fields, architecture: str, has_rope: list[bool]) -> list[int | None]:
    """Return, for each layer, the tokens of the parts that contexts are cut into, if they are."""
    if architecture != "llama4_text":
        return [None] * len(has_rope)
    name = "attention_chunk_size"
    chunk = fields.count(name) if fields.has(name) else None
    kinds = fields.data.get("layer_types")
    if kinds is None:
        return [chunk if rotates else None for rotates in has_rope]
    if not isinstance(kinds, list) or set(map(str, kinds)) - {FULL, CHUNKED}:
        fields.problem(f"layer_types must be a list of {FULL} and {CHUNKED}, found {kinds!r}")
    elif len(kinds) != len(has_rope):
        if not fields.problems:
            fields.problem(f"layer_types must have {len(has_rope)} entries, found {len(kinds)}")
    elif CHUNKED in kinds and chunk is None:
        fields.problem(f"{name} is missing, and layers of {CHUNKED} need it")
    else:
        return [chunk if kind == CHUNKED else None for kind in kinds]
    return [None] * len(has_rope)


def _chunks_json(config: ModelConfig) -> dict[str, Any]:
    """Return what `config.json` of Llama 4 says of chunks, and of later queries."""
    growth, chunks = config.query_growth, [kind.chunk for kind in config.kinds]
    data: dict[str, Any] = {
        "attention_chunk_size": max(filter(None, chunks), default=None),
        "layer_types": [CHUNKED if chunk else FULL for chunk in chunks],
        "attn_temperature_tuning": growth is not None,
    }
    if growth is not None:
        data |= {"attn_scale": growth.beta, "floor_scale": growth.context}
    return data


def _listed_ropes(fields: Fields, num_layers: int) -> list[bool]:
    """Return what `no_rope_layers` says, which has 1 for a layer with rotary positions."""
    name = "no_rope_layers"
    listed = fields.data.get(name)
    if not listed:
        every = fields.count("no_rope_layer_interval")
        return [(i + 1) % every != 0 for i in range(num_layers)]
    if not isinstance(listed, list) or len(listed) < num_layers or set(listed) - {0, 1}:
        fields.problem(f"{name} must be a list of 0 or 1 for each layer, found {listed!r}")
        return [True] * num_layers
    return [bool(each) for each in listed[:num_layers]]


def _rope(fields: Fields, architecture: str, head_dim: int) -> tuple[Rope, int | None]:
    """Return the rotary embedding of layers that see everything, and the width that it has."""
    parameters = _parameters(fields, FULL)
    if parameters is None:
        return (1.0, None), None
    usual = defaults_of(architecture).theta or _usual(architecture, FULL)["rope_theta"]
    inner = _inner(fields, parameters or _stretched(architecture))
    owner = inner if inner.has("rope_theta") else fields
    theta = owner.positive("rope_theta", None if architecture in GEMMA4 else usual)
    rotary_dim = _rotary_dim(fields, inner, architecture, head_dim)
    return (theta, scaling_of(fields, inner, architecture, rotary_dim or head_dim)), rotary_dim


def _local_rope(fields: Fields, architecture: str, full: Rope) -> Rope:
    """Return that of layers with a window: some models' have one of their own."""
    if architecture not in _LOCAL_ROPES:
        return full
    own = (fields.data.get(ROPE) or {}).get(SLIDING) or {}
    inner = _inner(fields, own)
    if own.get("rope_type", "default") != "default":
        inner.problem(f"rope_type of {SLIDING} must be default, found {own['rope_type']!r}")
    if inner.has("rope_theta"):
        return inner.positive("rope_theta"), None
    if architecture in GEMMA4:
        return _local_theta(architecture), None
    name = "rope_theta" if architecture == "olmo3" else "rope_local_base_freq"
    return fields.positive(name, _local_theta(architecture)), None


def _usual(architecture: str, kind: str) -> Mapping[str, Any]:
    """Return the rotary parameters of a file without any, for layers of a kind."""
    rope = defaults_of(architecture).rope
    return rope.get(kind, rope)


def _stretched(architecture: str) -> dict[str, Any]:
    """Return those that are no part of older files outside of `rope_scaling`."""
    usual, theta = _usual(architecture, FULL), defaults_of(architecture).theta
    if architecture in GEMMA4:
        return dict(usual)
    own = {"rope_theta": usual["rope_theta"]} if theta not in (None, usual["rope_theta"]) else {}
    return {name: usual[name] for name in usual if name not in _PLAIN} | own


def _query_growth(fields: Fields, architecture: str) -> dict[str, Any]:
    """Return by how much queries grow with their positions."""
    if architecture == "llama4_text":
        if not fields.data.get("attn_temperature_tuning"):  # published files have a 4
            return {}
        growth = fields.positive("attn_scale"), fields.count("floor_scale")
        return {"query_growth": QueryGrowth(*growth, first=1, in_rotary=False)}
    parameters = _parameters(fields, FULL) if architecture == "ministral3" else {}
    inner = _inner(fields, parameters or _stretched(architecture))
    if architecture != "ministral3" or not inner.has(_GROWTH):
        return {}
    growth = QueryGrowth(inner.positive(_GROWTH), original_of(fields, inner))
    return {"query_growth": growth}


def _local_theta(architecture: str) -> float:
    return _usual(architecture, SLIDING)["rope_theta"]


def _parameters(fields: Fields, kind: str) -> dict[str, Any] | None:
    """Return the parameters of a kind of layers; None, and a problem, where they are none."""
    parameters, older = fields.data.get(ROPE) or {}, fields.data.get("rope_scaling") or {}
    if isinstance(parameters, dict) and {FULL, SLIDING} & parameters.keys():
        parameters = parameters.get(kind) or {}
    parameters = older or parameters  # transformers, too, prefers the older field
    if isinstance(parameters, dict):
        return parameters
    fields.problem(f"rope_scaling must be an object, found {parameters!r}")
    return None


def _inner(fields: Fields, parameters: dict[str, Any]) -> Fields:
    """Return typed access to rotary parameters, whose problems are those of the file."""
    inner = Fields(parameters, f"{fields.file}: rope_scaling")
    inner.problems = fields.problems
    return inner


def _rotary_dim(fields: Fields, inner: Fields, architecture: str, head_dim: int) -> int | None:
    name = "partial_rotary_factor"
    owner = inner if inner.has(name) else fields
    usual = _usual(architecture, FULL).get(name, 1.0)
    if architecture in GEMMA4:
        return None  # frequencies of the whole head, of which a part turns
    if architecture == "minimax_m2" and fields.has("rotary_dim"):  # as published files say it
        usual = fields.count("rotary_dim") / head_dim
    part = owner.positive(name, usual)
    if part != 1 and (architecture not in _PARTIAL or part > 1):
        owner.problem(f"{name} must be 1, found {part}")
    rotary_dim = int(head_dim * part)
    if rotary_dim % 2:
        owner.problem(f"{name} {part} of head_dim {head_dim} must be an even number of elements")
    return None if rotary_dim == head_dim else rotary_dim


def _rope_json(kind: LayerKind) -> dict[str, Any]:
    scaling = scaling_json(kind.rope_scaling) or {"rope_type": "default"}
    return {"rope_theta": kind.rope_theta} | scaling

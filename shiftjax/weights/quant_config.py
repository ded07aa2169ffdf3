"""`quantization_config` of checkpoints: which matrices are quantised, and into what.

Every method that is read is a row of `METHODS`, and says its matrices as a `Scheme`; `packed.py`
knows how the numbers of a scheme lie in files. Whatever else a file asks for is refused in words.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from shiftjax.arch.config import Codes, ModelConfig
from shiftjax.arch.weights import Weight, weights_of
from shiftjax.parallel.blocks import BLOCK, rows_of_scale
from shiftjax.parallel.four_bits import can_be_packed, num_inputs
from shiftjax.parallel.stored import can_be_codes
from shiftjax.weights.errors import CheckpointError
from shiftjax.weights.hf_names import stored_name
from shiftjax.weights.typed_fields import Fields, read_json

Kind = Literal["fp8", "fp8_blocks", "int8", "packed", "gptq", "awq", "mxfp4"]
FOUR_BITS = ("packed", "gptq", "awq", "mxfp4")  # kinds that may have them
FIELD = "quantization_config"
_MODELOPT_FILE = "hf_quant_config.json"  # of ModelOpt, beside a config.json that may say nothing
_HEAD = ("lm_head",)
_ALL = "Linear"  # the class of all matrices


@dataclass(frozen=True)
class Scheme:
    """What a matrix is quantised into: a kind of `packed.py`, and its numbers."""

    kind: Kind
    bits: int = 8
    group: int | None = None  # neighbouring inputs that share a scale; None: all of a channel
    block: tuple[int, int] = (1, 1)  # outputs and inputs that share a scale; of fp8_blocks
    has_zeros: bool = False  # there are zero points
    zero_offset: int = 0  # what is added to a stored zero point
    is_computed_with: bool = False  # inputs become codes, too: products are of codes
    has_input_scale: bool = False  # in units of a number of the checkpoint
    is_ordered: bool = False  # groups are of inputs that are no neighbours, as a tensor says
    is_symmetric: bool = False  # zero points are there, and all in the middle of the codes

    @property
    def format(self) -> str | None:
        """The four bits that devices can have of it; None: it is widened, or of eight bits."""
        if self.kind == "mxfp4":
            return "mxfp4"
        return "int4" if self.bits == 4 and not self.is_ordered else None


@dataclass(frozen=True)
class Method:
    """How a checkpoint is quantised: schemes by patterns, the first that fits, and exceptions."""

    name: str
    schemes: tuple[tuple[str, Scheme], ...]
    ignored: tuple[str, ...] = ()
    words: str = ""  # a warning: what it says that is not done

    def scheme_of(self, module: str) -> Scheme | None:
        """The scheme of a module (a tensor's name without `.weight`); None: it stays plain."""
        if any(_fits(pattern, module) for pattern in self.ignored):
            return None
        return next((each for pattern, each in self.schemes if _fits(pattern, module)), None)


def _fits(pattern: str, module: str) -> bool:
    """Whether a name, `re:` and an expression, a name with `*`, or a class means the module.

    A name means what is below it, too, and may leave out what is above it: `mlp.gate` is of
    every layer, and not its `mlp.gate_proj`.
    """
    if pattern == _ALL:
        return True
    if pattern.startswith("re:"):
        return re.match(pattern.removeprefix("re:"), module) is not None
    if "*" in pattern:
        expression = re.escape(pattern).replace(r"\*", ".*")
        return re.match(rf"{expression}(\.|$)", module) is not None
    return f".{pattern}." in f".{module}."


def read_method(directory: Path) -> Method | None:
    """How the checkpoint of a directory is quantised; None: it is not. Raises CheckpointError."""
    path = directory / "config.json"
    fields = Fields(with_modelopt(read_json(path), directory), str(path))
    method = parse_method(fields)
    fields.raise_problems()
    return method


def with_modelopt(data: dict[str, Any], directory: Path) -> dict[str, Any]:
    """A `config.json`, with what ModelOpt says in a file of its own where it says nothing."""
    path = directory / _MODELOPT_FILE
    if data.get(FIELD) is not None or not path.is_file():
        return data
    return data | {FIELD: {"quant_method": "modelopt"} | read_json(path)}


def parse_method(fields: Fields) -> Method | None:
    """How a `config.json` says that the checkpoint is quantised; problems are left in `fields`."""
    data = fields.data.get(FIELD)
    if data is None:
        return None
    inner = Fields(data if isinstance(data, dict) else {}, f"{fields.file}: {FIELD}")
    inner.problems = fields.problems
    name = inner.data.get("quant_method")
    if not isinstance(name, str) or name not in METHODS:
        known = ", ".join(METHODS)
        inner.problem(
            f"quant_method must be one of {known}, found {name!r}: use the unquantised checkpoint "
            "or a GGUF file"
        )
        return None
    method = METHODS[name](inner)
    for pattern in (*method.ignored, *(pattern for pattern, _ in method.schemes)):
        try:
            _ = _fits(pattern, "")
        except re.error as error:
            inner.problem(f"{pattern!r} is no regular expression: {error}")
    return method


def codes_of(method: Method | None, config: ModelConfig) -> Codes | None:
    """The layers' matrices that a checkpoint has as codes; None: it is as if it had none.

    E4m3, or else four bits of one kind: those that most matrices have.
    """
    if method is None:
        return None
    matrices = (each for each in weights_of(config) if can_be_codes(each))
    schemes = {each: scheme_of(method, config, each) for each in matrices}
    computed = {each: one for each, one in schemes.items() if one and one.is_computed_with}
    plain = tuple(_source(each) for each in schemes if each not in computed)
    if not computed:
        return _four_bits(schemes)
    kinds = {(one.kind, one.block) for one in computed.values()}
    rows = rows_of_scale(config) if kinds == {("fp8_blocks", (BLOCK, BLOCK))} else 0
    in_others = not rows and any(kind != "fp8" for kind, _ in kinds)
    fixed = [each for each, one in computed.items() if one.has_input_scale]
    stacked = [each for each in fixed if each.stacked or each.axes[0] == "experts"]
    if stacked or 0 < len(fixed) < len(computed):
        which = _source(stacked[0]) if stacked else "some matrices alone"
        raise CheckpointError(
            f"{config.name}: {FIELD}: static scales of the inputs of {which} are not supported; "
            "use a checkpoint with dynamic ones"
        )
    return Codes(plain, are_made_anew=in_others, have_input_scales=bool(fixed), rows_of_scale=rows)


def _four_bits(schemes: Mapping[Weight, Scheme | None]) -> Codes | None:
    """Return the codes of four bits that most matrices have; the others are plain to devices."""
    found = {each: _packed_as(each, scheme) for each, scheme in schemes.items()}
    counts = Counter(codes for codes in found.values() if codes)
    if not counts:
        return None
    [(codes, _)] = counts.most_common(1)
    possible = (each for each in found if can_be_codes(each, codes.format))
    return replace(codes, plain=tuple(_source(each) for each in possible if found[each] != codes))


def _packed_as(weight: Weight, scheme: Scheme | None) -> Codes | None:
    """Return what a matrix's codes of four bits are, if devices can have them."""
    if scheme is None or scheme.format is None or not can_be_codes(weight, scheme.format):
        return None
    has_zeros = scheme.has_zeros and not scheme.is_symmetric
    codes = Codes(format=scheme.format, group=scheme.group or 0, has_zeros=has_zeros)
    return codes if can_be_packed(num_inputs(weight), codes) else None


def widened_words(method: Method | None, config: ModelConfig) -> Iterator[str]:
    """Yield a line for what a method says and is not done.

    And one if matrices of four bits are widened when they are read, whatever is asked.
    """
    if method is None:
        return
    if method.words:
        yield f"{config.name}: {method.words}"
    matrices = [each for each in weights_of(config) if can_be_codes(each)]
    schemes = {each: scheme_of(method, config, each) for each in matrices}
    widened = [
        _source(each)
        for each, scheme in schemes.items()
        if scheme and scheme.bits == 4 and scheme.kind in FOUR_BITS
        if _is_widened(each, scheme, config.codes)
    ]
    if widened:
        is_ordered = any(scheme and scheme.is_ordered for scheme in schemes.values())
        reason = "of another kind than most, or cut a group"
        if is_ordered:
            reason = "in groups of inputs that are no neighbours (desc_act, actorder)"
        yield (
            f"{config.name}: {len(widened)} matrices of 4 bits are widened when they are loaded, "
            f"because they are {reason}: {widened[0]} ..."
        )


def _is_widened(weight: Weight, scheme: Scheme, codes: Codes | None) -> bool:
    return codes is None or codes.format != scheme.format or _source(weight) in codes.plain


def scheme_of(method: Method, config: ModelConfig, weight: Weight) -> Scheme | None:
    """The scheme of a weight of the table; experts are alike."""
    one = weight.of_expert(0) if weight.axes[0] == "experts" else weight
    return method.scheme_of(stored_name(config, _source(one)).removesuffix(".weight"))


def _source(weight: Weight) -> str:
    return weight.parts[0].source


# ------------------------------------------------------------------- what the methods say


def _must(fields: Fields, name: str, *accepted: Any) -> Any:
    """A field that has one of these values; absent is None, which may be one of them."""
    value = fields.data.get(name)
    if value not in accepted:
        known = " or ".join(str(each) for each in accepted if each is not None)
        fields.problem(f"{name} must be {known}, found {value!r}")
    return value


def _names(fields: Fields, *names: str) -> tuple[str, ...]:
    """A list of texts, under the first of these names that is there."""
    name = next((each for each in names if fields.has(each)), names[0])
    value = fields.data.get(name) or []
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        fields.problem(f"{name} must be a list of names, found {value!r}")
        return ()
    return tuple(value)


def _group(fields: Fields) -> int | None:
    if fields.data.get("group_size") in (None, -1):
        return None
    return fields.count("group_size")


def _part(fields: Fields, name: str, what: Any = None) -> Fields:
    """An object inside; empty where it is missing. Its problems are those of `fields`."""
    value = fields.data.get(name) if what is None else what
    if value is not None and not isinstance(value, dict):
        fields.problem(f"{name} must be an object, found {value!r}")
        value = None
    inner = Fields(value or {}, f"{fields.file}: {name}")
    inner.problems = fields.problems
    return inner


def _compressed_tensors(fields: Fields) -> Method:
    """github.com/vllm-project/compressed-tensors: groups of modules, each with a scheme."""
    for name in ("sparsity_config", "transform_config"):
        part = _part(fields, name).data
        if part and part.get("format") != "dense" and part.get("config_groups") != {}:
            fields.problem(f"{name} is not supported; use the unquantised checkpoint")
    _must(fields, "quantization_status", None, "compressed", "frozen")
    groups = _part(fields, "config_groups")
    if not groups.data:
        groups.problem("names no group")
    schemes: list[tuple[str, Scheme]] = []
    for name in groups.data:
        group = _part(groups, name)
        scheme = _scheme(group, str(group.data.get("format") or fields.data.get("format")))
        schemes += [(target, scheme) for target in _names(group, "targets")]
    # A module's own name comes before expressions, and these before the class of all.
    schemes.sort(key=lambda each: (each[0] == _ALL, each[0].startswith("re:")))
    return Method("compressed-tensors", tuple(schemes), _names(fields, "ignore"))


def _scheme(group: Fields, format: str) -> Scheme:
    weights, inputs = _part(group, "weights"), _part(group, "input_activations")
    if weights.data.get("type") == "float":
        return _float_scheme(weights, inputs)
    _must(weights, "type", "int")
    strategy = _must(weights, "strategy", "tensor", "channel", "group")
    size = _group(weights) if strategy == "group" else None
    has_zeros = weights.data.get("symmetric") is False
    is_ordered = weights.data.get("actorder") in (True, "group", "dynamic")
    if format in ("int-quantized", "naive-quantized"):
        _must(weights, "num_bits", 8)
        return Scheme("int8", 8, size, has_zeros=has_zeros)
    if format != "pack-quantized":
        known = "float-quantized, int-quantized, naive-quantized or pack-quantized"
        group.problem(f"format must be {known}, found {format!r}")
    bits = _must(weights, "num_bits", 4, 8)
    return Scheme("packed", bits, size, has_zeros=has_zeros, is_ordered=is_ordered)


def _float_scheme(weights: Fields, inputs: Fields) -> Scheme:
    _must(weights, "num_bits", 8)
    _must(weights, "symmetric", None, True)
    strategy = _must(weights, "strategy", "tensor", "channel", "block")
    if inputs.data:
        _must(inputs, "num_bits", 8)
        _must(inputs, "type", "float")
        dynamic = _must(inputs, "dynamic", True, *([] if strategy == "block" else [False]))
        kind = "tensor" if not dynamic else "group" if strategy == "block" else "token"
        _must(inputs, "strategy", kind)
    computed = bool(inputs.data)
    fixed = computed and not inputs.data.get("dynamic")
    if strategy == "block":
        return Scheme(
            "fp8_blocks", block=_block(weights, "block_structure"), is_computed_with=computed
        )
    return Scheme("fp8", is_computed_with=computed, has_input_scale=fixed)


def _block(fields: Fields, name: str) -> tuple[int, int]:
    value = fields.data.get(name)
    if (
        not isinstance(value, list)
        or len(value) != 2
        or not all(type(each) is int and each > 0 for each in value)
    ):
        fields.problem(f"{name} must be two whole numbers above 0, found {value!r}")
        return 1, 1
    return value[0], value[1]


def _fp8(fields: Fields) -> Method:
    """transformers' own fp8: a scale a matrix, a channel, or a block (DeepSeek, Qwen3-FP8)."""
    in_blocks = fields.has("weight_block_size")
    schemes = (None, "dynamic") if in_blocks else (None, "dynamic", "static")
    fixed = _must(fields, "activation_scheme", *schemes) == "static"
    _must(fields, "fmt", None, "e4m3")
    scheme = Scheme("fp8", is_computed_with=True, has_input_scale=fixed)
    if in_blocks:
        block = _block(fields, "weight_block_size")
        scheme = Scheme("fp8_blocks", block=block, is_computed_with=True)
    ignored = _names(fields, "modules_to_not_convert", "ignored_layers")
    return Method("fp8", ((_ALL, scheme),), ignored + _HEAD)


def _fbgemm(fields: Fields) -> Method:
    """FBGEMM's e4m3 with a scale a channel, as transformers writes it (Llama 3.1 and 4)."""
    bound = fields.data.get("activation_scale_ub")
    words = (
        f"activation_scale_ub = {bound} is not applied: each block of inputs has a scale of its own"
    )
    ignored = _names(fields, "modules_to_not_convert")
    scheme = Scheme("fp8", is_computed_with=True)
    return Method("fbgemm_fp8", ((_ALL, scheme),), ignored + _HEAD, words if bound else "")


def _modelopt(fields: Fields) -> Method:
    """NVIDIA's ModelOpt, in `hf_quant_config.json` or in what it became in `config.json`."""
    inner = _part(fields, "quantization") if fields.has("quantization") else fields
    _must(inner, "quant_algo", "FP8")
    _must(inner, "kv_cache_quant_algo", None, "FP8")
    ignored = _names(inner, "exclude_modules", "ignore")
    group = _part(_part(inner, "config_groups"), "group_0")
    fixed = _part(group, "input_activations").data.get("dynamic") is not True
    scheme = Scheme("fp8", is_computed_with=True, has_input_scale=fixed)
    return Method("modelopt", ((_ALL, scheme),), ignored + _HEAD)


def _awq(fields: Fields) -> Method:
    """AutoAWQ's 4 bits, packed for its "gemm" kernels (arXiv 2306.00978)."""
    _must(fields, "bits", 4)
    if str(fields.data.get("version") or "gemm").lower() != "gemm":
        fields.problem(f"version must be gemm, found {fields.data['version']!r}")
    scheme = Scheme("awq", 4, _group(fields), has_zeros=True)
    return Method("awq", ((_ALL, scheme),), _names(fields, "modules_to_not_convert") + _HEAD)


def _gptq(fields: Fields) -> Method:
    """AutoGPTQ's and GPTQModel's packing (arXiv 2210.17323); v1 stores zero points less one."""
    bits = _must(fields, "bits", 2, 4, 8)
    version = _must(fields, "checkpoint_format", None, "gptq", "gptq_v2")
    if fields.data.get("dynamic"):
        fields.problem("dynamic (bits of single modules) is not supported")
    offset = 0 if version == "gptq_v2" else 1
    scheme = Scheme(
        *("gptq", bits or 4, _group(fields)),
        has_zeros=True,
        zero_offset=offset,
        is_ordered=fields.data.get("desc_act") is True,
        is_symmetric=fields.data.get("sym") is True,
    )
    ignored = _names(fields, "modules_to_not_convert")
    return Method("gptq", ((_ALL, scheme),), ignored + (() if fields.flag("lm_head") else _HEAD))


def _mxfp4(fields: Fields) -> Method:
    """Microscaling (OCP MX 1.0): e2m1, a power of two for 32 of them; GPT-OSS's experts."""
    ignored = _names(fields, "modules_to_not_convert")
    return Method("mxfp4", (("re:.*experts", Scheme("mxfp4", 4, 32)),), ignored + _HEAD)


METHODS: Mapping[str, Callable[[Fields], Method]] = MappingProxyType(
    {
        "compressed-tensors": _compressed_tensors,
        "fp8": _fp8,
        "fbgemm_fp8": _fbgemm,
        "modelopt": _modelopt,
        "awq": _awq,
        "gptq": _gptq,
        "mxfp4": _mxfp4,
    }
)
"""Readers of `quantization_config`, by quant_method."""

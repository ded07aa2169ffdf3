"""Reads low-rank adapters as PEFT writes them: `adapter_config.json`, `adapter_model.safetensors`.

What would change the result in another way than b (a x) does is refused by its name.

Experts may have factors of their own, each a module, or those of a layer together, as PEFT has
them for parameters that hold all experts (`target_parameters`): a `[experts * rank, in]`, b `[out,
rank * experts]`. One of the two modules is inside the other, and shapes say which is which.
"""

import math
import re
from collections.abc import Iterator, Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from shiftjax.adapters.adapter import Adapter, AdapterError, Factor
from shiftjax.arch.config import ModelConfig
from shiftjax.arch.lora import Adapted, adapted, matrices_of
from shiftjax.options import shown
from shiftjax.weights.errors import CheckpointError
from shiftjax.weights.hf_names import Place, places_of
from shiftjax.weights.safetensors_file import read_header, read_range
from shiftjax.weights.source import TensorInfo
from shiftjax.weights.typed_fields import read_json

CONFIG, TENSORS, PICKLED = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"
# Fields that change no number of what is served, or that are read here.
_READ = (
    *("peft_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern"),
    *("target_parameters", "init_lora_weights"),
)
# Of `init_lora_weights`: beside others PEFT changes the weights of the model, too, when it loads.
_PLAIN_STARTS = (True, False, None, "gaussian", "orthogonal", "eva")
_HARMLESS = (
    *("auto_mapping", "base_model_name_or_path", "revision", "task_type", "inference_mode"),
    *("peft_version", "lora_dropout", "loftq_config", "eva_config", "fan_in_fan_out"),
    *("corda_config", "lora_ga_config", "runtime_config", "megatron_core", "qalora_group_size"),
    *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"),
    *("ensure_weight_tying",),
)
_MERGE = "merge it into the checkpoint"
_NAME = re.compile(r"(?:base_model\.model\.)?(.+)\.lora_([AB])(?:\.default)?\.weight")
_PLAIN = re.compile(r"\^?(?:\.\*)?(?:[\w.-]|\\\.)+\$?")  # a pattern that is quickly tried
_STACK = re.compile(r".*\blayers\.(\d+)\.(?:\w+\.)*experts(?:\.base_layer)?")
_PARAMETERS = "gate_up_proj", "down_proj"  # that hold all experts
_MOST_PATTERNS = 10_000
MOST_ALPHA = 1e6


class _Scales(NamedTuple):
    """What factors b are multiplied by, by module."""

    rank: int
    alpha: float
    alphas: Mapping[str, float]
    by_root: bool

    def of(self, module: str, rank: int) -> float:
        """Return the scale of a module whose factors have a rank."""
        found = (alpha for pattern, alpha in self.alphas.items() if _matches(pattern, module))
        alpha = next(found, self.alpha)
        return alpha / (math.sqrt(rank) if self.by_root else rank)


def _matches(pattern: str, module: str) -> bool:
    """Whether a key of `alpha_pattern` is for a module: as PEFT's `get_pattern_key`."""
    return re.match(rf"(.*\.)?({pattern})$", module) is not None


def read_adapter(
    name: str, path: Path, model: ModelConfig, dtype: np.dtype, max_rank: int
) -> Adapter:
    """Return an adapter of a model in host memory, as numbers of `dtype`.

    Raises AdapterError: it is not the model's, or has what is not served; one sentence.
    """
    try:
        with np.errstate(over="ignore"):  # what is too large is looked for
            return _read(name, path, model, dtype, max_rank)
    except CheckpointError as error:
        raise AdapterError(f"{name}: {error.problems[0]}.") from error


def _read(name: str, path: Path, model: ModelConfig, dtype: np.dtype, max_rank: int) -> Adapter:
    if not (path / CONFIG).is_file():
        raise AdapterError(f"{name}: {path} is no directory with an {CONFIG}.")
    config, where = read_json(path / CONFIG), f"{name}: {path / CONFIG}"
    _check_served(config, where)
    scales = _scales_of(config, where)
    if not (path / TENSORS).is_file():
        words = "is not there"
        if (path / PICKLED).is_file():
            words += f", and {PICKLED} is not opened: a pickle runs code; save it as safetensors"
        raise AdapterError(f"{name}: {path / TENSORS} {words}.")
    header = read_header(path / TENSORS)
    digest, factors = blake2b(digest_size=8), dict[str, Factor]()
    digest.update(repr(scales).encode())
    for module, (of_a, of_b) in sorted(_pairs(name, header).items()):
        rank = header[of_a].shape[0]
        if _STACK.fullmatch(module) is None:
            _check_rank(name, module, rank, max_rank)
        a, b = (read_range(each, header[each], ()) for each in (of_a, of_b))
        for each, values in ((of_a, a), (of_b, b)):
            if not np.isfinite(values.astype(np.float32)).all():
                raise AdapterError(f"{name}: tensor {each} has values that are not finite.")
            digest.update(f"{each} {values.dtype} {values.shape}".encode())
            digest.update(np.ascontiguousarray(values).view(np.uint8).data)
        if (layer := _STACK.fullmatch(module)) is not None:
            factors |= _of_experts(name, int(layer[1]), (a, b), model, scales, (dtype, max_rank))
            continue
        scaled = b.astype(np.float32) * np.float32(scales.of(module, rank))
        parts = list(_parts(name, module, header[of_b], model))
        for ours, place, own in parts:
            rows = scaled[place.range_of(slice(0, own.outputs))] if len(parts) > 1 else scaled
            _check_shapes(name, ours, own, a, rows)
            factors[ours] = Factor(a.astype(dtype), np.ascontiguousarray(rows).astype(dtype))
    if not factors:
        raise AdapterError(f"{name}: {path / TENSORS} has no factors.")
    for ours, factor in factors.items():
        if not all(np.isfinite(each.astype(np.float32)).all() for each in factor):
            raise AdapterError(f"{name}: {ours}: with its scale it is too large for {dtype.name}.")
    rank = max(factor.a.shape[0] for factor in factors.values())
    return Adapter(name, str(path), digest.hexdigest(), rank, factors)


def _check_served(config: Mapping[str, Any], where: str) -> None:
    """Raise AdapterError for what a configuration says that is not served."""
    kind = config.get("peft_type", "LORA")
    if kind != "LORA":
        raise AdapterError(f"{where}: peft_type is {shown(kind)}, and LORA is served: {_MERGE}.")
    bias = config.get("bias", "none")
    if bias != "none":
        raise AdapterError(f"{where}: bias = {shown(bias)} is not served: {_MERGE}.")
    for field, value in config.items():
        if field not in (*_READ, *_HARMLESS, "bias") and value:
            raise AdapterError(f"{where}: {shown(field)} is not served: {_MERGE}.")
    parameters = config.get("target_parameters") or []
    for each in parameters if isinstance(parameters, list) else [parameters]:
        if not isinstance(each, str) or each.rpartition(".")[2] not in _PARAMETERS:
            raise AdapterError(
                f"{where}: target_parameters: {shown(each)} is not served: {_MERGE}."
            )
    start = config.get("init_lora_weights")
    if not isinstance(start, (bool, str, type(None))) or start not in _PLAIN_STARTS:
        words = f"init_lora_weights = {shown(start)} changes the model's weights, too"
        raise AdapterError(f"{where}: {words}: have PEFT convert it to plain LoRA, or {_MERGE}.")


def _scales_of(config: Mapping[str, Any], where: str) -> _Scales:
    """Return what is read of a configuration. Raises AdapterError for what it cannot say."""
    by_root = config.get("use_rslora") or False
    if not isinstance(by_root, bool):
        raise AdapterError(f"{where}: use_rslora must be true or false, found {shown(by_root)}.")
    rank: Any = config.get("r", 8)
    alpha: Any = config.get("lora_alpha", 8)
    if type(rank) is not int or rank < 1:
        raise AdapterError(f"{where}: r must be a whole number above 0, found {shown(rank)}.")
    if not _is_number(alpha):
        raise AdapterError(f"{where}: lora_alpha must be a number, found {shown(alpha)}.")
    alphas = config.get("alpha_pattern") or {}
    if not isinstance(alphas, dict) or len(alphas) > _MOST_PATTERNS:
        raise AdapterError(f"{where}: alpha_pattern must be an object of numbers.")
    for pattern, value in alphas.items():
        if not _PLAIN.fullmatch(pattern) or not _is_number(value):
            words = f"{shown(pattern)} must be the name of a module, with a number"
            raise AdapterError(f"{where}: alpha_pattern: {words}.")
    return _Scales(rank, float(alpha), alphas, by_root)


def _is_number(value: Any) -> bool:
    is_one = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_one and abs(value) <= MOST_ALPHA  # false of NaN


def _pairs(name: str, header: Mapping[str, TensorInfo]) -> dict[str, tuple[str, str]]:
    """Return the tensors of factors a and b by module. Raises AdapterError for any other."""
    found: dict[str, dict[str, str]] = {}
    for tensor in header:
        match = _NAME.fullmatch(tensor)
        if match is None:
            raise AdapterError(f"{name}: tensor {shown(tensor)} is no factor a or b: {_MERGE}.")
        both = found.setdefault(match[1], {})
        if match[2] in both:
            raise AdapterError(f"{name}: {match[1]} has lora_{match[2]} twice.")
        both[match[2]] = tensor
    for module, both in found.items():
        if len(both) < 2:
            missing = "B" if "A" in both else "A"
            raise AdapterError(f"{name}: {module} has no lora_{missing}.")
        for tensor in both.values():
            if len(header[tensor].shape) != 2:
                words = f"expected a matrix, found shape {list(header[tensor].shape)}"
                raise AdapterError(f"{name}: tensor {tensor}: {words}.")
            if 0 in header[tensor].shape:
                raise AdapterError(f"{name}: tensor {tensor} is empty.")
    return {module: (both["A"], both["B"]) for module, both in found.items()}


def _parts(
    name: str, module: str, of_b: TensorInfo, model: ModelConfig
) -> Iterator[tuple[str, Place, Adapted]]:
    """Yield the matrices that a module of a checkpoint is, and where each is in its factor b."""
    known = adapted(model)
    tensors, places = places_of(model, {f"{module}.weight": of_b})
    if not tensors:
        raise AdapterError(f"{name}: {module} is no part of {model.name} that text goes through.")
    for ours in tensors:
        if ours not in known:
            raise AdapterError(f"{name}: {module}: {_why_not(ours, model)}.")
        yield ours, places[ours], known[ours]


def _of_experts(
    name: str,
    layer: int,
    both: tuple[np.ndarray, np.ndarray],
    model: ModelConfig,
    scales: _Scales,
    limits: tuple[np.dtype, int],
) -> Iterator[tuple[str, Factor]]:
    """Yield the factors of a layer's experts, out of those of a parameter that holds all."""
    (a, b), (dtype, max_rank) = both, limits
    where, experts = f"{name}: experts of layer {layer}", model.experts
    if experts is None or model.lora is None or not model.lora.of_experts:
        raise AdapterError(f"{where}: {_why_not('.experts.', model)}.")
    stacks = {each.weight.name: each.weight for each in matrices_of(model) if each.is_of_experts}
    own = {
        part: stacks.get(f"layers.{layer}.mlp.experts.{part}") for part in ("gate", "up", "down")
    }
    gate, up, down = own.values()
    if gate is None or up is None or down is None:
        raise AdapterError(f"{where}: {model.name} has none there.")
    width, hidden = gate.shape[1:]
    sizes = {(hidden, 2 * width): (gate, up), (width, hidden): (down,)}
    weights = sizes.get((a.shape[1], b.shape[0]))
    if weights is None or a.shape[0] % experts.num or a.shape[0] != b.shape[1]:
        words = f"found factors of {a.shape} and {b.shape}, which are of no parameter"
        raise AdapterError(f"{where}: {words} of {experts.num} experts.")
    rank = a.shape[0] // experts.num
    _check_rank(name, f"experts of layer {layer}", rank, max_rank)
    parameter = _PARAMETERS[len(weights) == 1]
    scale = np.float32(scales.of(f"layers.{layer}.mlp.experts.{parameter}", rank))
    scaled = (b.astype(np.float32) * scale).reshape(b.shape[0], rank, experts.num)
    takes_turns = model.architecture == "gpt_oss"
    for nth, weight in enumerate(weights):
        rows = slice(nth, None, len(weights)) if takes_turns else slice(nth * width, None)
        mine = scaled[rows][: weight.shape[1]]
        for expert in range(experts.num):
            own_a = np.ascontiguousarray(a[expert * rank : (expert + 1) * rank])
            own_b = np.ascontiguousarray(mine[:, :, expert])
            yield weight.of_expert(expert).source, Factor(own_a.astype(dtype), own_b.astype(dtype))


def _check_rank(name: str, module: str, rank: int, max_rank: int) -> None:
    if rank > max_rank:
        words = f"rank {rank} is more than max_lora_rank = {max_rank}"
        raise AdapterError(f"{name}: {module}: {words}: start with a larger one.")


def _why_not(ours: str, model: ModelConfig) -> str:
    """Return why no adapter changes a matrix, by the name of its tensor."""
    if ".experts." in ours and model.experts is not None:
        return "adapters change experts where the server is started with lora_experts"
    return f"adapters change no such matrix of {model.name}: {_MERGE}"


def _check_shapes(name: str, ours: str, own: Adapted, a: np.ndarray, b: np.ndarray) -> None:
    rank = a.shape[0]
    expected, found = ((rank, own.inputs), (own.outputs, rank)), (a.shape, b.shape)
    if expected != found:
        words = f"expected factors of {expected[0]} and {expected[1]}, found {found[0]} and"
        raise AdapterError(f"{name}: {ours.removesuffix('.weight')}: {words} {found[1]}.")

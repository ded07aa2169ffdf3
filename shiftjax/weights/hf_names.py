"""Tensors of Hugging Face checkpoints that are stored under other names, or several as one.

Phi-3 and GLM stack projections of one input; a part of the rows is then a tensor of ours. gpt-oss
has all experts in one tensor `[experts, in, out]`, the columns of gate and up taking turns; Llama 4
has those of gate before those of up, and so has Gemma 4, `[experts, out, in]`. A text
model beside an encoder of images has something in front of its names. GLM-4.5 has layers behind the
last that predict further tokens.
"""

import logging
import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from shiftjax.arch.config import ModelConfig
from shiftjax.weights.gemma4_config import GEMMA4
from shiftjax.weights.source import CheckpointError, TensorInfo

_QKV = "self_attn.qkv_proj", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_GATE_UP = "mlp.gate_up_proj", ("mlp.gate_proj", "mlp.up_proj")
_STACKS = {"phi3": dict([_QKV, _GATE_UP]), "glm": dict([_GATE_UP]), "glm4": dict([_GATE_UP])}
_STACKED_EXPERTS = ("gpt_oss", "llama4_text", *GEMMA4)
_WITH_DRAFTS = ("glm4_moe", "deepseek_v3", "kimi_k2", "glm_moe_dsa")
_LAYER = re.compile(r"model\.layers\.(\d+)\.")
_EXPERTS = re.compile(r"(model\.layers\.\d+\.(?:\w+\.)?experts)\.(gate_up|down)_proj(_bias)?")
_PROJECTION = re.compile(r"(model\.layers\.\d+)\.(\w+\.\w+_proj)\.(\w+)")
_TEXT = re.compile(r"(?:model\.language_model|language_model\.model)\.")
_TEXT_HEAD = re.compile(r"language_model\.lm_head\.")
_OF_HEAD = re.compile(r"(?:bert|roberta)\.")  # an encoder beside the head that scores with it
_OF_IMAGES = re.compile(
    r"(?:model\.)?(?:vision_tower|vision_model|multi_modal_projector|mm_projector|audio_tower|embed_vision|embed_audio)\."
)
_OF_INDEXER = re.compile(r".*\.self_attn\.indexer\.")
_SHARED = re.compile(r".*\blayers\.(\d+)\.self_attn\.[kv]_(?:proj|norm)\.")
logger = logging.getLogger(__name__)


class Place(NamedTuple):
    """Where a tensor of ours is."""

    name: str  # of the stored tensor
    first: int = 0  # of its rows
    step: int = 1  # from one to the next
    expert: int | None = None  # whose matrix it is, stored `[experts, in, out]`
    is_transposed: bool = True  # false: stored `[experts, out, in]`

    def range_of(self, rows: slice) -> slice:
        """Return the rows of the stored tensor that have these rows of ours, and others between."""
        start = self.first + self.step * rows.start
        return slice(start, start + max(0, self.step * (rows.stop - rows.start - 1) + 1))

    def of_blocks(self, name: str, rows: int) -> "Place":
        """Return the place of what `rows` neighbouring rows share; CheckpointError if it is cut."""
        if self.first % rows:
            words = f"{self.name}: {name} begins inside a block of rows that share a scale"
            raise CheckpointError(f"{words}: use --quantization none")
        return self._replace(first=self.first // rows)


def places_of(
    config: ModelConfig, stored: Mapping[str, TensorInfo]
) -> tuple[dict[str, TensorInfo], dict[str, Place]]:
    """Return the tensors by our names, and where each is stored.

    Tensors that no text model has are left out, which is logged. Raises CheckpointError for a
    stack whose rows are not those of its parts.
    """
    tensors: dict[str, TensorInfo] = {}
    places: dict[str, Place] = {}
    unused = set(_unused(config, stored))
    for name, info in stored.items():
        if name in unused:
            continue
        ours = _TEXT_HEAD.sub("lm_head.", _TEXT.sub("model.", name, count=1), count=1)
        if config.encoder is not None:
            ours = _OF_HEAD.sub("", ours, count=1)
        found = _EXPERTS.fullmatch(ours) if config.architecture in _STACKED_EXPERTS else None
        parts = _experts(config, found, name, info) if found else _parts(config, ours, name, info)
        for part, shape, place in parts:
            tensors[part], places[part] = info._replace(shape=shape), place
    return tensors, places


def _unused(config: ModelConfig, stored: Mapping[str, TensorInfo]) -> Iterator[str]:
    """Tensors of an encoder of images, and of layers that draft tokens, for a log line each."""

    def is_behind(name: str) -> bool:
        found = _LAYER.match(name) if config.architecture in _WITH_DRAFTS else None
        return found is not None and int(found[1]) >= config.num_layers

    def is_shared(name: str) -> bool:
        num, found = config.num_shared_kv_layers, _SHARED.match(name)
        return found is not None and num > 0 and int(found[1]) >= config.num_layers - num

    kinds = {
        "of keys and values are not loaded: their layers read the cache of others": is_shared,
        "of images are not loaded: the model takes text alone": _OF_IMAGES.match,
        "of layers that draft tokens are not loaded": is_behind,
        "of indexers are not loaded: contexts are within what they choose": _OF_INDEXER.match,
    }
    for words, is_of_kind in kinds.items():
        names = [name for name in stored if is_of_kind(name)]
        if names:
            logger.info("%s: %d tensors %s", config.name, len(names), words)
        yield from names


def stored_name(config: ModelConfig, name: str) -> str:
    """Return the tensor of a checkpoint of this architecture that has this one of ours."""
    match = _PROJECTION.fullmatch(name)
    stacks = _STACKS.get(config.architecture, {}) if match else {}
    found = (stack for stack, parts in stacks.items() if match and match[2] in parts)
    stack = next(found, None)
    return name if match is None or stack is None else f"{match[1]}.{stack}.{match[3]}"


def rows_of(config: ModelConfig, name: str, stack: str) -> tuple[int, int]:
    """Return which rows of the stack, as `stored_name` calls it, are a tensor of ours."""
    match, stored = _PROJECTION.fullmatch(name), _PROJECTION.fullmatch(stack)
    assert match and stored
    parts = _STACKS[config.architecture][stored[2]]
    before = parts[: parts.index(match[2])]
    first = sum(_rows(config, part) for part in before)
    return first, first + _rows(config, match[2])


def stacks_of(config: ModelConfig, names: Mapping[str, TensorInfo]) -> dict[str, tuple[str, ...]]:
    """Return what a checkpoint of this architecture has, and the tensors of ours in each.

    Raises CheckpointError for experts in one tensor.
    """
    if config.experts is not None and config.architecture in _STACKED_EXPERTS:
        raise CheckpointError(
            f"{config.name}: the stacked experts of {config.architecture} are not written as a "
            "Hugging Face directory; convert to orbax instead"
        )
    stacks = _STACKS.get(config.architecture, {})
    stack_of = {part: stack for stack, parts in stacks.items() for part in parts}
    found: dict[str, tuple[str, ...]] = {}
    for name in names:
        match = _PROJECTION.fullmatch(name)
        if match and match[2] in stack_of:
            stack = stack_of[match[2]]
            parts = (f"{match[1]}.{part}.{match[3]}" for part in stacks[stack])
            found[f"{match[1]}.{stack}.{match[3]}"] = tuple(part for part in parts if part in names)
        else:
            found[name] = (name,)
    return found


def _parts(
    config: ModelConfig, ours: str, name: str, info: TensorInfo
) -> Iterator[tuple[str, tuple[int, ...], Place]]:
    """Name, shape and place of each tensor of ours in a stored one; `ours` is its name without
    what stands in front.
    """
    match, stacks = _PROJECTION.fullmatch(ours), _STACKS.get(config.architecture, {})
    if not match or match[2] not in stacks:
        yield ours, info.shape, Place(name)
        return
    rows = [_rows(config, part) for part in stacks[match[2]]]
    is_shared = info.shape in ((), (1,))  # a scale of the whole stack
    if not is_shared and info.shape[0] != sum(rows):
        raise CheckpointError(
            f"{info.file}: tensor {name}: expected {' + '.join(map(str, rows))} rows, "
            f"found {info.shape[0]}"
        )
    first = 0
    for part, count in zip(stacks[match[2]], rows, strict=True):
        shape = info.shape if is_shared else (count, *info.shape[1:])
        yield f"{match[1]}.{part}.{match[3]}", shape, Place(name, first)
        first += 0 if is_shared else count


def _experts(
    config: ModelConfig, found: re.Match[str], name: str, info: TensorInfo
) -> Iterator[tuple[str, tuple[int, ...], Place]]:
    """Yield name, shape and `Place` of the weights in a tensor that stacks all experts."""
    assert config.experts is not None
    width, hidden = config.experts.intermediate_size, config.hidden_size
    names = ("gate", "up") if found[2] == "gate_up" else ("down",)
    outputs, inputs = (hidden, width) if names == ("down",) else (width, hidden)
    is_transposed = config.architecture not in GEMMA4
    matrix = (inputs, outputs * len(names))[:: 1 if is_transposed else -1]
    shape = config.experts.num, *(matrix[1:] if found[3] else matrix)
    if info.shape != shape:
        raise CheckpointError(
            f"{info.file}: tensor {name}: expected shape {list(shape)}, found {list(info.shape)}"
        )
    takes_turns = config.architecture == "gpt_oss"
    suffix, own = ("bias", (outputs,)) if found[3] else ("weight", (outputs, inputs))
    for expert in range(config.experts.num):
        for nth, part in enumerate(names):
            first, step = (nth, len(names)) if takes_turns else (nth * outputs, 1)
            place = Place(name, first, step, expert, is_transposed)
            yield f"{found[1]}.{expert}.{part}_proj.{suffix}", own, place


def _rows(config: ModelConfig, projection: str) -> int:
    heads = {
        "q_proj": config.num_heads,
        "k_proj": config.num_kv_heads,
        "v_proj": config.num_kv_heads,
    }
    part = projection.rpartition(".")[2]
    return heads[part] * config.head_dim if part in heads else config.intermediate_size

"""What a device holds: the weights to the byte, a step's temporaries, and the KV cache. No JAX."""

import math
from functools import lru_cache
from typing import NamedTuple

from shiftjax.arch.config import ModelConfig
from shiftjax.arch.formats import Formats
from shiftjax.arch.weights import Weight
from shiftjax.costs.machine import EngineOverhead, Machine
from shiftjax.parallel.grid import Mode, Use
from shiftjax.parallel.layout import Layout
from shiftjax.parallel.positions import GATHERED_TOKENS, GATHERS
from shiftjax.parallel.stored import COPIED, dtype_of, stored_weights

MARLIN = (256, 128)  # multiples of which hidden size and width of MXFP4 experts are (vLLM)


class Memory(NamedTuple):
    """Bytes of one device, and the tokens that the KV cache of its group holds.

    Where blocks are freed behind windows, tokens of sequences that are as long as they may be.
    """

    weight_bytes: int
    shift_weight_bytes: int  # that SHIFT takes beside them
    workspace_bytes: int  # temporaries of the largest step, and what is reserved
    kv_bytes: int  # of what is left; below 0 where the rest does not fit
    kv_token_bytes: int

    @property
    def num_kv_tokens(self) -> int:
        """Tokens whose KV fits; 0 or less where the weights leave no room."""
        return self.kv_bytes // self.kv_token_bytes


def kv_token_bytes(layout: Layout, formats: Formats) -> int:
    """Bytes of KV cache of a token on one device, all layers, replicas included.

    Where devices split positions, in the mean over tokens, rounded up.
    """
    each = sum(len(each.layers) * each.spec.num_bytes(formats) for each in layout.caches)
    return -(-each // layout.position_ways)


def block_token_bytes(layout: Layout, formats: Formats) -> int:
    """Bytes of a token in a KV block on one device: of all layers, or of those of a cache group.

    Of a token that the device has.
    """
    return sum(len(each.places) * each.spec.num_bytes(formats) for each in layout.caches)


def reserved_bytes(machine: Machine, engine: EngineOverhead, num_devices: int) -> int:
    """Bytes of a device beside weights, a step and KV, in a group of so many devices.

    The driver and the context of the process, what the engine records, and buffers of collectives
    with every other device. Measured memory leaves them out already: an engine that starts asks
    its devices, and none of this counts.
    """
    peers = machine.peer_bytes * (num_devices - 1)
    return int(machine.reserved_bytes + engine.reserved_bytes + peers)


def sampling_bytes(engine: EngineOverhead, num_rows: int, vocab_size: int) -> int:
    """Bytes that sampling takes at once in an engine that does not split it over the devices."""
    return int(engine.sampling_bytes * num_rows * vocab_size)


def logit_bytes(layout: Layout, num_rows: int) -> int:
    """Bytes of a device for logits, and for what sampling makes of them, of so many rows."""
    return 3 * num_rows * layout.vocab_size * 4 // layout.num_devices


def padding_bytes(engine: EngineOverhead, layout: Layout, formats: Formats) -> int:
    """Bytes by which a device's experts in MXFP4 are larger in an engine that pads them.

    To multiples of `MARLIN` inputs and columns: gpt-oss-120b takes 66.0 GiB of an H100 (vLLM issue
    23278), its checkpoint 60.8.
    """
    experts, ways = layout.model.experts, layout.num_devices
    if experts is None or formats.weights != "mxfp4" or not engine.pads_mxfp4:
        return 0
    stored = expert_bytes(layout.model, formats) / ways
    sizes = (layout.model.hidden_size, -(-experts.intermediate_size // ways))
    padded = [size + -size % multiple for size, multiple in zip(sizes, MARLIN, strict=True)]
    return int(stored * (math.prod(padded) / math.prod(sizes) - 1))


def temporary_bytes(
    layout: Layout,
    formats: Formats,
    num_tokens: int,
    num_shift_tokens: int,
    num_rows: int,
    experts_sp: int = 1,
) -> int:
    """Estimate a step's temporaries: activations of the hungrier mode, and logits.

    BASE splits its `num_tokens` over SP; SHIFT's largest step has `num_shift_tokens`. The keys and
    values of late layers are made together, before and after the rotation, of all tokens at once.
    Where BASE gathers its weights, it looks up the embeddings of all tokens, too.
    Queries of latents are as wide as these, and so are nearly what heads sum, of all tokens.
    Experts are computed of the tokens that BASE splits `experts_sp` ways: those, their sums, and
    what each of a token's experts gives. `split_bytes` come on top.
    """
    hidden = layout.model.hidden_size
    inner = max(layout.intermediate_size, layout.shared_intermediate_size)
    base = -(-num_tokens // layout.sp) * (4 * hidden + 3 * inner // layout.tp)
    shift = num_shift_tokens * (4 * hidden + 3 * inner // layout.num_devices)
    if latent := layout.model.latent:
        of_token = layout.heads_per_device * (latent.width + latent.rank)
        base, shift = base + num_tokens * of_token, shift + num_shift_tokens * of_token
    logits = logit_bytes(layout, num_rows)
    hidden += layout.model.num_layers * layout.model.layer_input_width // 2  # two, a short while
    late_kv = layout.model.num_late_layers * layout.cache.numbers
    if layout.model.has_wide_sharers:
        inner = max(inner, layout.wide_intermediate_size)
    gathered = 2 * max(num_tokens, num_shift_tokens) * (hidden + late_kv) if late_kv else 0
    if experts := layout.model.experts:
        most = max(-(-num_tokens // experts_sp) if layout.sp > 1 else 0, num_shift_tokens)
        of_experts = most * (3 + experts.per_token) * hidden
        base, shift = base + of_experts, shift + of_experts
    base = max(base, num_tokens * hidden) if layout.gathers else base
    base = base * formats.activation_bytes + gathered_bytes(layout, formats)
    split = split_bytes(layout, formats, max(num_tokens, num_shift_tokens))
    return max(base, max(shift, gathered) * formats.activation_bytes) + logits + split


def split_bytes(layout: Layout, formats: Formats, num_tokens: int) -> int:
    """Bytes of a step of so many tokens for what its tiles gather where devices split positions.

    The buffer of contexts, and the softmaxes of all tokens that wait for the next one, in float32.
    """
    if layout.position_ways == 1:
        return 0
    buffer = GATHERS * GATHERED_TOKENS * layout.cache.num_bytes(formats)
    width = layout.model.values_in_keys or layout.model.head_dim
    return buffer + num_tokens * layout.heads_per_device * (width + 2) * 4


@lru_cache(64)
def weight_bytes(layout: Layout, formats: Formats) -> int:
    """Bytes of the stored weights on a device; a tied head is the memory of the embedding."""
    held = (weight for weight in stored_weights(layout, formats) if weight.tied_to is None)
    return sum(shard_bytes(weight, layout, formats, layout.stored_in(weight)) for weight in held)


def expert_bytes(model: ModelConfig, formats: Formats) -> int:
    """Bytes of all experts, which all devices of a group split, whatever its TP is."""
    layout = Layout(model, 1, 1)
    experts = (w for w in stored_weights(layout, formats) if w.axes[0] == "experts")
    return sum(shard_bytes(weight, layout, formats, layout.base) for weight in experts)


def shift_copy_bytes(layout: Layout, formats: Formats, strategy: str) -> int:
    """Bytes that SHIFT's weights take beside those of BASE, by `weights` of the options.

    `replicate` is a copy of all that the modes split differently, a tied head included; of
    `alias`, whose views take nothing, biases and scales are copied, also those of q and o as wide
    as some of its steps may use them; `slice` has none, and where the layout gathers SHIFT's are
    all that there is.
    """
    if layout.sp == 1 or strategy == "slice" or layout.gathers:
        return 0
    copied = (
        weight
        for weight in stored_weights(layout, formats)
        if weight.axes[0] is not None
        if layout.used_in(weight, layout.shift) != layout.stored_in(weight) or weight.tied_to
        if strategy == "replicate" or weight.kind in COPIED
    )
    copies = sum(shard_bytes(weight, layout, formats, layout.shift) for weight in copied)
    wide = layout.query_modes(layout.shift)[-1]
    of_queries = (
        weight
        for weight in stored_weights(layout, formats)
        if wide != layout.shift and weight.kind in COPIED
        if layout.used_in(weight, layout.shift, Use(queries=wide)) != layout.shift
    )
    return copies + sum(shard_bytes(weight, layout, formats, wide) for weight in of_queries)


def gathered_bytes(layout: Layout, formats: Formats) -> int:
    """Bytes of gathered weights that a step of BASE holds at once: of two layers, the largest."""
    if not layout.gathers or layout.sp == 1:
        return 0
    of_layers: dict[str, int] = {}
    for weight in filter(layout.is_gathered, stored_weights(layout, formats)):
        layer = weight.name.split(".")[1]
        size = shard_bytes(weight, layout, formats, layout.base)
        of_layers[layer] = of_layers.get(layer, 0) + size
    return sum(sorted(of_layers.values())[-2:])


def shard_bytes(weight: Weight, layout: Layout, formats: Formats, mode: Mode) -> int:
    """Bytes of the part of one stored weight that a device has in a mode."""
    sizes = zip(weight.axes, weight.shape, strict=True)
    width = dtype_of(weight, formats).itemsize
    return width * math.prod(layout.local_size(axis, size, mode) for axis, size in sizes)

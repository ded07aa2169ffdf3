"""What fits on a device: bytes of weights. No JAX."""

from shiftjax.arch.config import ModelConfig
from shiftjax.arch.formats import Formats
from shiftjax.arch.weights import layer_parameters
from shiftjax.parallel.layout import Layout


def weight_bytes_per_device(config: ModelConfig, layout: Layout, formats: Formats) -> int:
    """BASE weights on one device: layers and embedding over TP, an untied LM head over P."""
    tp = layout.tp
    vocab = layout.vocab_size * config.hidden_size * formats.activation_bytes
    head = 0 if config.tie_word_embeddings else vocab // layout.num_devices
    layers = layer_parameters(config) * formats.weight_bytes // tp
    replicas = len(layout.base_kv_heads[0]) * tp / config.num_kv_heads  # > 1: stored repeatedly
    kv = 2 * config.num_layers * config.hidden_size * config.num_kv_heads * config.head_dim
    extra = int(kv * max(0.0, replicas - 1) * formats.weight_bytes) // tp
    return layers + extra + vocab // tp + head

"""What the settings of the engine come to for an encoder. No JAX."""

from shiftjax.arch.config import ModelConfig
from shiftjax.arch.formats import DTYPES
from shiftjax.arch.weights import num_parameters
from shiftjax.config import SETTINGS, EngineConfig
from shiftjax.deploy.budgets import chosen_budgets
from shiftjax.deploy.deployment import Devices
from shiftjax.deploy.tasks import ENGINE_TASKS, idle_settings
from shiftjax.embed.embed_engine import EmbedShape
from shiftjax.options import ConfigError

DECODER_WIDTH = 512
LEAST_WIDTH = 128  # tokens of a row: attention within it is 6% of the work (hidden size 384)


def embed_dtype(config: EngineConfig) -> str:
    """The number format of weights and activations: float32 unless another one is asked for.

    bfloat16 is twice as quick on a CPU, but moves embeddings, which are compared with stored ones,
    by ten thousand times the rounding of float32 (docs/results/embeddings.md).
    """
    return "float32" if config.model.dtype == "auto" else config.model.dtype


def num_devices_of(config: EngineConfig, num_present: int) -> int:
    """How many devices share the rows of a step: as configured, or all there are."""
    parallel = config.parallel
    if parallel.devices is not None:
        return parallel.devices
    if parallel.sp or parallel.tp or parallel.dp > 1:
        return parallel.dp * (parallel.sp or 1) * (parallel.tp or 1)
    return num_present


def check_embedding(config: EngineConfig, model: ModelConfig, devices: Devices) -> None:
    """Raise ConfigError for a model that cannot embed or is too large, and for idle settings."""
    problems = idle_settings(config.flat(), SETTINGS, ENGINE_TASKS, model, "embed")
    if config.model.task == "generate":
        problems.append(f"task = generate: {model.name} is asked to embed texts")
    if model.attention_sinks or model.attention_soft_cap:
        words = "attention sinks" if model.attention_sinks else "a soft cap of attention"
        problems.append(f"{model.name} has {words}: it generates, and embeds no texts")
    for words, part in (("experts", model.experts), ("latent attention", model.latent)):
        if part is not None:
            problems.append(f"{model.name} has {words}: it generates, and embeds no texts")
    if model.num_late_layers:
        words = "computes its last layers for output tokens only: it embeds no texts"
        problems.append(f"{model.name} {words}")
    wanted, limit = config.model.max_model_len, model.max_position_embeddings
    if wanted is not None and wanted > limit:
        problems.append(f"max_model_len = {wanted} is beyond {model.name}'s {limit} positions")
    used = num_devices_of(config, devices.num_devices)
    if used > devices.num_devices:
        problems.append(f"{used} devices are asked for, but this machine has {devices.num_devices}")
    num_bytes = num_parameters(model) * DTYPES[embed_dtype(config)].itemsize
    room = int(config.cache.memory_fraction * devices.total_bytes)
    if num_bytes > room:
        problems.append(
            f"{model.name} has {num_bytes / 1e9:.1f} GB of weights, which every device holds "
            f"whole, but {room / 1e9:.1f} GB of one may be used"
        )
    if problems:
        raise ConfigError(problems)


def embed_shape(
    config: EngineConfig, model: ModelConfig, max_length: int, devices: Devices
) -> EmbedShape:
    """The sizes of steps: widths doubling up to the longest text, rows up to the budget.

    Unless `max_model_len` says more, a decoder's texts have `DECODER_WIDTH` tokens at most: scores
    inside of a row grow with its square. `max_num_batched_tokens` and `max_num_seqs` are those of
    a device. Raises ConfigError where the budget holds no row of the longest text.
    """
    longest = config.model.max_model_len or max_length
    if model.encoder is None and config.model.max_model_len is None:
        longest = DECODER_WIDTH
    longest = min(longest, max_length)
    widths = [LEAST_WIDTH]
    while widths[-1] < longest:
        widths.append(2 * widths[-1])
    widths[-1] = longest
    num_devices = num_devices_of(config, devices.num_devices)
    budgets, rows = chosen_budgets(config, devices.budgets), []
    budget = budgets.max_num_batched_tokens
    if budget < longest:
        words = f"holds no text of {longest} tokens: raise it, or set a smaller max_model_len"
        raise ConfigError([f"max_num_batched_tokens = {budget} {words}"])
    for width in widths:
        counts = [1]
        while 2 * counts[-1] * width <= budget:
            counts.append(2 * counts[-1])
        rows.append(tuple(count * num_devices for count in counts))
    most = budgets.max_num_seqs * num_devices
    return EmbedShape(tuple(widths), tuple(rows), most, model.hidden_size, model.num_scores)

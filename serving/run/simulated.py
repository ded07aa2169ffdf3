"""A server on simulated devices: the model is its config alone. No JAX."""

import logging
import os
from dataclasses import dataclass, replace
from pathlib import Path

from serving.run.model_config import model_of
from serving.run.start import chat_template, check_names
from serving.server.options import ServerOptions, check_server, names_of
from serving.server.served import ServedModel
from serving.server.start_phases import Phases
from shiftjax.adapters.adapter import AdapterError
from shiftjax.adapters.pool import AdapterPool
from shiftjax.config import EngineConfig
from shiftjax.core.engine import Engine
from shiftjax.options import ConfigError
from shiftjax.sim.experiments import target_of
from shiftjax.sim.live import deploy_live, live_engine
from shiftjax.sim.models import find_model
from shiftjax.text.byte_tokenizer import END, byte_tokenizer, whole_text_ids
from shiftjax.text.generation_config import sampling_defaults
from shiftjax.text.tokenizer import Tokenizer, load_tokenizer
from shiftjax.weights.locate import hub_of

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Simulated:
    """An engine whose devices are simulated, and what the front ends know of it."""

    task = "simulate"
    engine: Engine
    served: ServedModel


def open_simulated(
    config: EngineConfig, options: ServerOptions, phases: Phases | None = None
) -> Simulated:
    """An engine of these settings on the machine that `simulate` names; nothing is loaded.

    Raises ConfigError, also for what cannot be simulated, CheckpointError and TokenizerError.
    """
    assert options.simulate is not None
    if phases is not None:
        phases("open", 0, 1)
    if options.profile_dir is not None:
        raise ConfigError(["profile_dir: simulated devices have nothing to profile; drop it"])
    model = find_model(model_of(config.model.model.removeprefix("random:"), hub_of(config.model)))
    tokenizer = _tokenizer(config)
    if tokenizer is None:
        if model.vocab_size <= END:
            words = f"{model.name} has too few tokens to spell bytes with: give it a tokenizer"
            raise ConfigError([words])
        tokenizer, model = byte_tokenizer(), replace(model, eos_token_ids=(END,))
    target = target_of(config, model, options.simulate)
    check_server(options, model, "generate")
    check_names(config, options)
    deployment = deploy_live(target, config)
    text_ids = whole_text_ids(tokenizer, model.vocab_size)
    if not text_ids:
        raise ConfigError([f"{model.name}: none of its tokenizer's tokens is text by itself"])
    try:
        engine = live_engine(target, deployment, text_ids)
    except AdapterError as error:
        raise ConfigError([f"lora_modules: {error}"]) from None
    cache = engine.lanes[0].scheduler.config
    machine = target.machine.name
    info = {
        "devices": f"simulated {machine}",
        "mesh": f"simulated {machine}: {deployment.mesh}",
        "policy": deployment.policy,
        "block_size": str(cache.block_size),
        "num_gpu_blocks": str(cache.num_whole_blocks),
        "enable_prefix_caching": str(cache.prefix_caching),
    }
    logger.warning("devices are simulated (%s): answers are made up, no model is loaded", machine)
    names = names_of(options.served_model_name or config.model.model)
    template = chat_template(tokenizer, options)
    chosen = config.model.generation_config, config.model.override_generation_config
    defaults = sampling_defaults(*chosen, _directory(config))
    told = {"simulated": machine, "defaults": defaults, "targets": deployment.targets}
    if deployment.lora.num_slots:
        adapters = engine.limits.adapters
        assert isinstance(adapters, AdapterPool)
        told |= {"adapters": adapters, "adapter_folder": deployment.lora.folder}
    served = ServedModel(names, tokenizer, template, info, **told)
    return Simulated(engine, served)


def _tokenizer(config: EngineConfig) -> Tokenizer | None:
    """That of the settings, or beside the model's config, if there is one."""
    directory = _directory(config)
    if config.model.tokenizer:
        return load_tokenizer(config.model.tokenizer)
    if directory is not None and (directory / "tokenizer.json").is_file():
        return load_tokenizer(directory)
    return None


def _directory(config: EngineConfig) -> Path | None:
    """Where the model's files are; None: it is known by its name alone."""
    path = Path(config.model.model.removeprefix("random:")).expanduser()
    if not os.path.exists(path):
        return None
    return path if path.is_dir() else path.parent

"""Models by what describes them, for what needs no weights. No JAX."""

import os
from pathlib import Path

from shiftjax.arch.config import ModelConfig
from shiftjax.options import ConfigError
from shiftjax.weights.locate import NEWEST, Hub, check_pinned, hub_config, is_hub_id


def model_of(name: str, hub: Hub = NEWEST) -> str | ModelConfig:
    """The model of a checkpoint's directory, a `config.json` or a hub id; other names as they are.

    Of a hub id only the configuration is read, and nothing where its last part is a known name.
    Raises ConfigError.
    """
    from shiftjax.sim.models import MODELS
    from shiftjax.weights.errors import CheckpointError
    from shiftjax.weights.hf_config import parse_config
    from shiftjax.weights.quant_config import with_modelopt
    from shiftjax.weights.typed_fields import read_json

    known = name.rpartition("/")[2].lower()
    try:
        of_hub = is_hub_id(name)
        if not of_hub:
            check_pinned(name, hub)
        elif hub == NEWEST and known in MODELS:
            return known
        if of_hub:
            path = hub_config(name, hub) / "config.json"
        elif os.path.isdir(name):
            path, known = Path(name, "config.json"), Path(name).resolve().name
        elif name.endswith(".json"):
            path, known = Path(name), Path(name).resolve().parent.name
        else:
            return name
        data = with_modelopt(read_json(path), path.parent)
        return parse_config(data, known, str(path))
    except CheckpointError as error:
        raise ConfigError(error.problems) from None

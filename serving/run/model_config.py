"""Models by what describes them, for what needs no weights. No JAX."""

import os
from pathlib import Path

from shiftjax.arch.config import ModelConfig
from shiftjax.options import ConfigError


def model_of(name: str) -> str | ModelConfig:
    """The model of a checkpoint's directory or a `config.json`; any other name as it is.

    Raises ConfigError.
    """
    from shiftjax.weights.errors import CheckpointError
    from shiftjax.weights.hf_config import parse_config
    from shiftjax.weights.quant_config import with_modelopt
    from shiftjax.weights.typed_fields import read_json

    path = Path(name)
    if os.path.isdir(name):
        path /= "config.json"
    elif path.suffix != ".json":
        return name
    try:
        data = with_modelopt(read_json(path), path.parent)
        return parse_config(data, path.resolve().parent.name, str(path))
    except CheckpointError as error:
        raise ConfigError(error.problems) from None

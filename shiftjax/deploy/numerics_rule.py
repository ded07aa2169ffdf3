"""What strict numerics are not had with yet. No JAX."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace

from shiftjax.arch.formats import FORMATS
from shiftjax.config import EngineConfig
from shiftjax.deploy.deployment import Deployment
from shiftjax.options import ConfigError


def check_numerics(config: EngineConfig, deployment: Deployment) -> None:
    """Raise ConfigError for what would break the promise of `numerics`, each by its name."""
    if not deployment.of_numerics.is_strict:
        return
    words = f"numerics = {deployment.numerics} cannot be had with"
    problems = [
        *_settings(deployment),
        *_of_model(deployment),
        *_formats(deployment),
    ]
    if problems:
        raise ConfigError([f"{words} {problem}; use numerics = fast" for problem in problems])


def with_equal_leaves(deployments: Iterable[Deployment]) -> list[Deployment]:
    """The same where each adds up what the others do, if `numerics` promises equal bits."""
    found = list(deployments)
    if not all(each.of_numerics.is_strict for each in found):
        return found
    leaves = math.lcm(*(each.layout.padded_for for each in found))
    return [replace(each, layout=replace(each.layout, leaves=leaves)) for each in found]


def _settings(deployment: Deployment) -> Iterator[str]:
    layout = deployment.layout
    if deployment.of_numerics.is_tree and layout.padded_for & (layout.padded_for - 1):
        words = "leaves are summed in a binary tree; integer has none"
        yield f"{layout.padded_for} devices of a group: {words}"
    if (speculation := deployment.drafts.speculation) in ("model", "hybrid"):
        yield f"speculation = {speculation}: speculators are not proven to draft the same tokens"
    if layout.by_position:
        yield "kv_split = position: devices would attend to a context in other parts"


def _of_model(deployment: Deployment) -> Iterator[str]:
    model = deployment.layout.model
    if model.layer_input_width:
        yield f"{model.name}, whose layers have inputs of their own: they are not proven"


def _formats(deployment: Deployment) -> Iterator[str]:
    formats = deployment.formats
    if FORMATS[formats.activations].dtype.itemsize > 2:
        words = "XLA sums products of float32 in another order where they have other rows"
        yield f"dtype = {formats.activations}: {words}"
    if FORMATS[formats.weights].is_packed:
        yield f"quantization = {formats.weights}: products of four bits are not proven"

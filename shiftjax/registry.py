"""What plugins may add to the engine; `serving/server/registry.py` is of the server. No JAX.

Each function adds a row to a table, and raises ValueError for a name that is taken.
"""

from shiftjax.arch.traits import DECODERS, Decoder
from shiftjax.arch.weights import FAMILIES
from shiftjax.core.policies import POLICIES
from shiftjax.core.policy import Policy
from shiftjax.options import add_choice

__all__ = ["Decoder", "Policy", "add_decoder", "add_policy"]


def add_decoder(model_type: str, decoder: Decoder) -> None:
    """Read checkpoints of this `model_type` as decoders that differ from Llama in these traits."""
    if model_type in FAMILIES:
        raise ValueError(f"there is a model type {model_type!r} already")
    DECODERS[model_type] = decoder
    FAMILIES[model_type] = FAMILIES["llama"]


def add_policy(policy: type[Policy]) -> None:
    """Offer a policy by its `name`, to the setting `policy` and to comparisons."""
    if policy.name in POLICIES:
        raise ValueError(f"there is a policy {policy.name!r} already")
    POLICIES[policy.name] = policy
    if not policy.is_simulated:
        add_choice("policy", policy.name)

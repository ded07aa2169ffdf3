"""The forward pass of every family of architectures: the device's side of `arch.weights`."""

from shiftjax.models.bert import Bert
from shiftjax.models.llama import Llama

FORWARD = {"llama": Llama, "bert": Bert}
"""Module classes by `Family.name`; each is made of a config and the weights by their names."""

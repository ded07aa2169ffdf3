"""One low-rank adapter in host memory (LoRA, arXiv 2106.09685). No JAX."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np


class AdapterError(ValueError):
    """What keeps an adapter from being served; one sentence says why."""


class Factor(NamedTuple):
    """What an adapter adds to a matrix: b (a x). Its scale is in b already."""

    a: np.ndarray  # [rank, in]
    b: np.ndarray  # [out, rank]


@dataclass(frozen=True, eq=False)
class Adapter:
    """An adapter as its files have it, by the names of the tensors that it changes."""

    name: str  # as which requests ask for it
    path: str
    digest: str  # of its numbers and its configuration: equal ones are one adapter
    rank: int  # the largest of its matrices
    factors: Mapping[str, Factor]

    @property
    def key(self) -> str:
        """What tells it from other adapters that had this name."""
        return f"{self.name}@{self.digest}"

"""Parts of a model: modules whose weights the weight table has under their names."""

from typing import Any

from flax import nnx
from jaxtyping import Array, Float

from shiftjax.arch.config import ModelConfig
from shiftjax.models.products import Matrix, project_in, project_out
from shiftjax.parallel.stored import INPUTS, SCALE

Params = dict[str, Any]  # name -> nnx.Param, or the Params of a part


class Part(nnx.Module):
    """A part of a model, with the weights that the table has under its name."""

    def __init__(self, config: ModelConfig, params: Params):
        self.config = config
        for name, param in params.items():
            setattr(self, name, param)

    def _out(self, x: Float[Array, "tokens in"], name: str) -> Float[Array, "..."]:
        """Multiply by a column-parallel matrix, stored `[*outputs, in]`: `[tokens, *outputs]`."""
        values, scale = getattr(self, name)[...], self._scale(name)
        matrix = Matrix(values.reshape(-1, values.shape[-1]), scale, self._scale(name, INPUTS))
        return project_out(x, matrix).reshape(x.shape[0], *values.shape[:-1])

    def _in(self, x: Float[Array, "tokens in"], name: str) -> Float[Array, "tokens out"]:
        """Multiply by a row-parallel matrix, stored `[*inputs, out]`, or in blocks of codes."""
        values, scale = getattr(self, name)[...], self._scale(name)
        if scale is None:
            values = values.reshape(-1, values.shape[-1])
        return project_in(x, Matrix(values, scale, self._scale(name, INPUTS)))

    def _scale(self, name: str, suffix: str = SCALE) -> Float[Array, " out"] | None:
        """Return what a matrix is in units of, or its inputs; None: they have no such scale."""
        scale = getattr(self, f"{name}{suffix}", None)
        return None if scale is None else scale[...].reshape(-1)

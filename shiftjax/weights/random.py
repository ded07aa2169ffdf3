"""Random weights of any architecture: to measure, to plan and to test without a checkpoint."""

from collections.abc import Mapping

import numpy as np

from shiftjax.arch.config import ModelConfig
from shiftjax.arch.formats import DTYPES
from shiftjax.arch.weights import expected_tensors, weights_of
from shiftjax.weights.random_codes import packed_tensors, random_bytes, read_random
from shiftjax.weights.source import TensorInfo, bounds, matrix_and_part, part_shape

_LOCATION = "random"
_BIAS_STD, _SMALL = 0.02, ("bias", "correction")


class RandomSource:
    """A TensorSource whose values depend on the seed, the tensor's name and the element only.

    Matrices are uniform with variance 1 / fan_in, so that activations keep their scale; norms
    are 1; biases are small. Philox is counter-based: a range of rows is produced without its
    predecessors and equals the same range of the whole tensor. Peak host memory of a read: the
    requested rows as float32, times about two.
    """

    location = _LOCATION

    def __init__(self, config: ModelConfig, seed: int = 0, dtype: str = "float32"):
        if not 0 <= seed < 2**64:
            raise ValueError(f"seed must be between 0 and 2**64 - 1, got {seed}")
        self.config = config
        self._kinds = {name: each.kind for each in weights_of(config) for name in each.tensors}
        self.tensors: Mapping[str, TensorInfo] = {
            name: TensorInfo(shape, DTYPES[dtype], _LOCATION)
            for name, shape in expected_tensors(config).items()
        }
        self._seed, self._packed = seed, packed_tensors(config)

    def read(self, name: str, index: tuple[slice, ...] = ()) -> np.ndarray:
        """See `TensorSource.read`."""
        matrix, suffix = matrix_and_part(name)
        if matrix in self._packed:
            return self._read_codes(matrix, suffix, index)
        info, kind = self.tensors[name], self._kinds[name]
        rows, *columns = bounds(info, index)
        shape = (rows.stop - rows.start, *info.shape[1:])
        if kind in ("norm", "head_norm"):
            return np.ones(shape, info.dtype)
        fan_in = int(np.prod(info.shape[1:], dtype=np.int64))
        values = _uniform(self._seed, name, rows.start * fan_in, rows.stop * fan_in)
        half_width = np.float32(np.sqrt(3.0) * (_BIAS_STD if kind in _SMALL else fan_in**-0.5))
        block = (values * half_width).reshape(shape)[(slice(None), *columns)]
        return np.ascontiguousarray(block.astype(info.dtype, copy=False))

    def _read_codes(self, name: str, suffix: str, index: tuple[slice, ...]) -> np.ndarray:
        info, codes = self.tensors[name], self.config.codes
        assert codes is not None
        shape = part_shape(info.shape, suffix, codes)
        rows, columns = bounds(info._replace(shape=shape), index)
        outputs, inputs = info.shape
        stream = self._seed, name
        block = read_random(stream, suffix, (outputs, inputs), codes, rows)[:, columns]
        return np.ascontiguousarray(block if suffix else block.astype(info.dtype, copy=False))


def _uniform(seed: int, name: str, start: int, stop: int) -> np.ndarray:
    """Elements [start, stop) of the tensor's stream, uniform in (-1, 1), float32."""
    raw = random_bytes((seed, name), 2 * start, 2 * stop)
    values = raw.view(np.uint16).astype(np.float32)
    values += np.float32(0.5 - 2**15)
    values *= np.float32(2**-15)
    return values

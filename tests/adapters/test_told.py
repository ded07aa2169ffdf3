"""An adapter as hosts tell it to each other."""

import struct

import ml_dtypes
import numpy as np
import pytest

from shiftjax.adapters.adapter import Adapter, Factor
from shiftjax.adapters.told import decode, encode
from shiftjax.hosts.calls import RESET, Recent, Step


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_what_is_told_is_what_was_read(dtype):
    rng = np.random.default_rng(0)
    factors = {
        name: Factor(rng.random((rank, 6)).astype(dtype), rng.random((8, rank)).astype(dtype))
        for name, rank in (("one", 2), ("two", 3))
    }
    adapter = Adapter("sql", "somewhere", "0123", 3, factors)
    call = encode(5, adapter)
    found = decode(call)
    assert found is not None
    slot, told = found
    assert (slot, told.key, told.rank, told.path) == (5, adapter.key, 3, "")
    assert told.factors.keys() == factors.keys()
    for name, (a, b) in factors.items():
        assert told.factors[name].a.dtype == a.dtype
        np.testing.assert_array_equal(told.factors[name].a, a)
        np.testing.assert_array_equal(told.factors[name].b, b)
    for end in range(8, len(call), 7):
        with pytest.raises((ValueError, struct.error)):
            decode(call[:end])


def test_other_calls_are_no_adapters():
    arrays = (np.arange(9, dtype=np.int32),)
    assert decode(Recent().encode(Step(3, 2, 1, 4, arrays))) is None
    assert decode(RESET) is None
    empty = decode(encode(0, Adapter("a", "", "b", 4, {})))
    assert empty is not None and empty[1].factors == {}

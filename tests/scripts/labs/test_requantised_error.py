"""What `scripts/labs/requantised_error.py` measures is what the formats are."""

import numpy as np
import pytest
from oracle import quantised_files

from scripts.labs import requantised_error

pytestmark = pytest.mark.thorough


def test_codes_are_those_of_the_formats():
    x = np.random.default_rng(0).standard_normal((40, 72)).astype(np.float32)
    blocks = quantised_files.fp8_blocks(x, (32, 32))[1]
    np.testing.assert_allclose(requantised_error.of_blocks(x, 32), blocks, rtol=1e-6)
    channels = quantised_files.fp8(x, "channel")[1]
    np.testing.assert_allclose(requantised_error.of_channels(x), channels, rtol=1e-6)


def test_errors_are_relative():
    x = np.array([[1.0, -2.0], [0.0, 2.0]])
    squares, mean = requantised_error.errors(np.array([[1.0, -1.0], [0.0, 2.0]]), x)
    assert (squares, mean) == (1 / 3, (0 + 0.5 + 0) / 3)

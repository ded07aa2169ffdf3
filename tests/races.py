"""What the race detector of Mosaic's interpreter finds."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks


@contextmanager
def watched_races() -> Iterator[list[Any]]:
    """Collect the findings of the race detector, kernel by kernel: it keeps only the last."""
    states = []
    detector = gpu_callbacks.GPURaceDetectionState

    def record(**options: Any) -> Any:
        states.append(detector(**options))
        return states[-1]

    gpu_callbacks.reset_gpu_interpret_mode_state()
    with mock.patch.object(gpu_callbacks, "GPURaceDetectionState", record):
        yield states

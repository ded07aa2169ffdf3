"""What a scale for each channel adds to matrices that were quantised in blocks.

    python scripts/labs/requantised_error.py [MODEL] [--block 128]

Every matrix of the layers is quantised to e4m3 with a scale for each square block, as checkpoints
of Qwen3-FP8 and DeepSeek are, and what these codes say once more with a scale for each output
channel, as the engine does it with blocks that are not 128 x 128. Three relative errors, by root
mean squares and as the mean over numbers that are not 0 (which is what a start logs and refuses
over a limit): of blocks, of channels made of the blocks (`added`), and of both; beside them
channels made directly.
NumPy alone; a median and a maximum over matrices.
"""

import argparse

import ml_dtypes
import numpy as np

from shiftjax.arch.weights import weights_of
from shiftjax.parallel.stored import can_be_codes
from shiftjax.weights.locate import open_source, resolve_model

E4M3 = ml_dtypes.float8_e4m3fn
LARGEST = np.float32(448)


def of_channels(x: np.ndarray) -> np.ndarray:
    """The numbers of codes with a scale for each row."""
    scale = np.abs(x).max(axis=1, keepdims=True) / LARGEST
    return (x / scale).astype(E4M3).astype(np.float32) * scale


def of_blocks(x: np.ndarray, block: int) -> np.ndarray:
    """The numbers of codes with a scale for each square block; those at the edges are smaller."""
    rows, columns = (np.arange(0, size, block) for size in x.shape)
    most = np.maximum.reduceat(np.maximum.reduceat(np.abs(x), rows, axis=0), columns, axis=1)
    scale = (most / LARGEST).repeat(block, axis=0).repeat(block, axis=1)
    scale = scale[: x.shape[0], : x.shape[1]]
    return (x / scale).astype(E4M3).astype(np.float32) * scale


def errors(found: np.ndarray, x: np.ndarray) -> tuple[float, float]:
    """Relative errors: by root mean squares, and the mean over numbers that are not 0."""
    far, some = np.abs(found - x), x != 0
    each = far[some] / np.abs(x[some])
    return float(np.linalg.norm(far) / np.linalg.norm(x)), float(each.mean())


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model", nargs="?", default="smollm2-135m")
    parser.add_argument("--block", type=int, default=128)
    args = parser.parse_args()
    source = open_source(resolve_model(args.model))
    rows: dict[str, list[tuple[float, float]]] = {}
    matrices = [weight for weight in weights_of(source.config) if can_be_codes(weight)]
    for name in (name for weight in matrices for name in weight.tensors):
        x = source.read(name).astype(np.float32)
        blocks = of_blocks(x, args.block)
        again = of_channels(blocks)
        for what, found, of in (
            ("blocks", blocks, x),
            ("added", again, blocks),
            ("both", again, x),
            ("channels", of_channels(x), x),
        ):
            rows.setdefault(what, []).append(errors(found, of))
    print(f"{args.model}, blocks of {args.block}: median / most of {len(rows['both'])} matrices")
    for what, found in rows.items():
        median, most = np.median(found, axis=0), np.max(found, axis=0)
        squares, mean = (f"{m:.2%} / {top:.2%}" for m, top in zip(median, most, strict=True))
        print(f"{what:10} root mean squares {squares}   mean of numbers {mean}")


if __name__ == "__main__":
    main()

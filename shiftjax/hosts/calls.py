"""One engine over several hosts: what they tell each other, as plain bytes. No JAX, no network.

The leader (rank 0) has engine, scheduler and policy. A follower has neither: it repeats the
leader's calls of compiled steps, in their order and with their inputs, as JAX asks of processes
that share a mesh.

    leader      prepare -> send a call -> launch
    follower                receive ----> launch -> say how far it is

Nothing has to be decided twice, so clocks, arrivals and random policies may differ.
"""

import struct
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np

from shiftjax.core.errors import EngineLostError

ACK_STEPS = 8  # a follower waits for a step, and says that it is done, whenever so many have gone
RESET = b""  # a call of its own: rebuild the pools
NOBODY = -1
_HEAD = struct.Struct("<QqIII")  # number, follows, program, sp, arrays that come behind
_CHANGE = struct.Struct("<III")  # which array, runs, elements
# Shape and type of each input of a program; raises IndexError for one that there is not.
Shapes = Callable[[int], Sequence[tuple[tuple[int, ...], np.dtype]]]


class LostHostError(EngineLostError):
    """Another host of the engine is gone, or does not do what this one does: the end of it."""


@runtime_checkable
class Hosts(Protocol):
    """The hosts of an engine, as each of them sees them."""

    @property
    def num(self) -> int:
        """How many there are."""
        ...

    def least(self, what: str, values: Sequence[int]) -> list[int]:
        """Wait for all hosts, each with as many values; returns the least of each value.

        Raises LostHostError if one does not come in time.
        """
        ...


@runtime_checkable
class Leader(Hosts, Protocol):
    """The hosts as the first one sees them."""

    def send(self, number: int, call: bytes) -> None:
        """Tell every follower to do a call, without waiting. Raises LostHostError."""
        ...

    def explain(self, error: Exception) -> LostHostError:
        """Why a step failed that others had a part in: a host that is gone, if one is."""
        ...


@runtime_checkable
class Follower(Hosts, Protocol):
    """The hosts as one of the others sees them."""

    def calls(self) -> Iterator[bytes | None]:
        """The leader's calls in their order, None in a pause, until it ends well.

        Raises LostHostError.
        """
        ...

    def done(self, number: int) -> None:
        """Tell the leader that so many calls are done."""
        ...


class Alone:
    """The only host."""

    num = 1

    def least(self, what: str, values: Sequence[int]) -> list[int]:
        """Its own values."""
        del what
        return list(values)


class Step(NamedTuple):
    """A call of a compiled step."""

    number: int  # of the call
    follows: int  # the number of the step whose sampled tokens it reads; NOBODY: none
    program: int
    sp: int  # names the mode in the group
    arrays: tuple[np.ndarray | None, ...]  # inputs; None: the neutral one, which all have


class Recent:
    """The inputs that a program was last called with, here and there the same.

    From step to step little of them changes: positions and slots, a row of a block table when a
    sequence gets a block. So a call holds the elements that differ from the program's call before.
    """

    def __init__(self):
        self._known: dict[tuple[int, int], np.ndarray] = {}

    def encode(self, step: Step) -> bytes:
        """Write a call, and remember its inputs."""
        given = [(i, array) for i, array in enumerate(step.arrays) if array is not None]
        parts = [_HEAD.pack(*step[:4], len(given))]
        for index, array in given:
            flat = _flat(array)
            starts, lengths = _runs(flat, self._before(step.program, index, flat.size))
            self._known[step.program, index] = flat
            values = flat[_places(starts, lengths)]
            parts += [_CHANGE.pack(index, len(starts), len(values)), starts, lengths, values]
        return b"".join(parts)

    def decode(self, call: bytes, shapes: Shapes) -> Step:
        """Undo `encode`, of calls in the same order. Raises ValueError for what is no call."""
        try:
            *head, count = _HEAD.unpack_from(call)
            inputs = shapes(head[2])
            arrays: list[np.ndarray | None] = [None] * len(inputs)
            at = _HEAD.size
            for _ in range(count):
                index, num_runs, num_values = _CHANGE.unpack_from(call, at)
                sizes, at = (num_runs, num_runs, num_values), at + _CHANGE.size
                parts = []
                for size in sizes:
                    parts.append(np.frombuffer(call, np.uint32, size, at))
                    at += 4 * size
                shape, dtype = inputs[index]
                num_words = -(-int(np.prod(shape)) * dtype.itemsize // 4)
                flat = self._before(head[2], index, num_words).copy()
                flat[_places(*parts[:2])] = parts[2]
                self._known[head[2], index] = flat
                arrays[index] = _shaped(flat, shape, dtype)
        except (struct.error, LookupError, ValueError) as error:
            raise ValueError(f"these {len(call)} bytes are no call: {error}") from None
        number, follows, program, sp = head
        return Step(number, follows, program, sp, tuple(arrays))

    def _before(self, program: int, index: int, size: int) -> np.ndarray:
        known = self._known.get((program, index))
        return np.zeros(size, np.uint32) if known is None else known


def _flat(array: np.ndarray) -> np.ndarray:
    """The bytes of an array as uint32, filled up with zeros."""
    data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return np.pad(data, (0, -data.size % 4)).view(np.uint32)


def _shaped(flat: np.ndarray, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    num_bytes = int(np.prod(shape)) * dtype.itemsize
    return flat.view(np.uint8)[:num_bytes].view(dtype).reshape(shape)


def _runs(new: np.ndarray, old: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Where neighbouring elements differ: (starts, lengths)."""
    places = np.flatnonzero(new != old).astype(np.uint32)
    if not places.size:
        return places, places
    ends = np.flatnonzero(np.diff(places) != 1)
    starts = places[np.concatenate([[0], ends + 1])]
    lengths = places[np.concatenate([ends, [-1]])] - starts + np.uint32(1)
    return starts, lengths.astype(np.uint32)


def _places(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """All elements of runs."""
    if not starts.size:
        return np.zeros(0, np.int64)
    ends = np.cumsum(lengths, dtype=np.int64)
    return np.arange(ends[-1]) + np.repeat(starts - (ends - lengths), lengths)

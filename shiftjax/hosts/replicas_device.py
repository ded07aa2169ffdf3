"""Steps of groups that are on other hosts: the leader packs them, followers run them.

    leader     prepare -> call ...                                   hear a result -> commit
    follower                    decode -> copies -> launch -> fetch -> tell

Every host compiles the same programs for groups of one layout, so the place of a program among them
says which one it is. A follower answers each call, in the order of its group.
"""

import json
import queue
import struct
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import jax
import numpy as np

from shiftjax.core.request import StepOutput, StepPlan
from shiftjax.device.packer import Packer, Prepared
from shiftjax.device.runner import NO_ROWS, DeviceRunner, Handle, output_of, send_results
from shiftjax.device.sampling_inputs import RowMasks
from shiftjax.device.step import StepResult
from shiftjax.hosts.calls import NOBODY, Follower, Recent, Step
from shiftjax.hosts.replicas import Call, HostGoneError, Moves, Replicas, decode, encode, moves_of
from shiftjax.parallel.grid import Group, Mode

MOST_IN_FLIGHT = 4  # steps whose sampled tokens a later one may read
_ANSWER = struct.Struct("<IQI")  # group, number of the call, bytes that say what follows
FETCHED = ("summary", "top_ids", "top_logprobs", "guesses")


class Sent(NamedTuple):
    """A call of which the answer is awaited."""

    number: int
    counts: Call


class RemoteGroups:
    """The groups of one follower: who awaits which answer. Heard on any thread."""

    def __init__(self, hosts: Replicas, rank: int):
        self.hosts, self.rank = hosts, rank
        self._changed = threading.Condition()
        self._answers: dict[tuple[int, int], bytes] = {}
        self._forgotten: dict[int, int] = {}
        self._is_here = False
        hosts.listen(rank, self._hear, self._lose)

    def begin(self) -> None:
        """The host has come, and computes from now on."""
        with self._changed:
            self._is_here = True
            self._answers.clear()
            self._forgotten.clear()

    def call(self, call: Call) -> None:
        """Send a call. Raises HostGoneError."""
        self.hosts.call(self.rank, encode(call))

    def has(self, group: int, number: int) -> bool:
        """Whether an answer is there, or never comes."""
        with self._changed:
            return not self._is_here or (group, number) in self._answers

    def answer(self, group: int, number: int) -> bytes:
        """Wait for the answer of a call, and take it. Raises HostGoneError."""
        with self._changed:
            self._changed.wait_for(lambda: not self._is_here or (group, number) in self._answers)
            found = self._answers.pop((group, number), None)
        if found is None:
            raise HostGoneError(f"host {self.rank} is gone")
        return found

    def forget(self, group: int, number: int) -> None:
        """Nobody asks for the answers of a group up to a number any more."""
        with self._changed:
            self._forgotten[group] = number
            for key in [key for key in self._answers if key[0] == group]:
                del self._answers[key]

    def _hear(self, data: bytes) -> None:
        group, number, _ = _ANSWER.unpack_from(data)
        with self._changed:
            if number > self._forgotten.get(group, 0):
                self._answers[group, number] = data
                self._changed.notify_all()

    def _lose(self) -> None:
        with self._changed:
            self._is_here = False
            self._changed.notify_all()


class RemoteRunner:
    """Runs steps of one group of a follower; see `core.request.Runner`.

    `own` is the runner of a group here that has the same programs, `group` the place of the other
    among those of its host.
    """

    def __init__(self, own: DeviceRunner, groups: RemoteGroups, group: int):
        packer = own.packer
        self._own, self._groups, self._group = own, groups, group
        self._packer = Packer(packer.step, packer.pool, own.programs, packer.seed)
        self._recent, self._number = Recent(), 0

    def begin(self) -> None:
        """The host has come anew: it knows of nothing that was sent before."""
        self._groups.begin()
        self._recent, self._number = Recent(), 0

    def run(self, plan: StepPlan, mode: Mode, previous_handle: Sent | None) -> Sent:
        """Have the host dispatch one step, after the copies of its plan. Raises HostGoneError."""
        call = Call(self._group, self._number + 1, moves_of(plan))
        if plan.scheduled:
            prepared = self._packer.prepare(plan)
            mode = self._own.mode_for(prepared, mode)
            arrays = (prepared.flat, *(prepared.tables or RowMasks()))
            follows = NOBODY if previous_handle is None else previous_handle.number
            step = Step(call.number, follows, prepared.program, mode.sp, arrays)
            call = call._replace(
                step=self._recent.encode(step),
                num_rows=plan.num_rows,
                wants_top=prepared.wants_top,
                num_guesses=plan.num_guesses,
                num_seqs=len(plan.scheduled),
                num_tokens=plan.num_tokens,
            )
        return self._send(call)

    def is_ready(self, handle: Sent) -> bool:
        """Whether `fetch` would not wait."""
        return self._groups.has(self._group, handle.number)

    def fetch(self, handle: Sent) -> StepOutput:
        """Wait for a step. Raises HostGoneError, and RuntimeError for what made it fail there."""
        data = self._groups.answer(self._group, handle.number)
        error, arrays = decode_answer(data)
        if error is not None:
            raise RuntimeError(f"host {self._groups.rank}: {error}")
        call = handle.counts
        if not call.step:
            return NO_ROWS
        counts = call.num_rows, call.wants_top, call.num_guesses, call.num_seqs
        make: Any = StepResult
        result = make(*(arrays.get(name) for name in FETCHED))
        nothing: Any = None
        return output_of(Handle(nothing, result, *counts, num_tokens=call.num_tokens))

    def reset(self) -> None:
        """Have the host rebuild the pools of the group. One that is gone has none."""
        with suppress(HostGoneError):
            self._send(Call(self._group, self._number + 1, resets=True))
        self._groups.forget(self._group, self._number)

    def _send(self, call: Call) -> Sent:
        self._number = call.number
        self._groups.call(call)
        return Sent(call.number, call)


def answer_of(call: Call, arrays: Mapping[str, np.ndarray], error: str | None = None) -> bytes:
    """Return what a follower answers: arrays by name, or why there are none."""
    shapes = {name: (array.dtype.name, array.shape) for name, array in arrays.items()}
    head = json.dumps({"error": error, "arrays": shapes}).encode()
    parts = (np.ascontiguousarray(array).tobytes() for array in arrays.values())
    return b"".join([_ANSWER.pack(call.group, call.number, len(head)), head, *parts])


def decode_answer(data: bytes) -> tuple[str | None, dict[str, np.ndarray]]:
    """Undo `answer_of`: what went wrong, and the arrays."""
    *_, size = _ANSWER.unpack_from(data)
    at = _ANSWER.size + size
    told, arrays = json.loads(data[_ANSWER.size : at]), {}
    for name, (dtype, shape) in told["arrays"].items():
        count = int(np.prod(shape))
        arrays[name] = np.frombuffer(data, dtype, count, at).reshape(shape)
        at += arrays[name].nbytes
    return told["error"], arrays


class _Group:
    """One of a follower's groups at work. Its answers come from a thread that waits for steps."""

    def __init__(self, runner: DeviceRunner, tell: Callable[[bytes], None]):
        self._runner, self._tell = runner, tell
        self._modes = {mode.sp: mode for mode in runner.step.layout.modes}
        self._recent, self._sampled = Recent(), dict[int, jax.Array]()
        self._failed: int | None = None  # the number of a call; those on top of it fail, too
        self._pools = 0  # how often they have been rebuilt
        self._flying: queue.SimpleQueue[tuple[Call, int, StepResult | None, str | None]]
        self._flying = queue.SimpleQueue()
        threading.Thread(target=self._answer, name="answers", daemon=True).start()

    def do(self, call: Call) -> None:
        """Dispatch a call. What fails is answered, and so are calls on top of it."""
        result, error = None, None
        try:
            if call.resets:
                self._runner.reset()
                self._failed, self._pools = None, self._pools + 1
            elif self._failed is not None:
                error = f"call {self._failed} of the group has failed"
            else:
                self._move(call.moves)
                if call.step:
                    result = self._launch(call)
                else:
                    self._runner.memory.settle()
        except Exception as failure:
            error = self._fail(call, self._pools, failure)
        self._flying.put((call, self._pools, result, error))

    def _fail(self, call: Call, pools: int, error: Exception) -> str:
        if pools == self._pools:
            self._failed = call.number
        return f"{type(error).__name__}: {error}"

    def _move(self, moves: Moves | None) -> None:
        moves = moves or Moves([], [], [], [], [])
        plan = StepPlan([], 0, 0, 0, moves.offloads, moves.restores, step_id=0)
        plan.dropped, plan.prefetches = moves.dropped, moves.prefetches
        plan.unit_restores = moves.unit_restores
        self._runner.move_blocks(plan)

    def _launch(self, call: Call) -> StepResult:
        runner = self._runner
        step = self._recent.decode(call.step, runner.packer.shapes)
        flat, *tables = step.arrays
        assert flat is not None
        prepared = Prepared(step.program, flat, RowMasks(*tables), call.wants_top)
        last = None if step.follows == NOBODY else self._sampled[step.follows]
        mode = runner.mode_for(prepared, self._modes[step.sp])
        tokens, result, _ = runner.launch(prepared, mode, last)
        send_results(result, call.num_guesses)
        self._sampled[call.number] = tokens
        self._sampled.pop(call.number - MOST_IN_FLIGHT, None)
        return result

    def _answer(self) -> None:
        while True:
            call, pools, result, error = self._flying.get()
            arrays: dict[str, np.ndarray] = {}
            try:
                if result is not None:
                    arrays = _fetched(call, result)
            except Exception as failure:
                error = self._fail(call, pools, failure)
            self._tell(answer_of(call, arrays, error))


def _fetched(call: Call, result: StepResult) -> dict[str, np.ndarray]:
    """Wait for what is wanted of a step."""
    rows = call.num_rows
    found = {"summary": np.asarray(result.summary)[:rows]}
    if call.wants_top:
        found["top_ids"] = np.asarray(result.top_ids)[:rows]
        found["top_logprobs"] = np.asarray(result.top_logprobs)[:rows]
    if call.num_guesses:
        found["guesses"] = np.asarray(result.guesses)
    return found


def serve_groups(
    runners: Sequence[DeviceRunner], hosts: Follower, answer: Callable[[bytes], None]
) -> None:
    """Do the leader's calls for groups of this host until it ends. Raises LostHostError."""
    groups = [_Group(runner, answer) for runner in runners]
    for data in hosts.calls():
        if data is not None:
            call = decode(data)
            groups[call.group].do(call)


def remote_runners(
    own: Mapping[Group, DeviceRunner], hosts: Replicas
) -> tuple[dict[Group, "RemoteRunner"], dict[Group, int]]:
    """Return runners of the other hosts' groups, numbered after those here, and their ranks."""
    end = max(group.first + group.width for group in own)
    runners, host_of = dict[Group, RemoteRunner](), dict[Group, int]()
    for rank in range(1, hosts.num):
        remote = RemoteGroups(hosts, rank)
        for place, (group, runner) in enumerate(own.items()):
            there = Group(group.first + rank * end, group.width)
            runners[there], host_of[there] = RemoteRunner(runner, remote, place), rank
    return runners, host_of

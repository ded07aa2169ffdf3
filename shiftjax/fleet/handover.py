"""Running requests go from groups to others on the same units, with what they have computed.

A sequence keeps its tokens, its place in every order and its state of sampling; only where its keys
and values lie changes. A wide block holds the tokens of several narrow ones of one narrow group, on
every unit a part of the heads (`fleet/mover_device.py` moves them). What finds no room is
preempted by the rule of the scheduler: recomputed, the youngest first.

Sequences are carried one after the other, in their order, and each gives up its old blocks when it
has the new ones. In a full pool it gives up an old block just before it takes the new one, which
may be the same: that suffices, if blocks are moved in this order, too, and what is read at once is
read before anything is written.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter
from typing import NamedTuple, Protocol, runtime_checkable

from shiftjax.core.lane import Lane
from shiftjax.core.request import SequenceState, Status
from shiftjax.fleet.shared_blocks import SharedBlocks, plan_compaction
from shiftjax.parallel.arrangements import Change
from shiftjax.parallel.grid import Group, unit_order

# Old blocks that hold the tokens of a wide one, how many new ones, which, if they have moved.
_Part = tuple[tuple[int, ...], int, Sequence[int] | None]
Pair = tuple[int, tuple[int, ...], int]  # place of the narrow group, its blocks, the wide block


class Crossing(NamedTuple):
    """Blocks between one wide group and narrow groups of one width, in the order to move them.

    A place is that of a narrow group among the devices that exchange, `places`.
    """

    wide: Group
    narrow_width: int
    to_wide: bool
    pairs: list[Pair]


class Copy(NamedTuple):
    """Blocks that move inside their pool, `(block, new block)`."""

    group: Group
    blocks: list[tuple[int, int]]


@runtime_checkable
class Mover(Protocol):
    """Moves keys and values in device memory, in order with the steps of all groups."""

    def move(self, crossing: Crossing) -> None:
        """Move the blocks of a crossing; nothing is awaited. Raises whatever made it fail."""
        ...

    def compact(self, copy: Copy) -> None:
        """Copy blocks inside a pool; no new block is one that is copied."""
        ...


def calls(pairs: Sequence[Pair], ways: int, per_call: int) -> list[list[list[Pair]]]:
    """Pairs by place, `ways` lists of at most `per_call`, for one call of devices after the other.

    A call takes as long as a full one, so pairs of a place that is full wait for a later call, and
    those of others go first. A call reads all of its blocks before it writes any; so a pair may not
    come before one that is ahead of it and reads what it writes.
    """
    found: list[list[list[Pair]]] = []
    has_room = [0] * ways  # the first call with room for a place
    read_narrow: dict[int, int] = {}  # by block: the last call that has it on the narrow side
    read_wide: dict[int, int] = {}
    for pair in pairs:
        place, blocks, wide = pair
        number = max(has_room[place], read_narrow.get(wide, 0))
        number = max(number, *(read_wide.get(block, 0) for block in blocks))
        while number < len(found) and len(found[number][place]) == per_call:
            number += 1
        found += [[[] for _ in range(ways)] for _ in range(len(found), number + 1)]
        found[number][place].append(pair)
        while has_room[place] < len(found) and len(found[has_room[place]][place]) == per_call:
            has_room[place] += 1
        read_wide[wide] = max(number, read_wide.get(wide, 0))
        for block in blocks:
            read_narrow[block] = max(number, read_narrow.get(block, 0))
    return found


@dataclass(slots=True)
class Handover:
    """What a change of groups comes to: blocks to copy first, then blocks to move, in order."""

    copies: list[Copy] = field(default_factory=list)
    moves: list[tuple[int, Pair]] = field(default_factory=list)  # with the width of the narrow side
    num_sequences: int = 0  # that run on without recomputing anything
    num_recomputed: int = 0

    @property
    def num_narrow_blocks(self) -> int:
        """Blocks of the narrow side that cross."""
        return sum(len(blocks) for _, (_, blocks, _) in self.moves)

    @property
    def num_unit_blocks(self) -> int:
        """The same, each counted by the units that hold parts of it."""
        return sum(width * len(blocks) for width, (_, blocks, _) in self.moves)

    def crossings(self, change: Change) -> list[Crossing]:
        """The moves, those of neighbouring ones together that are between the same widths."""
        return [
            Crossing(change.wide, width, change.is_bind, [pair for _, pair in pairs])
            for width, pairs in groupby(self.moves, key=itemgetter(0))
        ]


def place_of(wide: Group, narrow: Group) -> int:
    """The place of a narrow group among those in a wide one."""
    return unit_order(wide.width // narrow.width)[(narrow.first - wide.first) // narrow.width]


def hand_over(sources: Sequence[Lane], targets: Sequence[Lane], change: Change) -> Handover:
    """Carry all requests of `sources` to `targets`; no step of either may be in flight.

    Queues and block tables are those of the targets when it returns; what it returns has yet to be
    moved, before any step of theirs.
    """
    handover = Handover()
    if change.is_bind:
        handover.copies = make_room(targets[0], sources, _blocks_of_all(sources, targets[0]))
    routes: dict[tuple[Group, Group], _Route] = {}
    requests = [
        (siblings[0].order, name, source)
        for source in sources
        for name, siblings in source.scheduler.requests.items()
    ]
    for _, name, source in sorted(requests, key=itemgetter(0)):
        target = _target_for(source.scheduler.requests[name], targets)
        siblings = source.scheduler.detach(name)
        ends = source.group, target.group
        if ends not in routes:
            routes[ends] = _Route(source, target, change, handover)
        room = target.scheduler.config.max_num_seqs - len(target.scheduler.running)
        for sequence in siblings:
            if sequence.status is not Status.FINISHED:
                room -= routes[ends].carry(sequence, room > 0)
        target.scheduler.attach(siblings)
    return handover


def start_anew(
    lanes: Sequence[Lane], targets: Sequence[Lane], requests: Sequence[list[SequenceState]]
) -> None:
    """After a hand-over that has gone wrong: all requests begin from their tokens in the targets.

    `requests` are all that the lanes had before it; whose continuations have all ended are left.
    """
    for lane in lanes:
        lane.scheduler.disown()
    for number, siblings in enumerate(requests):
        for sequence in siblings:
            targets[0].scheduler.tables.leave_tier(sequence)
            sequence.block_table = []
            sequence.num_computed_tokens = sequence.num_verified_tokens = 0
            sequence.num_pending_tokens = sequence.num_registered_blocks = 0
            if sequence.status is not Status.FINISHED:
                sequence.status = Status.WAITING
        if any(sequence.status is Status.WAITING for sequence in siblings):
            targets[number % len(targets)].scheduler.attach(siblings)


def make_room(wide: Lane, lanes: Sequence[Lane], num_blocks: int) -> list[Copy]:
    """Free so many block numbers on all units of a wide group, as far as that goes, by copies.

    `lanes` are those on its units whose tables hold blocks; no step of theirs may be in flight.
    """
    by_owner = {id(lane.scheduler.tables.device): lane for lane in lanes}
    owners = [shared_blocks_of(lane) for lane in lanes]
    copies: dict[Group, Copy] = {}
    for owner, block, new in plan_compaction(shared_blocks_of(wide), owners, num_blocks):
        lane = by_owner[id(owner)]
        owner.replace(block, new)
        copies.setdefault(lane.group, Copy(lane.group, [])).blocks.append((block, new))
    for group, copy in copies.items():
        (lane,) = (lane for lane in lanes if lane.group == group)
        lane.scheduler.tables.rename(dict(copy.blocks), lane.scheduler.running)
    return list(copies.values())


class _Route:
    """From one group to another: which new blocks the old ones have become.

    Full blocks that several tables share are moved once, and shared again. Nobody else's key can
    be the same, because a block that was moved is given to nobody by its old group.
    """

    def __init__(self, source: Lane, target: Lane, change: Change, handover: Handover):
        self.source, self.target, self.handover = source.scheduler, target.scheduler, handover
        self.old, self.new = shared_blocks_of(source), shared_blocks_of(target)
        self.to_wide = change.is_bind
        narrow = source.group if self.to_wide else target.group
        self.width, self.place = narrow.width, place_of(change.wide, narrow)
        sizes = self.source.config.block_size, self.target.config.block_size
        self.several = max(sizes) // min(sizes)  # narrow blocks of a wide one
        self.moved: dict[tuple[int, ...], list[int]] = {}  # new blocks of full old ones

    def carry(self, sequence: SequenceState, has_room: bool) -> bool:
        """Give a detached sequence blocks of the target, or the fate of the preempted; if it runs.

        `has_room`: the target may have one more running sequence.
        """
        runs = sequence.status is Status.RUNNING
        if not runs and self.source.tables.is_swapped_out(sequence):
            return False  # any group reads it from there
        if runs and has_room and self._change_blocks(sequence):
            self.handover.num_sequences += 1
            sequence.num_registered_blocks = 0
            return True
        self.handover.num_recomputed += runs
        self.source.forget(sequence)
        return False

    def _change_blocks(self, sequence: SequenceState) -> bool:
        """Take new blocks for all its tokens and give up the old ones; whether there is room."""
        num_blocks = self.new.blocks_for(len(sequence.token_ids))
        parts = [
            (part, count, self.moved.get(part) if is_full else None)
            for part, count, is_full in self._parts(
                sequence.block_table, sequence.num_computed_tokens
            )
        ]
        num_shared = sum(len(shared) for _, _, shared in parts if shared is not None)
        if self.new.num_free_blocks >= num_blocks - num_shared:
            old, table = sequence.block_table, []
            fresh = self.new.allocate_many(num_blocks - num_shared)
            mine: dict[tuple[int, ...], list[int]] = {}
            next_one = 0
            for part, count, shared in parts:
                if shared is not None:
                    self.new.retain(shared)
                    table += shared
                    continue
                mine[part] = fresh[next_one : next_one + count]
                next_one += count
                table += mine[part]
            sequence.block_table = table + fresh[next_one:]
            self.old.release(old)
            self._note(mine)
            return True
        return self._change_one_by_one(sequence, parts, num_blocks)

    def _change_one_by_one(
        self, sequence: SequenceState, parts: Sequence[_Part], num_blocks: int
    ) -> bool:
        """The same where a new block may have to be an old one, given up just before.

        So a sequence may fill its old group. Whether there is room shows on the way; where there
        is not, what it has got is given back, and nothing of it is moved.
        """
        old, new = self.old, self.new
        left, table = sequence.block_table, []
        mine: dict[tuple[int, ...], list[int]] = {}
        for part, count, shared in parts:
            old.release(part)
            left = left[len(part) :]
            if shared is not None:
                new.retain(shared)
                table += shared
                continue
            if new.num_free_blocks < count:
                break
            mine[part] = new.allocate_many(count)
            table += mine[part]
        old.release(left)
        sequence.block_table = []
        is_moved = len(table) * self.target.config.block_size >= sequence.num_computed_tokens
        if not is_moved or num_blocks - len(table) > new.num_free_blocks:
            new.release(table)
            return False
        sequence.block_table = table + new.allocate_many(num_blocks - len(table))
        self._note(mine)
        return True

    def _note(self, moved: dict[tuple[int, ...], list[int]]) -> None:
        """New blocks of old ones, to be moved in this order."""
        for part, blocks in moved.items():
            ends = (part, blocks[0]) if self.to_wide else (tuple(blocks), part[0])
            self.handover.moves.append((self.width, (self.place, *ends)))
        self.moved |= moved

    def _parts(self, old: list[int], computed: int) -> Iterator[tuple[tuple[int, ...], int, bool]]:
        """What is computed, by wide block: old blocks, how many new ones, whether it is full."""
        wide_size = max(self.source.config.block_size, self.target.config.block_size)
        narrow_size = wide_size // self.several
        for number in range(-(-computed // wide_size)):
            num_tokens = min(wide_size, computed - number * wide_size)
            narrow = -(-num_tokens // narrow_size)
            if self.to_wide:
                first = number * self.several
                part, count = tuple(old[first : first + narrow]), 1
            else:
                part, count = (old[number],), narrow
            yield part, count, num_tokens == wide_size


def _target_for(siblings: list[SequenceState], targets: Sequence[Lane]) -> Lane:
    """The least loaded of the groups that have room for a request, else of all."""
    if len(targets) == 1:
        return targets[0]
    running = [each for each in siblings if each.status is Status.RUNNING]

    def order(lane: Lane) -> tuple[bool, int]:
        blocks = lane.scheduler.tables.device
        needed = sum(blocks.blocks_for(len(each.token_ids)) for each in running)
        num_seqs = len(lane.scheduler.running) + len(running)
        lacks = needed > blocks.num_free_blocks or num_seqs > lane.scheduler.config.max_num_seqs
        return lacks, blocks.num_used_blocks * blocks.block_size + lane.scheduler.num_waiting_tokens

    return min(targets, key=order)


def _blocks_of_all(lanes: Sequence[Lane], target: Lane) -> int:
    """Blocks that the running sequences of some groups take in another one, shared ones apart."""
    blocks_for = target.scheduler.tables.device.blocks_for
    sequences = [each for lane in lanes for each in lane.scheduler.running]
    return sum(blocks_for(len(sequence.token_ids)) for sequence in sequences)


def shared_blocks_of(lane: Lane) -> SharedBlocks:
    """Return the blocks of a group, as it shares them with others."""
    blocks = lane.scheduler.tables.device
    assert isinstance(blocks, SharedBlocks), "groups that come and go share their blocks"
    return blocks

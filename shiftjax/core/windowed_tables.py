"""Block tables of models that see only so far back: a table for each cache group. No JAX.

    tokens         0 ....................................... p        p is computed next
    group 0        [ a ][ b ][ c ][ d ][ e ][ f ][ g ][ h ]           sees everything
    group 1        [ 0 ][ 0 ][ 0 ][ 0 ][ 0 ][ r ][ s ][ t ]           sees a window: 0 was lost

All groups take their blocks from one pool. A prompt gets all blocks of group 0 at its admission; of
groups with a window it gets as many as a window and the largest step take, and holds so many until
it is computed: what falls behind makes room for what comes next. So its chunks never wait for each
other here, either. Then blocks are lost whenever the tables grow.

A prefix is found as far as group 0 has all of it and each other group what the next token sees.
"""

import operator
from collections.abc import Iterable, Sequence
from itertools import chain

from shiftjax.arch.cache import blocks_kept
from shiftjax.core.block_tables import BlockTables
from shiftjax.core.blocks import (
    BlockAllocator,
    CachedPrefix,
    block_tokens,
    extend_hashes,
)
from shiftjax.core.kept_blocks import KeptBlocks
from shiftjax.core.notes import Notes
from shiftjax.core.request import Request, SequenceState, StepPlan
from shiftjax.core.scheduler_config import SchedulerConfig
from shiftjax.core.tier import Place, Tier
from shiftjax.core.window_blocks import WindowBlocks
from shiftjax.core.window_prefixes import Found, Prefixes, key_of

IN_FLIGHT = 2  # steps that may sample for a sequence at a time
LOST = 0  # the null block, which may be read: what is there is behind the window


def tables_of(
    config: SchedulerConfig,
    blocks: BlockAllocator | None,
    tier: Tier | None,
    notes: Notes | None = None,
) -> BlockTables:
    """Return the tables of a group; `blocks` are those of a pool that groups share, if it is one.

    Raises ValueError for windows in a pool that groups share.
    """
    if any(config.windows):
        if blocks is not None:
            raise ValueError("Groups that share a pool lose no blocks behind windows.")
        return WindowedTables(config, tier, notes)
    sizes = config.num_blocks, config.block_size
    device = blocks or BlockAllocator(*sizes)
    if blocks is None and config.kept_share:
        device = KeptBlocks(*sizes, config.kept_share)
    caches, hash_size = config.prefix_caching, config.hash_size
    return BlockTables(device, tier, config.model, caches, hash_size, config.kv, notes)


class WindowedTables(BlockTables):
    """Block tables of a group whose model has windows, `SchedulerConfig.windows` by cache group."""

    device: WindowBlocks

    def __init__(
        self, config: SchedulerConfig, tier: Tier | None = None, notes: Notes | None = None
    ):
        device = WindowBlocks(config.num_blocks, config.block_size)
        super().__init__(device, tier, config.model, config.prefix_caching, 0, config.kv, notes)
        self._windows = config.windows
        self._groups = range(len(config.windows))
        self._step_tokens = config.max_num_batched_tokens
        self._unverified = IN_FLIGHT + config.max_proposed_rows  # tokens of a sequence, at most
        self._prefixes = Prefixes(self, device, config.windows)
        self._first = self._prefixes.first

    def _most(self, group: int, num_blocks: int) -> int:
        """The most blocks of a group that a sequence of `num_blocks` holds at its admission."""
        window, size = self._windows[group], self.block_size
        return blocks_kept(num_blocks * size, window, size, self._step_tokens)

    # ------------------------------------------------------------------ prefixes

    def num_known_tokens(self, request: Request, hashes: list[bytes]) -> int:
        """Tokens of a prompt that an admission would find computed now; changes nothing here."""
        if not self.prefix_caching or request.sampling.prompt_logprobs is not None:
            return 0
        if self._windows[0] is None:
            count = super().num_known_tokens(request, hashes) // self.block_size
        else:
            tokens = list(request.prompt_token_ids)
            count = (len(tokens) - 1) // self.block_size
            extend_hashes(hashes, self._root(request, self.version), tokens, self.block_size)
            count = self._noted(request, hashes, count)
        return self._prefixes.longest(hashes, count) * self.block_size

    def _find(self, sequence: SequenceState, shortage: int) -> Found:
        """What is there of a sequence; nothing of it has a reference yet.

        With a `shortage` too large for any hit to help, the search ends at once.
        """
        if sequence.places:
            hashes = self._hashes(sequence) if self._may_have_prefix(sequence) else ()
            return self._prefixes.swapped(sequence, hashes)
        found = self._prefixes.nothing
        if self._may_have_prefix(sequence):
            hashes = self._hashes(sequence)
            limit = self._findable(sequence)
            count = self._prefixes.num_found(hashes, sequence.token_ids, limit, shortage)
            found = self._prefixes.found(hashes, sequence.token_ids, count)
        shared = self._of_sibling(sequence)
        return shared if shared.num_tokens > found.num_tokens else found

    def _of_sibling(self, sequence: SequenceState) -> Found:
        """The full blocks of the prompt, where a sibling holds what of them the next token sees."""
        count = (sequence.num_prompt_tokens - 1) // self.block_size
        num_tokens, firsts = count * self.block_size, self._prefixes.firsts(count)
        for sibling in () if sequence.wants_prompt_logprobs else sequence.siblings:
            is_computed = sibling.num_verified_tokens >= num_tokens
            if sibling is sequence or not sibling.block_table or not is_computed:
                continue
            if all(map(operator.le, sibling.first_blocks, firsts)):
                tables = zip(sibling.tables, firsts, strict=True)
                return Found(num_tokens, firsts, [table[first:count] for table, first in tables])
        return self._prefixes.nothing

    # ------------------------------------------------------------------ tables

    def admit(self, sequence: SequenceState, reserve: int) -> bool:
        """Give a waiting sequence its blocks, and leave `reserve` blocks free.

        All that it needs of groups that see everything; of others what a window and a step take.
        False if there is no room.
        """
        if sequence.places and not self.is_swapped_out(sequence):
            self.forget(sequence)  # given up since
        num_tokens, device = len(sequence.token_ids), self.device
        num_blocks = device.blocks_for(num_tokens)
        room = device.num_free_blocks - reserve
        most = sum(self._most(group, num_blocks) for group in self._groups)
        found = self._find(sequence, most - room)
        ends, shared = self._ends(found, num_blocks), found.blocks
        num_held = sum(end - first for end, first in zip(ends, found.firsts, strict=True))
        if num_held - len(shared) + device.num_revived(shared) > room:
            return False
        device.retain(shared)  # before allocating, which could evict them
        self._fill(sequence, found, ends)
        self.num_prefix_query_tokens += num_tokens
        if not sequence.places:
            self.num_prefix_hit_tokens += found.num_tokens
            self._find_in_tier(sequence, found.num_on_device)  # which counts what it is asked for
        self.leave_tier(sequence)
        sequence.num_computed_tokens = max(sequence.num_computed_tokens, found.num_tokens)
        return True

    def _ends(self, found: Found, num_blocks: int) -> list[int]:
        """How far the tables of an admitted sequence go.

        What other tables hold, too, makes no room when it is lost: there is as much more.
        """
        ends = []
        for group, first, own in zip(self._groups, found.firsts, found.sources, strict=True):
            blocks = [each for each in own if isinstance(each, int)]
            num_more = len(blocks) - self.device.num_revived(blocks)
            most = first + self._most(group, num_blocks) + num_more
            ends.append(num_blocks if self._windows[group] is None else min(num_blocks, most))
        return ends

    def _fill(self, sequence: SequenceState, found: Found, ends: Sequence[int]) -> None:
        """Make the tables of what was found, which has references, and of fresh blocks."""
        tables, restored = [], found.num_tokens // self.block_size
        for first, end, own in zip(found.firsts, ends, found.sources, strict=True):
            table = [LOST] * first
            places: list[Place] = []
            targets: list[int] = []
            for each in own:
                table.append(each if isinstance(each, int) else self._allocate())
                if isinstance(each, Place):
                    restored = min(restored, len(table) - 1)
                    places.append(each)
                    targets.append(table[-1])
            self.tier.restore(places, targets)
            tables.append(table + [self._allocate() for _ in range(end - len(table))])
        sequence.block_table, *sequence.window_tables = tables
        sequence.first_blocks = list(found.firsts)
        sequence.num_registered_blocks = restored

    def cover(self, sequence: SequenceState) -> bool:
        """Before a part of a prompt: lose what it sees no more, and have room for the largest step.

        False if there is none: others hold what was lost, too.
        """
        num_blocks = self.device.blocks_for(len(sequence.token_ids))
        wanted = []
        for group, table in enumerate(sequence.tables):
            first = self._first(group, sequence.num_computed_tokens)
            self._lose(sequence, group, first)
            wanted.append(min(num_blocks, first + self._most(group, num_blocks)) - len(table))
        if sum(max(0, each) for each in wanted) > self.device.num_free_blocks:
            return False
        for table, count in zip(sequence.tables, wanted, strict=True):
            table += [self._allocate() for _ in range(count)]
        return True

    def grow(self, sequence: SequenceState) -> bool:
        """Append one block to each table; False if there are not so many."""
        for group in self._groups:
            self._lose(sequence, group, self._first(group, sequence.num_verified_tokens))
        if self.device.num_free_blocks < len(self._groups):
            return False
        for table in sequence.tables:
            table.append(self._allocate())
        return True

    def num_growths(self, reserve: int) -> int:
        """How often a table can grow where `reserve` blocks stay free."""
        return super().num_growths(reserve) // len(self._groups)

    def num_missing(self, sequence: SequenceState, num_tokens: int) -> int:
        """Blocks that a sequence, here or once admitted, may yet take to hold so many tokens.

        What tokens that are not verified yet will not see stays until they are.
        """
        total, num_blocks = 0, self.device.blocks_for(num_tokens)
        late = self.device.blocks_for(self._unverified)
        for group, window in enumerate(self._windows):
            held = self._most(group, self.device.blocks_for(len(sequence.token_ids)))
            if sequence.block_table:
                held = len(sequence.tables[group]) - sequence.first_blocks[group]
            kept = blocks_kept(num_tokens, window, self.block_size, self._unverified)
            total += max(0, min(num_blocks, max(held, kept) + late) - held)
        return total

    def num_held_tokens(self, running: Iterable[SequenceState]) -> int:
        """Tokens that tables of these sequences have blocks for, lost ones included."""
        return self.block_size * sum(len(sequence.block_table) for sequence in running)

    def _lose(self, sequence: SequenceState, group: int, first: int) -> None:
        """Take the blocks before number `first` from a sequence. They stay in the prefix cache."""
        begin, table = sequence.first_blocks[group], sequence.tables[group]
        if first <= begin:
            return
        lost, sequence.first_blocks[group] = table[begin:first], first
        table[begin:first] = [LOST] * (first - begin)
        num_known = max(0, sequence.num_registered_blocks - begin)
        if not self.prefix_caching:
            num_known = len(lost)
        self.device.release(lost[:num_known])
        for number, block in enumerate(lost[num_known:], begin + num_known):
            contents = self._contents(sequence, group, number)
            if self.device.retire(block, contents):
                sequence.retired.append((number, block, contents))

    def _contents(self, sequence: SequenceState, group: int, number: int) -> CachedPrefix:
        """What a full block of a sequence is found by. Observers hear of the first group alone."""
        hashes, request = self._hashes(sequence), sequence.request
        is_private = group > 0 or request.cache_salt is not None or request.adapter is not None
        parent = hashes[number - 1] if number else None
        tokens = block_tokens(sequence.token_ids, number, self.block_size)
        return CachedPrefix(key_of(hashes[number], group), tokens, parent, is_private)

    def register(self, sequence: SequenceState) -> None:
        """Enter the full blocks that are computed and known to be finite into the prefix cache."""
        num_full = sequence.num_verified_tokens // self.block_size
        for _, block, contents in (each for each in sequence.retired if each[0] < num_full):
            self.device.prove(block, contents)
        sequence.retired = [each for each in sequence.retired if each[0] >= num_full]
        for group, table in enumerate(sequence.tables):
            begin = max(sequence.first_blocks[group], sequence.num_registered_blocks)
            for number in range(begin, num_full):
                contents = self._contents(sequence, group, number)
                self.device.enter(table[number], contents)
        for number in range(sequence.num_registered_blocks, num_full):
            self._keep_notes(sequence, number)
        sequence.num_registered_blocks = num_full

    # ------------------------------------------------------------------ ends

    def release(self, sequence: SequenceState) -> None:
        """Take every block from a sequence, in both tiers; see `BlockTables.release`."""
        for _, block, contents in sequence.retired:
            self.device.drop(block, contents)
        for table, first in zip(sequence.tables, sequence.first_blocks, strict=False):
            self.device.release(table[first:])
        _forget_tables(sequence)
        sequence.first_blocks = []
        self.tier.cancel(sequence)
        self.leave_tier(sequence)

    def swap_out(self, sequence: SequenceState) -> bool:
        """Move what is computed and still seen to the second tier; False if it has no room."""
        end, firsts = self.device.blocks_for(sequence.num_computed_tokens), sequence.first_blocks
        if not end:
            return False
        self.tier.cancel(sequence)  # this is what it was for
        tables = zip(sequence.tables, firsts, strict=True)
        blocks = list(chain.from_iterable(table[first:end] for table, first in tables))
        places = self.tier.swap_out(blocks, [self.device.contents_of(b) for b in blocks])
        if places is None:
            return False
        self.release(sequence)
        sequence.places, sequence.first_blocks = places, firsts
        return True

    def reset(self, sequences: Iterable[SequenceState], plan: StepPlan | None = None) -> None:
        """The device's contents are lost; see `BlockTables.reset`."""
        sequences = list(sequences)
        for sequence in sequences:
            _forget_tables(sequence)
        super().reset(sequences, plan)

    def check(self, sequences: Iterable[SequenceState]) -> None:
        """Conservation in both tiers, and no token that will be computed has lost what it sees."""
        held: list[list[int]] = []
        for sequence in sequences:
            if not sequence.block_table:
                continue
            num_blocks = self.device.blocks_for(sequence.num_computed_tokens)
            for group, table in enumerate(sequence.tables):
                first = sequence.first_blocks[group]
                held.append(table[first:])
                if first > self._first(group, sequence.num_computed_tokens):
                    raise RuntimeError(f"Group {group} lost blocks before {first} that it sees.")
                if any(table[:first]) or not all(table[first:]) or len(table) < num_blocks:
                    raise RuntimeError(f"Table {table} should begin at {first}.")
        self.device.check(held)
        self.tier.check()

    def _allocate(self) -> int:
        """A device block; what it evicts from the prefix cache is offloaded by the plan."""
        block = self.device.next_evicted if self.tier.keeps_evicted else None
        contents = None if block is None else self.device.contents_of(block)
        if block is not None and contents is not None:  # else it is unproven
            self._evicted.append((block, contents))
        return self.device.allocate()


def _forget_tables(sequence: SequenceState) -> None:
    sequence.block_table, sequence.window_tables, sequence.retired = [], [], []

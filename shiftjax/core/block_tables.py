"""The KV blocks of sequences: who gets them, shares them, and loses them. No JAX.

The scheduler decides *when*; this file keeps block tables, the prefix cache and the second tier in
agreement. A block table grows only; a sequence loses it whole, by `release` or `swap_out`.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice, takewhile

from shiftjax.core.blocks import (
    BlockAllocator,
    CachedPrefix,
    block_tokens,
    extend_hashes,
    root_hash,
)
from shiftjax.core.kept_blocks import NO_HINTS
from shiftjax.core.notes import Notes
from shiftjax.core.request import Request, SequenceState, StepPlan
from shiftjax.core.tier import MOST_AHEAD, Extent, Place, Tier, TierMoves


class BlockTables:
    """Block tables of one group over its device pool and a second tier.

    What falls out of the device's prefix cache goes to the tier's, and is restored from there when
    it is asked for again. `model` keeps the hashes of different weights apart, `kv` those of KV in
    different formats.
    Prefixes are hashed every `hash_size` tokens, of which a block holds some whole number, so that
    groups whose blocks differ in size share the hashes of a sequence; default: every block.
    `notes` are kept of prefixes, too: who wants them finds what they are known of.
    """

    def __init__(
        self,
        device: BlockAllocator,
        tier: Tier | None = None,  # None: there is no second one
        model: str = "",
        prefix_caching: bool = True,
        hash_size: int = 0,
        kv: str = "",
        notes: Notes | None = None,  # None: nothing is kept
    ):
        self.device = device
        self.notes = notes or Notes()
        self.tier = tier or Tier()
        self._hash_size = hash_size or device.block_size
        self.prefix_caching = prefix_caching
        self.num_prefix_query_tokens = 0
        self.num_prefix_hit_tokens = 0  # in both tiers
        self.num_prefix_hits_elsewhere = 0  # sequences, whose prefix groups of other widths have
        self._identity = model, kv
        self.version = 0  # of the weights, which `Scheduler.renew` sets
        self._evicted: list[tuple[int, CachedPrefix]] = []  # since the last plan

    @property
    def block_size(self) -> int:
        """Tokens of a block."""
        return self.device.block_size

    def num_known_tokens(self, request: Request, hashes: list[bytes]) -> int:
        """Tokens of a prompt that an admission would find computed now; changes nothing here.

        Hashes of the prompt are added to `hashes` as far as something is found: groups with one
        `hash_size` may share the list.
        """
        if not self.prefix_caching or request.sampling.prompt_logprobs is not None:
            return 0
        tokens, size = list(request.prompt_token_ids), self._hash_size
        several = self.block_size // size
        limit = (len(tokens) - 1) // self.block_size
        for number in range(limit):
            end = (number + 1) * several
            if len(hashes) < end:
                root = self._root(request, self.version)
                beginning = tokens[: min(2 * end, limit * several) * size]
                extend_hashes(hashes, root, beginning, size)
            block_hash = hashes[end - 1]
            if not self.device.is_indexed(block_hash) and not self.tier.knows(block_hash):
                return self._noted(request, hashes, number) * self.block_size
        return self._noted(request, hashes, limit) * self.block_size

    def _noted(self, request: Request, hashes: list[bytes], num_blocks: int) -> int:
        """How many of the first blocks a request may find: all, or those whose notes are known.

        `hashes` are those of every `hash_size` tokens.
        """
        if not request.wants_notes:
            return num_blocks
        several = self.block_size // self._hash_size
        return self.notes.num_known(hashes[: num_blocks * several]) // several

    def admit(self, sequence: SequenceState, reserve: int) -> bool:
        """Give a waiting sequence blocks for all its tokens, and leave `reserve` blocks free.

        False if there is no room. A whole prompt gets its blocks at once, so that chunks of it
        never wait for each other.
        """
        if sequence.places and not self.is_swapped_out(sequence):
            self.forget(sequence)  # given up since
        num_tokens = len(sequence.token_ids)
        num_blocks = self.device.blocks_for(num_tokens)
        shortage = num_blocks + reserve - self.device.num_free_blocks
        prefix = self._find_prefix(sequence, shortage)
        if shortage + self.device.num_revived(prefix) > len(prefix):
            return False
        self.device.retain(prefix)  # before allocating, which could evict them
        fresh = [self._allocate() for _ in range(num_blocks - len(prefix))]
        if len(sequence.siblings) < 2:  # siblings find their own prompt
            self.device.note_found(prefix)
        sequence.block_table = prefix + fresh
        sequence.num_registered_blocks = len(prefix)
        num_restored = self._restore(sequence, len(prefix))
        num_hit_tokens = (len(prefix) + num_restored) * self.block_size
        sequence.num_computed_tokens = max(sequence.num_computed_tokens, num_hit_tokens)
        self.num_prefix_query_tokens += num_tokens
        self.num_prefix_hit_tokens += num_hit_tokens
        is_missed = not num_hit_tokens and self._is_known_elsewhere(sequence)
        self.num_prefix_hits_elsewhere += is_missed
        return True

    def grow(self, sequence: SequenceState) -> bool:
        """Append one block; False if none is free."""
        if not self.device.num_free_blocks:
            return False
        sequence.block_table.append(self._allocate())
        return True

    def cover(self, sequence: SequenceState) -> bool:
        """Have room for the next part of a prompt; here it has all that it needs."""
        return True

    def num_growths(self, reserve: int) -> int:
        """How often a table can grow where `reserve` blocks stay free."""
        return max(0, self.device.num_free_blocks - reserve)

    def num_missing(self, sequence: SequenceState, num_tokens: int) -> int:
        """Blocks that a sequence, here or once admitted, may yet take to hold so many tokens."""
        held = len(sequence.block_table) or self.device.blocks_for(len(sequence.token_ids))
        return self.device.blocks_for(num_tokens) - held

    def num_held_tokens(self, running: Iterable[SequenceState]) -> int:
        """Tokens that all tables have blocks for, those of the running sequences."""
        return self.device.num_used_blocks * self.block_size

    def rename(self, new: Mapping[int, int], sequences: Iterable[SequenceState]) -> None:
        """Blocks of running sequences have been copied elsewhere: block, new block."""
        for sequence in sequences:
            sequence.block_table = [new.get(block, block) for block in sequence.block_table]

    def release(self, sequence: SequenceState) -> None:
        """Take every block from a sequence, in both tiers.

        A step in flight may still write to these blocks. They may be given away at once all the
        same: the device runs steps in order, so the next owner's step writes after it. Blocks in
        the index are never written again: they are full and computed.
        """
        self.device.release(sequence.block_table)
        sequence.block_table = []
        self.tier.cancel(sequence)
        self.leave_tier(sequence)

    def end(self, sequence: SequenceState, *, is_whole: bool) -> None:
        """Take every block from a sequence that has ended, and do as its hints say if it is whole.

        What it has found cached is others', too: it is not discarded.
        """
        self.release(sequence)
        hints = sequence.request.hints
        if not is_whole or not self.prefix_caching or hints == NO_HINTS:
            return
        blocks = self.device.blocks_of(self._hashes(sequence))
        if hints.keep_seconds > 0:
            self.device.keep(blocks, hints.keep_seconds, hints.session)
        if hints.releases:
            num_found = -(-sequence.num_cached_tokens // self.block_size)
            self.device.discard(blocks, hints.session, num_found)

    def heed(self, request: Request) -> None:
        """Do as the hints of a request say that is there for them alone."""
        if not self.prefix_caching:
            return
        hashes: list[bytes] = []
        tokens = list(request.prompt_token_ids)
        extend_hashes(hashes, self._root(request, self.version), tokens, self._hash_size)
        several = self.block_size // self._hash_size
        whole = hashes[several - 1 :: several]
        blocks = self.device.match(whole, tokens, len(whole))
        if request.hints.releases:
            self.device.discard(blocks, request.hints.session, len(blocks))
        else:
            self.tier.awaits(request, hashes[len(blocks) * several :])
            self.tier.cancel(request)

    def leave_tier(self, sequence: SequenceState) -> None:
        """A sequence needs nothing in the second tier any more."""
        self.tier.release(sequence.places)
        sequence.places = []

    def forget(self, sequence: SequenceState) -> None:
        """Release a sequence that will be recomputed."""
        self.release(sequence)
        sequence.num_computed_tokens = sequence.num_verified_tokens = 0

    def swap_out(self, sequence: SequenceState) -> bool:
        """Move what is computed to the second tier; False if it has no room.

        The runner copies before the step computes, so the device blocks are free at once.
        """
        num_blocks = self.device.blocks_for(sequence.num_computed_tokens)
        if not num_blocks:
            return False
        self.tier.cancel(sequence)  # this is what it was for
        blocks = sequence.block_table[:num_blocks]
        places = self.tier.swap_out(blocks, [self.device.contents_of(b) for b in blocks])
        if places is None:
            return False
        self.release(sequence)
        sequence.places = places
        return True

    def finish_plan(self, *, is_planned: bool, waiting: Sequence[SequenceState] = ()) -> TierMoves:
        """The copies between the tiers that the plan needs; without a plan there are none.

        Those of `waiting` that come next have prefetched what the second tier will give them.
        """
        evicted, self._evicted = self._evicted, []
        if not is_planned:
            return self.tier.finish(is_planned=False)
        for sequence in islice(waiting, MOST_AHEAD):
            self.awaits(sequence)  # may need room: comes before what this plan writes
        self.tier.save(evicted)
        wanted = chain.from_iterable(map(self._extents_of, islice(waiting, MOST_AHEAD)))
        return self.tier.finish(is_planned=True, wanted=wanted)

    def save_cached(self) -> None:
        """Have the next plan copy to the second tier whatever the device's prefix cache has."""
        self._evicted += self.device.cached()

    def _extents_of(self, sequence: SequenceState) -> Iterable[Extent]:
        """What an admission would restore now: of a swapped sequence, or of a prefix."""
        if sequence.places:
            return dict.fromkeys(place.extent for place in sequence.places)
        if not self.tier.has_prefixes or not self._may_have_prefix(sequence):
            return ()
        return self.tier.extents_of(self._lacking(sequence))

    def awaits(self, sequence: SequenceState) -> bool:
        """Whether a sequence had better wait for what the second tier fetches for it."""
        if sequence.places or not self.tier.fetches or not self._may_have_prefix(sequence):
            return False
        return self.tier.awaits(sequence, self._lacking(sequence))

    def _lacking(self, sequence: SequenceState) -> Iterator[bytes]:
        """The hashes of units from the first block on that devices lack; found out when asked."""
        hashes, limit = self._hashes(sequence), self._findable(sequence)
        num_here = sum(1 for _ in takewhile(self.device.is_indexed, hashes[:limit]))
        yield from self._units(sequence, num_here, limit)

    def end_plan(self, plan: StepPlan) -> None:
        """The step of a plan has ended: other groups may read what it copied to the second tier."""
        self.tier.prove(plan.offloads)

    def register(self, sequence: SequenceState) -> None:
        """Enter the full blocks that are computed and known to be finite into the prefix cache."""
        size, tokens, request = self.block_size, sequence.token_ids, sequence.request
        hashes = self._hashes(sequence)
        # Who hears of blocks knows them by their tokens alone, and others' tokens are secret.
        is_private = request.cache_salt is not None or request.adapter is not None
        num_full, several = sequence.num_verified_tokens // size, size // self._hash_size
        for number in range(sequence.num_registered_blocks, num_full):
            block, block_hash = sequence.block_table[number], hashes[number]
            parent = hashes[number - 1] if number else None
            contents = block_tokens(tokens, number, size)
            units = self._units(sequence, number, number + 1) if several > 1 else ()
            self.device.register(block, block_hash, contents, parent, is_private, units)
            if self.device.contents_of(block) is not None:
                self._keep_notes(sequence, number)
        sequence.num_registered_blocks = num_full

    def _keep_notes(self, sequence: SequenceState, number: int) -> None:
        """A block of a sequence is found from now on: so are the notes of its tokens."""
        several = self.block_size // self._hash_size
        self.notes.register(sequence, number * several, (number + 1) * several)

    def reset(self, sequences: Iterable[SequenceState], plan: StepPlan | None = None) -> None:
        """The device's contents are lost, and what it was about to write to the second tier.

        What `plan`, whose step has failed, has read there is given up, too. Sequences keep what
        they have swapped out where all of it was written.
        """
        self.tier.reset(plan.read_extents if plan else ())
        self._evicted.clear()
        for sequence in sequences:
            sequence.block_table = []
            if not self.is_swapped_out(sequence):
                self.forget(sequence)
        self.device.reset()

    def is_swapped_out(self, sequence: SequenceState) -> bool:
        """Whether all that a sequence has computed is in the second tier."""
        places = sequence.places
        return bool(places) and self.tier.holds(places)

    def check(self, sequences: Iterable[SequenceState]) -> None:
        """Conservation in both tiers, see `BlockAllocator.check`."""
        self.device.check([sequence.block_table for sequence in sequences])
        self.tier.check()

    def clear_cache(self) -> None:
        """Nothing is found by hash any more, in both tiers."""
        self.device.clear_cache()
        self.tier.clear_cache()

    def _allocate(self) -> int:
        """A device block; what it evicts from the prefix cache is offloaded by the plan."""
        if self.tier.keeps_evicted and (block := self.device.next_evicted) is not None:
            contents = self.device.contents_of(block)
            assert contents is not None, "a cached block has contents"
            self._evicted.append((block, contents))
        return self.device.allocate()

    def _find_prefix(self, sequence: SequenceState, shortage: int) -> list[int]:
        """Blocks that already hold the beginning of this sequence, without a reference yet.

        Never all of it: the last token is computed, because its logits are needed. A sibling's
        blocks serve without a prefix cache. With a `shortage` too large for any hit to help, the
        search ends at once, so that a full pool costs a waiting sequence one look-up per step.
        """
        if sequence.wants_prompt_logprobs:
            return []
        prefix: list[int] = []
        limit = (len(sequence.token_ids) - 1) // self.block_size
        if self.prefix_caching and shortage <= limit:
            hashes = self._hashes(sequence)
            if shortage <= 0 or self.device.is_indexed(hashes[shortage - 1]):
                limit = self._findable(sequence)
                prefix = self.device.match(hashes, sequence.token_ids, limit)
        shared = self._sibling_prefix(sequence)
        return shared if len(shared) > len(prefix) else prefix

    def _is_known_elsewhere(self, sequence: SequenceState) -> bool:
        """Whether a group of another width on the same units has the beginning of a sequence."""
        hashes = sequence.block_hashes
        for other in self.device.relatives:
            first = other.block_size // self._hash_size - 1
            if first < len(hashes) and other.is_indexed(hashes[first]):
                return True
        return False

    def _sibling_prefix(self, sequence: SequenceState) -> list[int]:
        """The full blocks of the prompt, where a sibling holds them computed."""
        num_blocks = (sequence.num_prompt_tokens - 1) // self.block_size
        for sibling in sequence.siblings:
            is_computed = sibling.num_verified_tokens >= num_blocks * self.block_size
            if sibling is not sequence and sibling.block_table and is_computed:
                return sibling.block_table[:num_blocks]
        return []

    def _restore(self, sequence: SequenceState, num_found: int) -> int:
        """Bring what the second tier has after the first `num_found` blocks to the device.

        Returns how many blocks a prefix has there; of a swapped sequence that is none, because it
        knows what it has computed.
        """
        several = self.block_size // self._hash_size
        if sequence.places:
            places = sequence.places[num_found * several :]
            num_blocks = -(-len(places) // several)
            self.tier.restore(places, sequence.block_table[num_found:][:num_blocks])
            self.leave_tier(sequence)
            return 0
        places = self._find_in_tier(sequence, num_found)
        num_blocks = len(places) // several
        self.tier.restore(places, sequence.block_table[num_found:][:num_blocks])
        return num_blocks

    def _find_in_tier(self, sequence: SequenceState, num_found: int) -> list[Place]:
        """Where the second tier has blocks that follow those found on the device; never all."""
        if not self._may_have_prefix(sequence):
            return []
        self._hashes(sequence)  # of what has come since
        hashes, limit = sequence.block_hashes, self._findable(sequence)
        return self.tier.match(hashes, sequence.token_ids, num_found, limit)

    def _findable(self, sequence: SequenceState) -> int:
        """How many blocks of a sequence, whose hashes are known, may be found; never all."""
        limit = (len(sequence.token_ids) - 1) // self.block_size
        return self._noted(sequence.request, sequence.block_hashes, limit)

    def _may_have_prefix(self, sequence: SequenceState) -> bool:
        return self.prefix_caching and not sequence.wants_prompt_logprobs

    def _root(self, request: Request, version: int) -> bytes:
        """The parent of the first block of a request that begins with weights of this version."""
        return root_hash(*self._identity, request.adapter, request.cache_salt, version)

    def _hashes(self, sequence: SequenceState) -> list[bytes]:
        """The hash of every full block: that of what it ends with, which is chained to the rest."""
        request, hashes = sequence.request, sequence.block_hashes
        root = b"" if hashes else self._root(request, sequence.version)
        extend_hashes(hashes, root, sequence.token_ids, self._hash_size)
        several = self.block_size // self._hash_size
        return hashes if several == 1 else hashes[several - 1 :: several]

    def _units(self, sequence: SequenceState, start: int, end: int) -> list[bytes]:
        """The hashes of the units of blocks `start` up to `end`, which have been hashed."""
        several = self.block_size // self._hash_size
        return sequence.block_hashes[start * several : end * several]

"""The KV blocks of sequences: who gets them, shares them, and loses them. No JAX.

The scheduler decides *when*; this file keeps block tables, the prefix cache and the host tier in
agreement. A block table grows only; a sequence loses it whole, by `release` or `swap_out`, or its
end, by `join`.
"""

from collections.abc import Iterable, Mapping
from itertools import chain

from shiftjax.control.blocks import BlockAllocator, block_tokens, extend_hashes, root_hash
from shiftjax.control.request import Sequence


class BlockTables:
    """Block tables of one group over its device pool and, with `num_host_blocks`, a host tier.

    Both counts include a null block 0. `model` keeps the hashes of different weights apart.
    Prefixes are hashed every `hash_size` tokens, of which a block holds some whole number, so that
    groups whose blocks differ in size share the hashes of a sequence; default: every block.
    """

    def __init__(
        self,
        device: BlockAllocator,
        num_host_blocks: int = 0,
        model: str = "",
        prefix_caching: bool = True,
        hash_size: int = 0,
    ):
        self.device = device
        self.host = BlockAllocator(num_host_blocks, device.block_size) if num_host_blocks else None
        self._hash_size = hash_size or device.block_size
        self.prefix_caching = prefix_caching
        self.num_prefix_query_tokens = 0
        self.num_prefix_hit_tokens = 0
        self.num_prefix_hits_elsewhere = 0  # sequences, whose prefix groups of other widths have
        self._model = model
        self._forks: dict[Sequence, list[list[int]]] = {}  # blocks that paths in flight have alone

    @property
    def block_size(self) -> int:
        """Tokens of a block."""
        return self.device.block_size

    def admit(self, sequence: Sequence, reserve: int) -> list[tuple[int, int]] | None:
        """Give a waiting sequence blocks for all its tokens, and leave `reserve` blocks free.

        Returns the `(device_block, host_block)` pairs to restore, or None if there is no room. A
        whole prompt gets its blocks at once, so that chunks of it never wait for each other.
        """
        num_tokens = len(sequence.token_ids)
        num_blocks = self.device.blocks_for(num_tokens)
        shortage = num_blocks + reserve - self.device.num_free_blocks
        prefix = self._find_prefix(sequence, shortage)
        if shortage + self.device.num_revived(prefix) > len(prefix):
            return None
        self.device.retain(prefix)  # before allocating, which could evict them
        fresh = [self.device.allocate() for _ in range(num_blocks - len(prefix))]
        sequence.block_table = prefix + fresh
        sequence.num_registered_blocks = len(prefix)
        num_hit_tokens = len(prefix) * self.block_size
        sequence.num_computed_tokens = max(sequence.num_computed_tokens, num_hit_tokens)
        self.num_prefix_query_tokens += num_tokens
        self.num_prefix_hit_tokens += num_hit_tokens
        self.num_prefix_hits_elsewhere += not prefix and self._is_known_elsewhere(sequence)
        return self._restore(sequence)[len(prefix) :]

    def grow(self, sequence: Sequence) -> bool:
        """Append one block; False if none is free."""
        if not self.device.num_free_blocks:
            return False
        sequence.block_table.append(self.device.allocate())
        return True

    def fork(self, sequence: Sequence, begin: int, num_blocks: int) -> list[int]:
        """A second table of `num_blocks`, with fresh blocks from number `begin` on, until `join`.

        As many blocks must be free.
        """
        blocks = [self.device.allocate() for _ in range(begin, num_blocks)]
        self._forks.setdefault(sequence, []).append(blocks)
        return sequence.block_table[:begin] + blocks

    def join(self, sequence: Sequence, table: list[int]) -> None:
        """Keep `table`, the sequence's or one of its forks', and release what the others had."""
        for blocks in self._forks.pop(sequence, ()):
            begin = len(table) - len(blocks)
            if table[begin:] != blocks:
                self.device.release(blocks)
            else:
                self.device.release(sequence.block_table[begin:])
                sequence.block_table = table

    def rename(self, new: Mapping[int, int], sequences: Iterable[Sequence]) -> None:
        """Blocks of running sequences have been copied elsewhere: block, new block."""
        for sequence in sequences:
            sequence.block_table = [new.get(block, block) for block in sequence.block_table]

    def release(self, sequence: Sequence) -> None:
        """Take every block from a sequence, on the device and on the host.

        A step in flight may still write to these blocks. They may be given away at once all the
        same: the device runs steps in order, so the next owner's step writes after it. Blocks in
        the index are never written again: they are full and computed.
        """
        self.join(sequence, sequence.block_table)
        self.device.release(sequence.block_table)
        sequence.block_table = []
        if self.host is not None:
            self.host.release(sequence.host_block_table)
            sequence.host_block_table = []

    def forget(self, sequence: Sequence) -> None:
        """Release a sequence that will be recomputed."""
        self.release(sequence)
        sequence.num_computed_tokens = sequence.num_verified_tokens = 0

    def swap_out(self, sequence: Sequence) -> list[tuple[int, int]] | None:
        """Move what is computed to the host tier; returns the pairs to offload, None if no room.

        The runner copies before the step computes, so the device blocks are free at once.
        """
        num_blocks = self.device.blocks_for(sequence.num_computed_tokens)
        if self.host is None or not 0 < num_blocks <= self.host.num_free_blocks:
            return None
        host_blocks = [self.host.allocate() for _ in range(num_blocks)]
        pairs = list(zip(sequence.block_table[:num_blocks], host_blocks, strict=True))
        self.release(sequence)
        sequence.host_block_table = host_blocks
        return pairs

    def register(self, sequence: Sequence) -> None:
        """Enter the full blocks that are computed and known to be finite into the prefix cache."""
        size, tokens = self.block_size, sequence.token_ids
        hashes = self._hashes(sequence)
        num_full = sequence.num_verified_tokens // size
        for number in range(sequence.num_registered_blocks, num_full):
            block, block_hash = sequence.block_table[number], hashes[number]
            self.device.register(block, block_hash, block_tokens(tokens, number, size))
        sequence.num_registered_blocks = num_full

    def reset(self, sequences: Iterable[Sequence]) -> None:
        """The contents of both tiers are lost, and with them the prefix cache."""
        for sequence in sequences:
            sequence.block_table, sequence.host_block_table = [], []
            sequence.num_computed_tokens = sequence.num_verified_tokens = 0
        self._forks.clear()
        self.device.reset()
        if self.host is not None:
            self.host.reset()

    def check(self, sequences: Iterable[Sequence]) -> None:
        """Conservation in both tiers, see `BlockAllocator.check`."""
        sequences = list(sequences)
        forks = chain.from_iterable(self._forks.values())
        self.device.check([*(sequence.block_table for sequence in sequences), *forks])
        if self.host is not None:
            self.host.check([sequence.host_block_table for sequence in sequences])

    def _find_prefix(self, sequence: Sequence, shortage: int) -> list[int]:
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
                prefix = self.device.match(hashes, sequence.token_ids, limit)
        shared = self._sibling_prefix(sequence)
        return shared if len(shared) > len(prefix) else prefix

    def _is_known_elsewhere(self, sequence: Sequence) -> bool:
        """Whether a group of another width on the same units has the beginning of a sequence."""
        hashes = sequence.block_hashes
        for other in self.device.relatives:
            first = other.block_size // self._hash_size - 1
            if first < len(hashes) and other.is_indexed(hashes[first]):
                return True
        return False

    def _sibling_prefix(self, sequence: Sequence) -> list[int]:
        """The full blocks of the prompt, where a sibling holds them computed."""
        num_blocks = (sequence.num_prompt_tokens - 1) // self.block_size
        for sibling in sequence.siblings:
            is_computed = sibling.num_verified_tokens >= num_blocks * self.block_size
            if sibling is not sequence and sibling.block_table and is_computed:
                return sibling.block_table[:num_blocks]
        return []

    def _restore(self, sequence: Sequence) -> list[tuple[int, int]]:
        """Give back the host blocks of a swapped sequence; returns the pairs to copy."""
        pairs = list(zip(sequence.block_table, sequence.host_block_table, strict=False))
        if self.host is not None:
            # Slots freed here take part in a later plan's offloads at the earliest: admission
            # comes last in a plan, and a plan that preempts admits nobody.
            self.host.release(sequence.host_block_table)
            sequence.host_block_table = []
        return pairs

    def _hashes(self, sequence: Sequence) -> list[bytes]:
        """The hash of every full block: that of what it ends with, which is chained to the rest."""
        request, hashes = sequence.request, sequence.block_hashes
        root = b"" if hashes else root_hash(self._model, request.adapter, request.cache_salt)
        extend_hashes(hashes, root, sequence.token_ids, self._hash_size)
        several = self.block_size // self._hash_size
        return hashes if several == 1 else hashes[several - 1 :: several]

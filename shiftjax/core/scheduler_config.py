"""The budgets of a scheduler, checked as one. No JAX."""

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from pallas_kernels.window import Window
from shiftjax.config import budget_holds_the_decodes


@dataclass(frozen=True)
class SchedulerConfig:
    """Budgets of one group.

    `num_blocks` counts the null block. `watermark` is the share of blocks that an admission leaves
    free for running sequences to grow into. A sequence preempted `max_preemptions` times is next
    admitted when it can run to its end undisturbed. With several `num_micro_batches` there
    are as many micro-batches, and a step takes one of them.
    """

    num_blocks: int
    block_size: int
    max_num_seqs: int  # that run, of all micro-batches
    max_num_batched_tokens: int
    eos_token_ids: tuple[int, ...] = ()
    model: str = ""
    kv: str = ""  # what KV is kept in: a format, and the scales of one that has some
    prefix_caching: bool = True
    preemption: Literal["recompute", "swap"] = "recompute"
    watermark: float = 0.01
    max_preemptions: int = 4
    hash_size: int = 0  # tokens that a prefix is hashed by; 0: those of a block
    max_proposed_rows: int = 0  # logit rows of a step of no more tokens, with proposals
    num_micro_batches: int = 1
    kept_share: float = 0.0  # of the blocks, that hints of requests may keep, at most
    windows: tuple[Window | None, ...] = ()  # of cache groups whose blocks are freed behind them

    @property
    def num_whole_blocks(self) -> int:
        """The null block, and as many as each cache group can have: what routers know of a pool."""
        return 1 + (self.num_blocks - 1) // max(1, len(self.windows))

    @cached_property
    def max_step_seqs(self) -> int:
        """Sequences of a step, and its logit rows but for those of proposals."""
        return -(-self.max_num_seqs // self.num_micro_batches)

    @property
    def max_rows(self) -> int:
        """Logit rows of a step, at most."""
        return max(self.max_step_seqs, self.max_proposed_rows)

    def __post_init__(self):
        problems = [
            budget_holds_the_decodes(self.max_num_batched_tokens, self.max_num_seqs),
        ]
        if self.max_num_seqs < 1:
            problems.append(f"max_num_seqs must be at least 1, not {self.max_num_seqs}")
        if self.num_micro_batches < 1:
            problems.append(f"num_micro_batches must be at least 1, not {self.num_micro_batches}")
        if self.preemption not in ("recompute", "swap"):
            problems.append(f"preemption must be recompute or swap, not {self.preemption!r}")
        if not 0 <= self.watermark < 1 or self.max_preemptions < 0:
            problems.append("watermark must be in [0, 1) and max_preemptions at least 0")
        if any(problems):
            raise ValueError("; ".join(filter(None, problems)))

"""Drafts of one sequence that differ from the first token on, in one step. No JAX.

A further *path* is one more item of the plan, of the same sequence: its tokens are the last
committed one and the path's, its block table is the sequence's up to the block that they begin in.
From there on its blocks are its own, and what that block holds already is copied into the first of
them before the step writes. So attention sees ordinary sequences and no tree::

    sequence   b0 b1 b2 | b3 b4       computes a, then the first path
    path 1     b0 b1 b2 | b7 b8       computes a, then the second; b7 begins as a copy of b3

At commit the longest agreeing path stays, and the blocks of the others are free again. (Token trees
in one step: SpecInfer, Miao et al., arXiv 2305.09781; there with a mask.)
"""

from collections.abc import Callable, Hashable, Iterable, Mapping

from shiftjax.core.block_tables import BlockTables
from shiftjax.core.guesses import Draft
from shiftjax.core.plan_builder import PlanBuilder
from shiftjax.core.request import ScheduledSequence, SequenceState, Status, StepPlan
from shiftjax.core.results import num_accepted
from shiftjax.drafts.choice import Candidate

type Name = tuple[ScheduledSequence, int]  # the item of the first path, and the number of this one
type Cut = Callable[[ScheduledSequence, Draft], Draft | None]
type Choose = Callable[[list[Candidate]], dict[Hashable, int]]


def further_paths(
    builder: PlanBuilder, offers: Mapping[ScheduledSequence, Draft], most: int
) -> dict[Name, Draft]:
    """What drafts have beside their first path, up to `most` paths each, as far as blocks go.

    First paths come first: further ones share the blocks that those leave, in the order of the
    offers, and the places that the step has for sequences.
    """
    if most == 1:
        return {}
    size, blocks_left, seqs_left = builder.block_size, builder.blocks_left, builder.seqs_left
    for item, draft in offers.items():
        held = len(item.sequence.block_table) * size
        blocks_left -= max(0, -((held - item.start - 1 - len(draft.tokens)) // size))
    paths: dict[Name, Draft] = {}
    for item, draft in offers.items():
        for number, other in enumerate(draft.others[: most - 1], 1):
            path = other.first(blocks_left * size - item.start % size - 1)
            if not path.tokens or not seqs_left:
                break
            paths[item, number] = path
            blocks_left -= -(-(item.start % size + 1 + len(path.tokens)) // size)
            seqs_left -= 1
    return paths


def row_worths(survivals: list[float]) -> list[float]:
    """What each row of a further path brings to the step: `1 + len(survivals)` falling values.

    Its first row computes what the first path's does, and brings nothing; but without it there are
    none of the others. So the first rows count together, with the largest mean that they can have.
    """
    total, best, count = 0.0, 0.0, 0
    for number, survival in enumerate(survivals, 2):
        total += survival
        if total / number > best:
            best, count = total / number, number
    return [best] * count + survivals[count - 1 :] if count else []


def choose_rows[T](paths: dict[T, Draft], choose: Choose) -> dict[Hashable, int]:
    """What `choose` says of rows when offered `(name, worths of rows)` of further paths.

    Asked again without those that it leaves their first row alone.
    """
    while True:
        rows = choose([(name, row_worths(path.survivals)) for name, path in paths.items()])
        kept = {name: path for name, path in paths.items() if rows.get(name) != 1}
        if len(kept) == len(paths):
            return rows
        paths = kept


def place_drafts(
    drafts: Iterable[tuple[ScheduledSequence, Draft]],
    builder: PlanBuilder,
    tables: BlockTables,
    cut: Cut,
) -> None:
    """Give drafts blocks and places in the plan, as far as `cut` allows them.

    The first that is left of an item becomes its draft, the others items of their own.
    """
    for item, draft in drafts:
        sequence, start = item.sequence, item.start
        is_first = item.draft is None
        path = item if is_first else ScheduledSequence(sequence, start, 1, 1, -1)
        if (allowed := cut(path, draft)) is None:
            continue
        num_blocks = tables.device.blocks_for(start + 1 + len(allowed.tokens))
        if is_first:
            while len(sequence.block_table) < num_blocks:
                tables.grow(sequence)
            builder.extend(item, allowed)
        else:
            begin, offset = divmod(start, tables.block_size)
            path.path_table = tables.fork(sequence, begin, num_blocks)
            if offset:
                builder.copies.append((sequence.block_table[begin], path.path_table[begin]))
            builder.add_path(path, allowed)


def settle(
    plan: StepPlan, sampled: list[int], tables: BlockTables
) -> dict[ScheduledSequence, list[int]]:
    """Decide between the paths of each sequence. Returns the items that lose, with their tokens.

    `sampled` are the tokens of all rows of the plan. The path that agrees longest stays, of equals
    the first, and the sequence goes on with its blocks; rows of the others count for nothing.
    """
    drafted = plan.scheduled[plan.num_decodes :][: plan.num_drafts]
    if all(item.path_table is None for item in drafted):
        return {}
    row = plan.num_decodes  # the rows of decodes, one each, come first
    found: dict[ScheduledSequence, list[int]] = {}
    best: dict[SequenceState, tuple[int, ScheduledSequence]] = {}
    for item in drafted:
        tokens = sampled[row : row + item.num_rows]
        row += item.num_rows
        if item.sequence.status is not Status.FINISHED:
            found[item] = tokens
            agreed = num_accepted(item, tokens)
            if item.sequence not in best or agreed > best[item.sequence][0]:
                best[item.sequence] = agreed, item
    for sequence, (_, item) in best.items():
        tables.join(sequence, item.block_table)
        del found[item]
    return found

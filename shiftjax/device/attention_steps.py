"""The steps that the check of the attention kernels runs, and their arrays.

A step is worth its time where it makes the kernels do what they do when they serve: fill every
place of a ring again, use a query's place again, add up more jobs of a row than one turn of the
combine takes, put a tile together from parts. What the kernels' own planner makes of these steps
in the settings that serve is a test (`tests/device/test_attention_steps.py`).
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from pallas_kernels.call import CodeKind
from pallas_kernels.rows import rows_of
from pallas_kernels.window import Chunk, Window, first_seen, tokens_of
from shiftjax.arch.config import LayerKind, ModelConfig
from shiftjax.arch.formats import FORMATS
from shiftjax.arch.latent import Latent
from shiftjax.models.attention import AttentionMetadata, LayerTerms
from shiftjax.models.attention_backend import AttentionBackend, gives_codes
from shiftjax.models.entry_backend import EntryShape
from shiftjax.models.expert_backend import ExpertShape
from shiftjax.models.norm_backend import NormShape
from shiftjax.models.packed_backend import PackedShape
from shiftjax.models.product_backend import CodeShape
from shiftjax.models.sum_backend import SumShape
from shiftjax.parallel.layout import Layout

BEYOND_WINDOW = 65  # tokens that the longest contexts have more than a window, at least
MOST_OUTGROWN = 8192  # tokens: a wider window is tried with contexts that it holds
CHIP_BYTES = 132 * 227 * 1024  # of shared memory: an H100's or H200's, so rings hold less
SCORE_OF_EDGES = 8.0  # of a row that looks at edges: the other keys' scores spread by 1
MOST_EDGES = 64  # of a context; each is two keys
MOST_LATE = 3  # rows of a sequence


@dataclasses.dataclass(frozen=True)
class Shape:
    """What kernels are compiled for: the part of a deployment that is one device's."""

    heads: int  # of queries
    kv_heads: int
    head_dim: int
    block_size: int
    windows: tuple[Window | None, ...]  # `ModelConfig.windows`: layers of each are tried
    dtype: str  # of queries; a name of `arch.formats`
    kv_dtype: str
    bucket: tuple[int, ...]  # tokens, logit rows and sequences of the largest step
    deterministic: bool = False
    experts: ExpertShape | None = None
    scale: float | None = None  # of scores; None: head_dim ** -0.5
    soft_cap: float | None = None  # of scores
    has_sinks: bool = False
    has_late: bool = False  # layers that compute logit rows alone
    packed: PackedShape | None = None  # matrices of four bits that are no experts'
    codes: CodeShape | None = None  # matrices of codes that are no experts'
    norm: NormShape | None = None  # of the residual stream
    entry: EntryShape | None = None  # of what takes heads to attention in one launch
    sums: SumShape | None = None  # then sums over devices are tried, and nothing else
    plain: CodeShape | None = None  # matrices of numbers: then products with them, nothing else
    ways: int = 1  # devices that split positions; heads are those of all, blocks their stripes
    values_in_keys: int | None = None  # of latents, which are keys and values; None: these are two

    @property
    def layout(self) -> Layout:
        """A model on one device that attention sees the same of."""
        model = ModelConfig(
            name="checked",
            architecture="llama",
            vocab_size=64,
            hidden_size=64,
            intermediate_size=64,
            num_layers=len(self.windows),
            num_heads=self.heads,
            num_kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            max_position_embeddings=1 << 20,
            layer_kinds=tuple(map(LayerKind.of_window, self.windows)),
            query_scale=self.scale,
            attention_soft_cap=self.soft_cap,
            attention_sinks=self.has_sinks,
            latent=self._latent,
        )
        return Layout(model, 1, 1)

    @property
    def _latent(self) -> Latent | None:
        rank = self.values_in_keys
        return None if rank is None else Latent(rank, self.head_dim - rank, 1, 1)

    @property
    def gives_codes(self) -> bool:
        """Whether the output may leave as codes."""
        dtype = FORMATS[self.dtype].dtype
        return self.codes is not None and self.ways == 1 and gives_codes(self.layout, dtype)

    def pool(self, num_blocks: int) -> tuple[np.ndarray, ...]:
        """Return K and V of so many blocks, in which every number is NaN."""
        entries, dtype = self.layout.cache.entries, FORMATS[self.kv_dtype].dtype
        shapes = (entry.pool_shape(num_blocks, self.block_size) for entry in entries)
        return tuple(np.full(shape, np.nan, dtype) for shape in shapes)


@dataclasses.dataclass(frozen=True)
class Cases:
    """The sequences that are tried; `steps_of` makes steps of them."""

    decodes: tuple[int, ...] = (1, 15, 16, 17, 63, 64, 65, 337, 3000)  # contexts
    chunks: tuple[tuple[int, int], ...] = ((17, 17), (130, 196), (100, 700), (150, 8200))
    num_beside: int = 2  # of the last decodes, in the step of the chunks
    in_largest: bool = True  # also in the largest bucket, whose kernels are other programs
    ring_bytes: int = CHIP_BYTES  # of keys and values that the rings of a chip hold, at most


class Step(NamedTuple):
    """Sequences in a bucket: decodes first, then chunks, then padding."""

    name: str
    bucket: tuple[int, ...]  # tokens, logit rows, sequences
    new: tuple[int, ...]  # tokens of each sequence
    contexts: tuple[int, ...]  # with these
    num_decodes: int
    is_late: bool = False  # all tokens are rows of layers that compute nothing else
    codes: bool = False  # the output leaves as such


def steps_of(shape: Shape, cases: Cases) -> Iterator[Step]:
    """Yield the steps, each for something that no other one has.

    edges   decodes alone, whose contexts end around edges of blocks, tiles and rounds
    long    one decode so long that every worker fills its ring again, and that is in as many jobs
            as a row can be, after short ones that are one worker's: it uses a query's place again
    chunks  chunks beside decodes, around edges, too; the last is few tokens after a long context,
            so that its tiles are put together from parts
    full    the chunks and as many decodes as the largest bucket has room for, as in serving: other
            programs; rings are filled again where a window makes long contexts short, too
    late    of these sequences the last tokens alone, if the model has such layers
    codes   the first and the third again, whose output leaves as codes, if it may

    The last contexts of the first and the third are longer than every window that is not huge. Of
    windows whose start jumps, the last chunk has tokens before a jump and after it.
    """
    outgrown = [tokens for tokens in map(tokens_of, shape.windows) if 0 < tokens <= MOST_OUTGROWN]
    least = max((tokens + BEYOND_WINDOW for tokens in outgrown), default=0)
    itemsize = FORMATS[shape.kv_dtype].dtype.itemsize
    wrapping = wrapping_tokens(shape.kv_heads, shape.head_dim, itemsize, cases.ring_bytes)
    wrapping *= shape.ways  # each of whom reads its part
    decodes = (*cases.decodes[:-1], max(cases.decodes[-1], least))
    tokens, context = cases.chunks[-1]
    context = max(context, least + tokens)
    for window in shape.windows:  # tokens on both sides of where a window begins to jump
        if isinstance(window, Chunk) and window.tokens in outgrown:
            before = -(-(cases.chunks[-1][1] - tokens // 2) // window.tokens) * window.tokens
            context = before + tokens // 2
    chunks = (*cases.chunks[:-1], (tokens, context))
    yield _step(decodes)
    yield _step((1, 17, 64, wrapping))
    last = _step(decodes[-cases.num_beside :], chunks)
    yield last
    if cases.in_largest:
        largest = tuple(max(sizes) for sizes in zip(last.bucket, shape.bucket, strict=True))
        room = largest[0] - 1 - sum(tokens for tokens, _ in chunks)
        count = min(room, min(largest[1:]) - len(chunks))
        last = _step(_spread(2 * wrapping, count), chunks, largest)
        yield last
    if shape.has_late:
        yield _late(last)
    if shape.gives_codes:
        for step in (_step(decodes), _step(decodes[-cases.num_beside :], chunks)):
            yield step._replace(name=f"{step.name}, as codes", codes=True)


def wrapping_tokens(
    kv_heads: int, head_dim: int, itemsize: int, ring_bytes: int = CHIP_BYTES
) -> int:
    """Return how long a context must be that fills every place of all rings again.

    Once and a half of what `ring_bytes` hold: 45 MB of keys and values, however many heads have
    them. Rings have two stages at least, so that every worker has a round more than stages.
    """
    return 3 * ring_bytes // (2 * 2 * kv_heads * head_dim * itemsize)


def _step(
    decodes: tuple[int, ...],
    chunks: tuple[tuple[int, int], ...] = (),
    bucket: tuple[int, ...] | None = None,
) -> Step:
    new = (1,) * len(decodes) + tuple(tokens for tokens, _ in chunks)
    contexts = decodes + tuple(context for _, context in chunks)
    rows = _power_of_two(len(new))
    bucket = bucket or (_power_of_two(sum(new) + 1), rows, rows)  # a token of padding at least
    name = f"chunks beside {len(decodes)} decodes" if chunks else f"{len(decodes)} decodes"
    return Step(f"{name} in {bucket[0]}", bucket, new, contexts, len(decodes))


def _power_of_two(least: int) -> int:
    return max(8, 1 << (least - 1).bit_length())


def _spread(total: int, count: int) -> tuple[int, ...]:
    """Return lengths that add up to about `total`, from a half to three halves of their mean."""
    mean = total // count
    return tuple(max(1, mean // 2 + mean * i // count) for i in range(count))


def _late(step: Step) -> Step:
    """Return the last rows of a step: a decode's one, up to three of a chunk, as of drafts."""
    new = tuple(min(tokens, MOST_LATE) for tokens in step.new)
    left_out = max(0, sum(new) - step.bucket[1])
    new, contexts = new[left_out:], step.contexts[left_out:]
    bucket = step.bucket[1], *step.bucket[1:]
    return Step(f"rows alone in {bucket[0]}", bucket, new, contexts, len(new), is_late=True)


class Inputs(NamedTuple):
    """The arrays of a step, NumPy."""

    q: np.ndarray  # [tokens, heads, head_dim]
    pool: tuple[np.ndarray, ...]  # K and V
    tables: np.ndarray  # [seqs, blocks_per_seq]
    lens: np.ndarray  # [seqs]
    starts: np.ndarray  # [seqs + 1]
    terms: LayerTerms

    def metadata(self, step: Step, kernels: AttentionBackend) -> AttentionMetadata:
        """What an implementation is told of the step, its own division of it included."""
        num_tokens, num_rows, _ = step.bucket
        is_row_by_row = num_tokens == num_rows and step.num_decodes == len(step.new)
        if is_row_by_row and kernels.most_row_reads is not None:
            num_tokens = None  # another program, without tiles (`Bucket.rows_alone`)
        contexts = self.tables, self.lens, self.starts
        sizes = {"num_tokens": num_tokens, "num_rows": num_rows}
        if step.is_late:
            work = kernels.divide_rows(rows_of(*contexts[1:], step.num_decodes), num_rows)
        else:
            work = kernels.divide(*contexts, step.num_decodes, **sizes)
        slots = np.zeros(step.bucket[0], np.int32)  # everything is written already
        return AttentionMetadata(slots, *contexts, np.asarray(step.num_decodes, np.int32), work)


def make_inputs(shape: Shape, step: Step) -> Inputs:
    """Draw queries, keys and values; every slot without a token is NaN, the null block's, too.

    Scores spread by 1, whatever the scale; with a soft cap those of every other token so far that
    it matters. Sinks weigh as much as some tens or hundreds of keys. Every other head of a token
    looks at keys on edges (`on_edges`) more than at all others together.
    """
    rng = np.random.default_rng(0)
    num_tokens, _, num_seqs = step.bucket
    size, dtype = shape.block_size, FORMATS[shape.dtype].dtype
    used = [-(-length // size) for length in step.contexts]
    order = 1 + rng.permutation(sum(used)).astype(np.int32)
    tables = np.zeros((num_seqs, max(used)), np.int32)
    pool = shape.pool(1 + sum(used))
    for seq, (length, count) in enumerate(zip(step.contexts, used, strict=True)):
        first = sum(used[:seq])
        tables[seq, :count] = order[first : first + count]
        position = np.arange(length)
        slots = tables[seq, position // size], slice(None), position % size
        k, v = rng.standard_normal((2, length, shape.kv_heads, shape.head_dim), np.float32)
        look_up(k, on_edges(length, shape.windows))
        for blocks, numbers in zip(pool, (k, v), strict=False):
            blocks[slots] = numbers
    lens = np.zeros(num_seqs, np.int32)
    lens[: len(step.contexts)] = step.contexts
    count = sum(step.new)
    starts = np.full(num_seqs + 1, count, np.int32)
    starts[: len(step.new) + 1] = np.cumsum((0, *step.new))
    q = rng.standard_normal((count, shape.heads, shape.head_dim))
    look(q)
    q /= shape.layout.model.attention_scale * shape.head_dim**0.5
    if shape.soft_cap is not None:
        q[1::2] *= max(1.0, shape.soft_cap / 8)
    kv_scales = sinks = None
    if FORMATS[shape.kv_dtype].has_scales:
        kv_scales = 2 ** rng.uniform(-1, 1, (2, shape.kv_heads)).astype(np.float32)
    if shape.has_sinks:
        sinks = rng.uniform(3, 7, shape.heads).astype(dtype)
    codes = CodeKind() if step.codes else None
    terms = LayerTerms(kv_scales=kv_scales, sinks=sinks, codes=codes)
    q = q.astype(dtype)[np.arange(num_tokens) % count]  # of padding, too: nothing may come of it
    return Inputs(q, pool, tables, lens, starts, terms)


# ------------------------------------------------------------------ keys that weigh much


def on_edges(length: int, windows: Sequence[Window | None] = ()) -> np.ndarray:
    """Return positions of both sides of edges, and of the ends of what the last token sees.

    Edges of blocks, tiles, rounds and spans are multiples of powers of two: all of 16, or of the
    least power of which there are `MOST_EDGES`. Of n keys like all others one weighs 1 / sqrt(n)
    of the result, that is nothing in a long context; one of these is 8% of it at least.
    """
    stride = max(16, _power_of_two(-(-length // MOST_EDGES)))
    edges = np.arange(0, length + 1, stride)
    ends = [length, *(first_seen(length - 1, window) for window in windows)]
    places = np.unique(np.concatenate([edges, edges - 1, ends, np.array(ends) - 1]))
    return places[(places >= 0) & (places < length)]


def look_up(k: np.ndarray, places: np.ndarray) -> None:
    """Make the keys in `places` of [tokens, kv_heads, head_dim] ones that `look` looks for."""
    k[places] = k[places] / 4 + _direction(k.shape[-1])


def look(q: np.ndarray) -> None:
    """Make every other query of [tokens, heads, head_dim] look for keys that are looked up.

    Its scores of them are SCORE_OF_EDGES, give or take 1/4, where those of others spread by 1.
    """
    token, head = np.indices(q.shape[:2])
    q[(token + head) % 2 == 1] += _direction(q.shape[-1])


def _direction(head_dim: int) -> np.ndarray:
    """Return what keys and queries have in common, so that their product is as large as said."""
    signs = np.where(np.arange(head_dim) % 3 == 1, -1, 1)
    return signs * (SCORE_OF_EDGES / head_dim**0.5) ** 0.5

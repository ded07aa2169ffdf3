"""What the attention kernels must get right before they serve, tried in a process of its own.

    python -m shiftjax.device.attention_cases      started by `attention_check`

A kernel that hangs, or that breaks the CUDA context, cannot be survived by the process that runs
it. Standard input is one line, a `Trial`; it stays open, and where it ends, the parent has, and so
does this process. Standard output is a line of JSON for everything that happens:

    {"case": "4 decodes in 8"}                          has begun
    {"case": ..., "problem": ..., "detail": ..., "is_final": ...}     failed: the last line
    {"passed": true}                                    the last line

The kernels are held against XLA's loops on the same device, on every device at once. Slots of the
pools that no token is in hold NaN, block tables are shuffled, and every step runs three times. A
model with experts has a few steps of theirs (`expert_cases`).
"""

import dataclasses
import importlib
import itertools
import json
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from shiftjax.arch.config import LayerKind, ModelConfig
from shiftjax.arch.formats import FORMATS
from shiftjax.device import expert_cases
from shiftjax.device.expert_cases import ExpertStep
from shiftjax.device.mesh import devices_spec, named, replicated_spec, rows_mesh
from shiftjax.models.attention import AttentionMetadata, LayerTerms, pool_shape
from shiftjax.models.attention_backend import AttentionBackend, loops_of, tuned_attention
from shiftjax.models.expert_backend import ExpertShape, why_not_traced
from shiftjax.parallel.grid import Device
from shiftjax.parallel.layout import Layout

NUM_RUNS = 3  # of every step, whose bits must agree: a race shows
# bfloat16 keeps 8 bits: outputs, and the weights of values, are rounded by up to 2^-9. A wrong
# mask, scale, head or block is off by 5% and more.
MOST_RELATIVE_ERROR = 1e-2  # of the rows of a sequence, in the Euclidean norm
MOST_ERROR = 0.05  # of a number; values are drawn from the normal distribution
BEYOND_WINDOW = 65  # tokens that the longest contexts have more than a window, at least
MOST_OUTGROWN = 8192  # tokens: a wider window is tried with contexts that it holds


@dataclasses.dataclass(frozen=True)
class Shape:
    """What kernels are compiled for: the part of a deployment that is one device's."""

    heads: int  # of queries
    kv_heads: int
    head_dim: int
    block_size: int
    windows: tuple[int | None, ...]  # `ModelConfig.windows`: layers of each are tried
    dtype: str  # of queries; a name of `arch.formats`
    kv_dtype: str
    bucket: tuple[int, ...]  # tokens, logit rows and sequences of the largest step
    deterministic: bool = False
    experts: ExpertShape | None = None
    scale: float | None = None  # of scores; None: head_dim ** -0.5
    soft_cap: float | None = None  # of scores
    has_sinks: bool = False

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
            layer_kinds=tuple(LayerKind(window, 10_000.0) for window in self.windows),
            query_scale=self.scale,
            attention_soft_cap=self.soft_cap,
            attention_sinks=self.has_sinks,
        )
        return Layout(model, 1, 1)


@dataclasses.dataclass(frozen=True)
class Cases:
    """The sequences that are tried: around edges of blocks and tiles, and longer than a job."""

    decodes: tuple[int, ...] = (1, 15, 16, 17, 63, 64, 65, 337, 3000)  # contexts
    chunks: tuple[tuple[int, int], ...] = ((17, 17), (130, 196), (100, 700))  # tokens, contexts
    num_beside: int = 2  # of the last decodes, in the step of the chunks
    in_largest: bool = True  # also in the largest bucket, whose kernels are other programs


@dataclasses.dataclass(frozen=True)
class Trial:
    """What the process is told."""

    shape: Shape
    cases: Cases
    device_kind: str
    device_ids: tuple[int, ...]
    builder: str = ""  # module:function that makes the kernels of a Shape; "": those that serve

    @classmethod
    def read(cls, text: str) -> "Trial":
        """Undo `json.dumps(dataclasses.asdict(trial))`."""
        fields = json.loads(text)
        shape, of_experts = fields["shape"], fields["shape"].get("experts")
        experts = ExpertShape(*of_experts) if of_experts else None
        tuples = {name: tuple(shape[name]) for name in ("windows", "bucket")}
        shape = Shape(**shape | tuples | {"experts": experts})
        cases = fields["cases"]
        chunks = tuple((tokens, context) for tokens, context in cases["chunks"])
        cases = Cases(**cases | {"decodes": tuple(cases["decodes"]), "chunks": chunks})
        ids = tuple(fields["device_ids"])
        return cls(**fields | {"shape": shape, "cases": cases, "device_ids": ids})


class Problem(NamedTuple):
    """What is wrong with the kernels, for people; `detail` is for a log."""

    problem: str
    detail: str
    is_final: bool = True  # false: it may be something that passes, as a want of memory


class Step(NamedTuple):
    """Sequences in a bucket: decodes first, then chunks, then padding."""

    name: str
    bucket: tuple[int, ...]  # tokens, logit rows, sequences
    new: tuple[int, ...]  # tokens of each sequence
    contexts: tuple[int, ...]  # with these
    num_decodes: int


def steps_of(shape: Shape, cases: Cases) -> Iterator[Step]:
    """Yield decodes alone, and chunks beside decodes: in a bucket of theirs and in the largest.

    The last of both are longer than every window, where that is not too much.
    """
    outgrown = [window for window in shape.windows if window and window <= MOST_OUTGROWN]
    least = max((window + BEYOND_WINDOW for window in outgrown), default=0)
    count, decodes = len(cases.decodes), (*cases.decodes[:-1], max(cases.decodes[-1], least))
    beside = decodes[-cases.num_beside :]
    tokens, contexts = (tuple(each) for each in zip(*cases.chunks, strict=True))
    contexts = (*contexts[:-1], max(contexts[-1], least + tokens[-1]))
    kinds = (
        (f"{count} decodes", (1,) * count, decodes, count),
        (f"chunks beside {len(beside)} decodes", (1,) * len(beside) + tokens, beside + contexts,
         len(beside)),
    )  # fmt: skip
    for name, new, lengths, num_decodes in kinds:
        rows = _power_of_two(len(new))
        own = (_power_of_two(sum(new) + 1), rows, rows)  # one token of padding at least
        largest = tuple(max(a, b) for a, b in zip(own, shape.bucket, strict=True))
        for bucket in dict.fromkeys((own, largest) if cases.in_largest else (own,)):
            yield Step(f"{name} in {bucket[0]}", bucket, new, lengths, num_decodes)


def _power_of_two(least: int) -> int:
    return max(8, 1 << (least - 1).bit_length())


class Inputs(NamedTuple):
    """The arrays of a step, NumPy."""

    q: np.ndarray  # [tokens, heads, head_dim]
    pool: tuple[np.ndarray, np.ndarray]  # K and V, `pool_shape`
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
        work = kernels.divide(*contexts, step.num_decodes, num_tokens=num_tokens, num_rows=num_rows)
        slots = np.zeros(step.bucket[0], np.int32)  # everything is written already
        return AttentionMetadata(slots, *contexts, np.asarray(step.num_decodes, np.int32), work)


def make_inputs(shape: Shape, step: Step) -> Inputs:
    """Draw queries, keys and values; every slot without a token is NaN, the null block's, too.

    Scores spread by 1, whatever the scale; with a soft cap those of every other token so far that
    it matters. Sinks weigh as much as some tens or hundreds of keys.
    """
    rng = np.random.default_rng(0)
    num_tokens, _, num_seqs = step.bucket
    size, dtype, kv_dtype = (
        shape.block_size,
        *(FORMATS[n].dtype for n in (shape.dtype, shape.kv_dtype)),
    )
    used = [-(-length // size) for length in step.contexts]
    order = 1 + rng.permutation(sum(used)).astype(np.int32)
    tables = np.zeros((num_seqs, max(used)), np.int32)
    pool_size = pool_shape(1 + sum(used), shape.kv_heads, size, shape.head_dim)
    pool = np.full(pool_size, np.nan, kv_dtype), np.full(pool_size, np.nan, kv_dtype)
    for seq, (length, count) in enumerate(zip(step.contexts, used, strict=True)):
        first = sum(used[:seq])
        tables[seq, :count] = order[first : first + count]
        position = np.arange(length)
        slots = tables[seq, position // size], slice(None), position % size
        for array in pool:
            array[slots] = rng.standard_normal((length, shape.kv_heads, shape.head_dim))
    lens = np.zeros(num_seqs, np.int32)
    lens[: len(step.contexts)] = step.contexts
    starts = np.full(num_seqs + 1, sum(step.new), np.int32)
    starts[: len(step.new) + 1] = np.cumsum((0, *step.new))
    q = rng.standard_normal((num_tokens, shape.heads, shape.head_dim))
    q /= shape.layout.model.attention_scale * shape.head_dim**0.5
    if shape.soft_cap is not None:
        q[1::2] *= max(1.0, shape.soft_cap / 8)
    kv_scales = sinks = None
    if FORMATS[shape.kv_dtype].has_scales:
        kv_scales = 2 ** rng.uniform(-1, 1, (2, shape.kv_heads)).astype(np.float32)
    if shape.has_sinks:
        sinks = rng.uniform(3, 7, shape.heads).astype(dtype)
    terms = LayerTerms(kv_scales=kv_scales, sinks=sinks)
    return Inputs(q.astype(dtype), pool, tables, lens, starts, terms)


def on_each(attend: Callable[..., jax.Array], devices: Sequence[Device]) -> Callable[..., Any]:
    """Make a layer of each window one program of all devices, which compute the same.

    It returns [devices, windows, tokens, heads, head_dim].
    """

    def attend_all(q, pool, metadata, terms):
        layers = [dataclasses.replace(terms, window=i) for i in range(len(metadata.work))]
        return jnp.stack([attend(q, pool, metadata, layer) for layer in layers])[None]

    return jax.shard_map(
        attend_all,
        mesh=rows_mesh(devices),
        in_specs=(replicated_spec(),) * 4,
        out_specs=devices_spec(),
        check_vma=False,
    )


def compiled(
    step: Step, inputs: Inputs, kernels: AttentionBackend, devices: Sequence[Device]
) -> Callable[[], np.ndarray]:
    """Compile a step for all devices; what comes back runs it."""
    arrays = inputs.q, inputs.pool, inputs.metadata(step, kernels), inputs.terms
    arguments = jax.device_put(arrays, named(rows_mesh(devices), replicated_spec()))
    program = jax.jit(on_each(kernels.attend, devices)).lower(*arguments).compile()
    return lambda: np.asarray(program(*arguments))


def wrong_with(outputs: Sequence[np.ndarray], expected: np.ndarray, step: Step) -> str | None:
    """Say what is wrong with a layer on one device, a run each; `expected` is of the loops."""
    first = outputs[0].view(np.uint16)
    for later in outputs[1:]:
        if changed := int((later.view(np.uint16) != first).sum()):
            return f"{changed} of {first.size} numbers change from run to run"
    got, wanted = (array.astype(np.float64) for array in (outputs[0], expected))
    end = sum(step.new)
    if got[end:].any():
        return "rows of padding are not zero"
    starts = np.cumsum((0, *step.new))
    for length, start, stop in zip(step.contexts, starts[:-1], starts[1:], strict=True):
        rows, right = got[start:stop], wanted[start:stop]
        largest = np.abs(rows - right).max()
        relative = np.linalg.norm(rows - right) / np.linalg.norm(right)
        if not (relative < MOST_RELATIVE_ERROR and largest < MOST_ERROR):  # NaN is neither
            return (
                f"a sequence of {length} tokens, {stop - start} of them new, is off by "
                f"{relative:.2g} of its norm, a number by {largest:.2g}"
            )
    return None


def build(trial: Trial, device: Device) -> AttentionBackend:
    """Make the kernels that are tried."""
    shape = trial.shape
    if not trial.builder:
        return tuned_attention(shape.layout, device, shape.block_size, shape.deterministic)[0]
    module, _, function = trial.builder.partition(":")
    return getattr(importlib.import_module(module), function)(shape)


def try_step(
    step: Step, shape: Shape, kernels: AttentionBackend, devices: Sequence[Device]
) -> Problem | None:
    """Run one step; None: nothing is wrong."""
    inputs, windows = make_inputs(shape, step), shape.windows
    loops = loops_of(shape.layout.model, shape.block_size)
    expected = compiled(step, inputs, loops, devices)()

    def judge(run: Callable[[], np.ndarray]) -> Problem | None:
        outputs = [run() for _ in range(NUM_RUNS)]
        for (place, device), nth in itertools.product(enumerate(devices), range(len(windows))):
            words = wrong_with([out[place, nth] for out in outputs], expected[place, nth], step)
            if words:
                words += f" (window {windows[nth]})" if len(windows) > 1 else ""
                return Problem(words, f"on device {device.id} of {len(devices)}")
        return None

    return attempt(lambda: compiled(step, inputs, kernels, devices), judge)


def try_experts(step: ExpertStep, shape: ExpertShape, devices: Sequence[Device]) -> Problem | None:
    """Run one step of experts; None: nothing is wrong."""

    def judge(run: Callable[[], np.ndarray]) -> Problem | None:
        found = expert_cases.wrong_with_step(shape, step, run, devices, NUM_RUNS)
        return Problem(*found) if found else None

    kernels = expert_cases.kernels(shape, step)
    return attempt(lambda: expert_cases.outputs_of(kernels, shape, step, devices), judge)


def attempt(
    compile_kernels: Callable[[], Callable[[], np.ndarray]],
    judge: Callable[[Callable[[], np.ndarray]], Problem | None],
) -> Problem | None:
    """Compile kernels and judge what comes of them; what either raises is a problem, too."""
    try:
        run = compile_kernels()
    except Exception as error:
        words = f"the kernels do not compile ({type(error).__name__})"
        return Problem(words, traceback.format_exc())
    try:
        return judge(run)
    except Exception as error:
        words = f"the kernels fail as they run ({type(error).__name__})"
        return Problem(words, traceback.format_exc(), is_final=False)


def run_trial(trial: Trial, say: Callable[..., None]) -> None:
    """Try every step until one fails; `say` takes the fields of a line."""
    devices = [each for each in jax.local_devices() if each.id in trial.device_ids]
    kinds = {device.device_kind for device in devices}
    if kinds != {trial.device_kind} or len(devices) != len(trial.device_ids):
        words = f"their process found {len(devices)} x {', '.join(kinds) or 'nothing'}"
        return say(**Problem(words, "", is_final=False)._asdict())
    kernels, experts = build(trial, devices[0]), trial.shape.experts
    tries: list[tuple[str, Callable[[], Problem | None]]] = [
        (step.name, partial(try_step, step, trial.shape, kernels, devices))
        for step in steps_of(trial.shape, trial.cases)
    ]
    if experts is not None and why_not_traced(experts) is None:
        tries += [
            (step.name, partial(try_experts, step, experts, devices))
            for step in expert_cases.expert_steps(experts.per_token)
        ]
    for name, run in tries:
        say(case=name)
        problem = run()
        if problem:
            return say(case=name, **problem._asdict())
    return say(passed=True)


def _end_with_parent() -> None:
    while os.read(0, 1):  # not `sys.stdin`, whose lock this thread would hold to the end
        pass
    os._exit(1)


def main() -> None:
    """Read a trial, run it, say what happens."""
    lines = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print is not ours to say
    trial = Trial.read(sys.stdin.readline())
    threading.Thread(target=_end_with_parent, daemon=True).start()
    run_trial(trial, lambda **fields: print(json.dumps(fields), file=lines, flush=True))


if __name__ == "__main__":
    main()

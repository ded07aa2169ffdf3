"""What the attention kernels must get right before they serve, tried in a process of its own.

    python -m shiftjax.device.attention_cases      started by `attention_check`

A kernel that hangs, or that breaks the CUDA context, cannot be survived by the process that runs
it. Standard input is one line, a `Trial`; it stays open, and where it ends, the parent has, and so
does this process. Standard output is a line of JSON for everything that happens:

    {"case": "4 decodes in 8"}                          has begun
    {"case": ..., "problem": ..., "detail": ..., "is_final": ...}     failed: the last line
    {"passed": true}                                    the last line

The kernels are held against XLA's loops on the same device, on every device at once. Slots of the
pools that no token is in hold NaN, block tables are shuffled, and every step runs three times
(`attention_steps`). Pools of codes are written, too (`write_cases`), and a model with experts has a
few steps of theirs (`expert_cases`), one with matrices of four bits or of codes some products
(`packed_cases`, `product_cases`). Norms of the stream are tried, too (`norm_cases`), and so is
what takes heads from their product to attention (`entry_cases`). Where devices split positions,
each tries the parts of all (`position_cases`).
"""

import dataclasses
import importlib
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

from pallas_kernels.window import Chunk
from shiftjax.arch.formats import FORMATS
from shiftjax.device import (
    entry_cases,
    expert_cases,
    norm_cases,
    packed_cases,
    position_cases,
    product_cases,
    sum_cases,
    write_cases,
)
from shiftjax.device.attention_steps import Cases, Inputs, Shape, Step, make_inputs, steps_of
from shiftjax.device.entry_cases import EntryStep
from shiftjax.device.expert_cases import ExpertStep
from shiftjax.device.mesh import devices_spec, named, replicated_spec, rows_mesh
from shiftjax.device.norm_cases import NormStep
from shiftjax.device.packed_cases import PackedStep
from shiftjax.device.product_cases import CodeStep
from shiftjax.device.sum_cases import SumStep
from shiftjax.models.attention_backend import AttentionBackend, loops_of, tuned_attention
from shiftjax.models.entry_backend import EntryShape
from shiftjax.models.expert_backend import ExpertShape, why_not_traced
from shiftjax.models.norm_backend import NormShape, why_not_normed
from shiftjax.models.packed_backend import PackedMatrix, PackedShape
from shiftjax.models.product_backend import CodeMatrix, CodeShape, pallas_codes
from shiftjax.models.products import BLOCK, Codes, numbers
from shiftjax.models.sum_backend import SumShape
from shiftjax.parallel.grid import Device

NUM_RUNS = 3  # of every step, whose bits must agree: a race shows
# bfloat16 keeps 8 bits: outputs, and the weights of values, are rounded by up to 2^-9. A wrong
# mask, scale, head or block is off by 5% and more.
MOST_RELATIVE_ERROR = 1e-2  # of a token's head, in the Euclidean norm
MOST_ERROR = 0.05  # of a number; values are drawn from the normal distribution
MOST_OF_CODES = 5e-2  # of a head, and of its largest number: codes keep 4 bits, 2^-5 of a number


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
        windows = (Chunk(**each) if isinstance(each, dict) else each for each in shape["windows"])
        tuples = {"windows": tuple(windows), "bucket": tuple(shape["bucket"])}
        sums = SumShape(*shape["sums"]) if shape.get("sums") else None
        parts = {"experts": experts, "packed": _packed_of(shape), "sums": sums}
        parts |= {name: _codes_of(shape, name) for name in ("codes", "plain")}
        parts["entry"] = _entry_of(shape)
        parts["norm"] = NormShape(*shape["norm"]) if shape.get("norm") else None
        shape = Shape(**shape | tuples | parts)
        cases = fields["cases"]
        chunks = tuple((tokens, context) for tokens, context in cases["chunks"])
        cases = Cases(**cases | {"decodes": tuple(cases["decodes"]), "chunks": chunks})
        ids = tuple(fields["device_ids"])
        return cls(**fields | {"shape": shape, "cases": cases, "device_ids": ids})


def _packed_of(shape: dict[str, Any]) -> PackedShape | None:
    """Return the matrices of four bits of a shape that was read."""
    if not (read := shape.get("packed")):
        return None
    matrices, *others = read
    return PackedShape(tuple(PackedMatrix(*each) for each in matrices), *others)


def _codes_of(shape: dict[str, Any], name: str) -> CodeShape | None:
    """Return the matrices of codes, or of numbers, of a shape that was read."""
    if not (read := shape.get(name)):
        return None
    matrices, *others = read
    return CodeShape(tuple(CodeMatrix(*each) for each in matrices), *others)


def _entry_of(shape: dict[str, Any]) -> EntryShape | None:
    """Return the heads that a kernel takes to attention, of a shape that was read."""
    if not (read := shape.get("entry")):
        return None
    norm = read[-1]
    return EntryShape(*read)._replace(norm=tuple(norm) if norm else None)


class Problem(NamedTuple):
    """What is wrong with the kernels, for people; `detail` is for a log."""

    problem: str
    detail: str
    is_final: bool = True  # false: it may be something that passes, as a want of memory


Attend = Callable[..., jax.Array | Codes]
# Says what is wrong with the outputs of a device, one of each run, beside what is right.
Wrong = Callable[[Sequence[np.ndarray], np.ndarray], str | None]


def on_each(attend: Attend, devices: Sequence[Device]) -> Callable[..., Any]:
    """Make a layer of each window one program of all devices, which compute the same.

    It returns [devices, windows, tokens, heads, head_dim].
    """

    def attend_all(q, pool, metadata, terms):
        layers = [dataclasses.replace(terms, window=i) for i in range(len(metadata.work))]
        outs = (attend(q, pool, metadata, layer) for layer in layers)
        return jnp.stack([_as_numbers(out, q) for out in outs])[None]

    return jax.shard_map(
        attend_all,
        mesh=rows_mesh(devices),
        in_specs=(replicated_spec(),) * 4,
        out_specs=devices_spec(),
        check_vma=False,
    )


def _as_numbers(out: jax.Array | Codes, like: jax.Array) -> jax.Array:
    return numbers(out, BLOCK, like.dtype).reshape(like.shape) if isinstance(out, Codes) else out


def attend_of(step: Step, kernels: AttentionBackend) -> Attend:
    """Return what runs a step: of one of late layers their own call, with its arrays."""
    if not step.is_late:
        return kernels.attend

    def attend(q, pool, metadata, terms):
        return kernels.attend_rows(q, pool, metadata.block_tables, metadata.work, terms)

    return attend


def compiled(
    step: Step, inputs: Inputs, kernels: AttentionBackend, devices: Sequence[Device]
) -> Callable[[], np.ndarray]:
    """Compile a step for all devices; what comes back runs it."""
    arrays = inputs.q, inputs.pool, inputs.metadata(step, kernels), inputs.terms
    arguments = jax.device_put(arrays, named(rows_mesh(devices), replicated_spec()))
    program = jax.jit(on_each(attend_of(step, kernels), devices)).lower(*arguments).compile()
    return lambda: np.asarray(program(*arguments))


def wrong_with(outputs: Sequence[np.ndarray], expected: np.ndarray, step: Step) -> str | None:
    """Say what is wrong with a layer on one device, a run each; `expected` is of the loops."""
    first = outputs[0].view(np.uint16)
    for later in outputs[1:]:
        if changed := int((later.view(np.uint16) != first).sum()):
            return f"{changed} of {first.size} numbers change from run to run"
    got, wanted = (array.astype(np.float64) for array in (outputs[0], expected))
    most, most_error = MOST_RELATIVE_ERROR, MOST_ERROR
    if step.codes:
        most, most_error = MOST_OF_CODES, MOST_ERROR + MOST_OF_CODES * np.abs(wanted).max()
    end = sum(step.new)
    if got[end:].any():
        return "rows of padding are not zero"
    starts = np.cumsum((0, *step.new))
    for length, start, stop in zip(step.contexts, starts[:-1], starts[1:], strict=True):
        rows, right = got[start:stop], wanted[start:stop]
        largest = np.abs(rows - right).max()
        norms = (np.linalg.norm(array, axis=-1) for array in (rows - right, right))
        relative = np.divide(*norms).max()
        if not (relative < most and largest < most_error):  # NaN is neither
            return (
                f"a sequence of {length} tokens, {stop - start} of them new, is off by "
                f"{relative:.2g} of a head's norm, a number by {largest:.2g}"
            )
    return None


def build(trial: Trial, device: Device) -> AttentionBackend:
    """Make the kernels that are tried."""
    shape = trial.shape
    if not trial.builder and (shape.ways > 1 or shape.values_in_keys is not None):
        return position_cases.tuned_in_turn(shape, device)
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
    right = compiled(step, inputs, loops, devices)

    def wrong(outputs: Sequence[np.ndarray], expected: np.ndarray) -> str | None:
        for nth, window in enumerate(windows):
            if words := wrong_with([out[nth] for out in outputs], expected[nth], step):
                return words + (f" (window {window})" if len(windows) > 1 else "")
        return None

    return attempt(lambda: compiled(step, inputs, kernels, devices), right, wrong, devices)


def try_write(shape: Shape, kernels: AttentionBackend, devices: Sequence[Device]) -> Problem | None:
    """Write codes of keys and values; None: nothing is wrong."""
    arrays = write_cases.make_arrays(shape)
    loops = loops_of(shape.layout.model, shape.block_size)
    return attempt(
        lambda: write_cases.outputs_of(kernels, arrays, devices),
        write_cases.outputs_of(loops, arrays, devices),
        write_cases.wrong_with_codes,
        devices,
    )


def try_entry(
    step: EntryStep, shape: EntryShape, kernels: AttentionBackend, devices: Sequence[Device]
) -> Problem | None:
    """Take heads from a product to attention; None: nothing is wrong."""
    outputs = partial(entry_cases.outputs_of, shape=shape, step=step, devices=devices)
    right, own = outputs(entry_cases.operations), partial(entry_cases.kernel, backend=kernels)
    wrong = partial(entry_cases.wrong_with_heads, shape=shape, step=step)
    return attempt(lambda: outputs(own), right, wrong, devices)


def try_experts(step: ExpertStep, shape: ExpertShape, devices: Sequence[Device]) -> Problem | None:
    """Run one step of experts; None: nothing is wrong."""
    kernels, loop = expert_cases.kernels(shape, step), expert_cases.loop(shape)
    return attempt(
        lambda: expert_cases.outputs_of(kernels, shape, step, devices),
        expert_cases.outputs_of(loop, shape, step, devices),
        partial(expert_cases.wrong_with_pairs, shape=shape),
        devices,
    )


def try_norm(step: NormStep, shape: NormShape, devices: Sequence[Device]) -> Problem | None:
    """Run norms of the stream; None: nothing is wrong."""
    outputs = partial(norm_cases.outputs_of, shape=shape, devices=devices)
    right = outputs(norm_cases.operations(step, shape))
    wrong = partial(norm_cases.wrong_with_norms, step=step)
    return attempt(lambda: outputs(norm_cases.kernels(step, shape)), right, wrong, devices)


def try_packed(step: PackedStep, shape: PackedShape, devices: Sequence[Device]) -> Problem | None:
    """Run one product with a matrix of four bits; None: nothing is wrong."""
    outputs = partial(packed_cases.outputs_of, shape=shape, step=step, devices=devices)
    right, wrong = outputs(packed_cases.loop), packed_cases.wrong_with_tokens
    return attempt(lambda: outputs(packed_cases.kernels), right, wrong, devices)


def try_codes(step: CodeStep, shape: CodeShape, devices: Sequence[Device]) -> Problem | None:
    """Run one product of codes, or of numbers; None: nothing is wrong."""
    outputs = partial(product_cases.outputs_of, shape=shape, step=step, devices=devices)
    right = outputs(product_cases.operations(shape, step))
    multiply = product_cases.kernels(shape, step, pallas_codes(devices[0]))
    wrong = partial(product_cases.wrong_with_products, step=step)
    return attempt(lambda: outputs(multiply), right, wrong, devices)


def try_sums(step: SumStep, shape: SumShape, devices: Sequence[Device]) -> Problem | None:
    """Run one chain of sums over the devices; None: nothing is wrong."""
    right = sum_cases.outputs_of(sum_cases.all_reduce, shape, step, devices)
    outputs = partial(sum_cases.outputs_of, sum_cases.kernel, shape, step, devices)
    return attempt(outputs, right, sum_cases.wrong_with_sums, devices)


def attempt(
    compile_kernels: Callable[[], Callable[[], np.ndarray]],
    right: Callable[[], np.ndarray],
    wrong: Wrong,
    devices: Sequence[Device],
) -> Problem | None:
    """Compile kernels and judge what comes of them; what is raised is a problem, too.

    Arrays have an axis of devices first. `right` makes what `wrong` holds the outputs against.
    """
    try:
        run = compile_kernels()
    except Exception as error:
        words = f"the kernels do not compile ({type(error).__name__})"
        return Problem(words, traceback.format_exc())
    try:
        return judged(run, right(), wrong, devices, NUM_RUNS)
    except Exception as error:
        words = f"the kernels fail as they run ({type(error).__name__})"
        return Problem(words, traceback.format_exc(), is_final=False)


def judged(
    run: Callable[[], np.ndarray],
    expected: np.ndarray,
    wrong: Wrong,
    devices: Sequence[Device],
    num_runs: int,
) -> Problem | None:
    """Run compiled kernels some times; what is wrong with them on the first device where it is."""
    outputs = [run() for _ in range(num_runs)]
    for place, device in enumerate(devices):
        if words := wrong([out[place] for out in outputs], expected[place]):
            return Problem(words, f"on device {device.id} of {len(devices)}")
    return None


def tries_of(
    trial: Trial, kernels: AttentionBackend, devices: Sequence[Device]
) -> Iterator[tuple[str, Callable[[], Problem | None]]]:
    """Yield what is tried, by name: attention, and what the deployment has beside it.

    Or sums over devices alone, or products of numbers: what is wrong with them leaves attention as
    it is.
    """
    shape = trial.shape
    if shape.sums is not None or shape.plain is not None:
        yield from _tries_alone(shape, devices)
        return
    for step in steps_of(shape, trial.cases):
        yield step.name, partial(try_step, step, shape, kernels, devices)
    if FORMATS[shape.kv_dtype].has_scales and shape.values_in_keys is None:
        yield "a write of codes", partial(try_write, shape, kernels, devices)
    if shape.entry is not None:
        for step in entry_cases.entry_steps():
            yield step.name, partial(try_entry, step, shape.entry, kernels, devices)
    yield from tries_beside(shape, devices)


def tries_beside(
    shape: Shape, devices: Sequence[Device]
) -> Iterator[tuple[str, Callable[[], Problem | None]]]:
    """Yield the same of kernels beside attention: experts, norms, products."""
    if shape.experts is not None and why_not_traced(shape.experts) is None:
        for step in expert_cases.expert_steps(shape.experts.per_token):
            yield step.name, partial(try_experts, step, shape.experts, devices)
    if shape.norm is not None and why_not_normed(shape.norm) is None:
        for step in norm_cases.norm_steps(shape.norm):
            yield step.name, partial(try_norm, step, shape.norm, devices)
    if shape.packed is not None:
        for step in packed_cases.packed_steps(shape.packed):
            yield step.name, partial(try_packed, step, shape.packed, devices)
    if shape.codes is not None:
        for step in product_cases.code_steps(shape.codes):
            yield step.name, partial(try_codes, step, shape.codes, devices)


def _tries_alone(
    shape: Shape, devices: Sequence[Device]
) -> Iterator[tuple[str, Callable[[], Problem | None]]]:
    if shape.sums is not None:
        for step in sum_cases.sum_steps(shape.sums, len(devices)):
            yield step.name, partial(try_sums, step, shape.sums, devices)
    if shape.plain is not None:
        for step in product_cases.code_steps(shape.plain):
            yield step.name, partial(try_codes, step, shape.plain, devices)


def run_trial(trial: Trial, say: Callable[..., None]) -> None:
    """Try every step until one fails; `say` takes the fields of a line."""
    devices = [each for each in jax.local_devices() if each.id in trial.device_ids]
    kinds = {device.device_kind for device in devices}
    if kinds != {trial.device_kind} or len(devices) != len(trial.device_ids):
        words = f"their process found {len(devices)} x {', '.join(kinds) or 'nothing'}"
        return say(**Problem(words, "", is_final=False)._asdict())
    kernels = build(trial, devices[0])
    for name, run in tries_of(trial, kernels, devices):
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

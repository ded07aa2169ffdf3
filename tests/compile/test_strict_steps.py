"""Steps of strict numerics, compiled for 8 H200s: what could make bits depend on rows is not there.

That a product has one tile and one split is seen here, and that sums over many numbers are the same
operations in programs of all modes and sizes. That a chip then gives equal bits is not.
"""

import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

import aot
import pytest
from hlo import Instruction, collectives, instructions, sizes_of
from spent import exhaustive, thorough

from serving.bench.hlo import computations
from shiftjax.device.sampling import sample
from shiftjax.device.strict import TILES, tile_of
from shiftjax.parallel.grid import Mode

aot.require()

from steps import Case, Compiler, predicted_collectives  # noqa: E402

BASE = Case(4, 2, Mode(4, 4), num_layers=1, numerics="invariant")
DECODES = BASE._replace(mode=Mode(4, 1), num_decodes=8)
OTHERS = [DECODES._replace(num_decodes=64), BASE._replace(num_tokens=4096)]
KERNELS = {"prefill_attention", "rope_write", "add_norm"}  # no kernel of decodes is among them
SILENT = {"bitcast", "broadcast", "constant", "parameter"}
BY_HAND = re.compile(r"__cublas|__cudnn|__triton_gemm\"")  # their algorithm is chosen by size


class Sum(NamedTuple):
    """How floating-point numbers are added up: what a program has for each row."""

    num: int  # numbers that are added
    kind: str  # of the fusion that has it
    sizes: tuple[int, ...]  # of Triton: its tile; else none
    opcodes: tuple[str, ...]  # of what is fused


@cache
def compiler() -> Compiler:
    return Compiler()


def callers(text: str) -> dict[str, Instruction]:
    """The instruction that calls a computation, by the name of that."""
    found = ((re.search(r"calls=%([\w.-]+)", one.rest), one) for one in instructions(text))
    return {called[1]: one for called, one in found if called}


def products(text: str) -> Counter[tuple[int, str]]:
    """How many products there are, by the length of a contraction and how it is computed."""
    called, found = callers(text), Counter()
    for name, body in computations(text).items():
        shapes = {one.name: one.shape for one in body.instructions}
        for one in body.instructions:
            if one.opcode == "dot":
                assert "batch_dims" not in one.rest, "a contraction is cut"
                axis = re.search(r"lhs_contracting_dims={(\d+)}", one.rest)
                steps = re.search(r'"sizes":\["(\d+)"\]', one.rest)
                assert axis and steps and name in called, one
                config = block_level(called[name])
                inner = sizes_of(shapes[one.operands[0]])[int(axis[1])]
                found[inner, f"{config} block_k:{steps[1]}"] += 1
    return found


def block_level(one: Instruction) -> str:
    """What Triton is told of a fusion."""
    config = re.search(r'"block_level_fusion_config":({.*?"num_stages":\d+)', one.rest)
    return config[1] if config else ""


def sums(text: str) -> set[Sum]:
    """All sums of floating-point numbers along rows."""
    return set(_sums(text))


def _sums(text: str) -> Iterator[Sum]:
    bodies, called = computations(text), callers(text)
    for name, body in bodies.items():
        shapes = {one.name: one.shape for one in body.instructions}
        for one in body.instructions:
            adds = re.search(r"to_apply=%([\w.-]+)", one.rest)
            if one.opcode != "reduce" or not one.shape.startswith("f32") or adds is None:
                continue
            if any(each.opcode == "add" for each in bodies[adds[1]].instructions):
                axes = re.search(r"dimensions={(\d+)}", one.rest)
                assert axes and name in called, one
                config = block_level(called[name])
                tile = re.search(r'"sizes":\[([^\]]*)\]', config)
                sizes = [int(n) for n in re.findall(r"\d+", tile[1])] if tile else []
                kind = re.search(r"kind=(\w+)", called[name].rest)
                assert kind
                yield Sum(
                    sizes_of(shapes[one.operands[0]])[int(axes[1])],
                    kind[1],
                    tuple(n for n in sizes if n > 1),
                    tuple(sorted({each.opcode for each in body.instructions} - SILENT)),
                )


def tile_in_words(step) -> str:
    """The tile of a deployment's products as the compiled text has it."""
    wanted = dict(re.findall(r"(\w+):(\d+)", TILES[tile_of(step.layout, step.model.formats)]))
    return (
        f'{{"num_warps":"{wanted["num_warps"]}","output_tiles":[{{"sizes":["{wanted["block_m"]}",'
        f'"{wanted["block_n"]}"]}}],"num_ctas":1,"num_stages":{wanted["num_stages"]}'
        f" block_k:{wanted['block_k']}"
    )


def check(one) -> None:
    """What a strict program must be, whichever it is."""
    assert not BY_HAND.search(one.text)
    assert {how for _, how in products(one.text)} == {tile_in_words(one.step)}
    assert collectives(one.text) == predicted_collectives(one)
    # of a whole matrix, and of leaves of o and down
    model = one.step.layout.model
    leaves = (model.num_heads * model.head_dim, model.intermediate_size)
    lengths = {model.hidden_size, *(n // one.step.layout.num_devices for n in leaves)}
    assert {length for length, _ in products(one.text)} <= lengths


@pytest.mark.costs(30)
def test_prompts_and_decodes_have_one_tile_and_add_up_alike():
    base, decodes = compiler()(BASE), compiler()(DECODES)
    for one in (base, decodes):
        check(one)
    assert products(base.text).keys() == products(decodes.text).keys()
    assert sums(base.text) == sums(decodes.text) != set()
    assert kernels(base.text).keys() == kernels(decodes.text).keys() == KERNELS


def kernels(text: str) -> Counter[str]:
    """The Mosaic kernels of a program, by name."""
    return Counter(re.findall(r'op_name="[^"]*/(\w+)/mpmd_map"', text))


@pytest.mark.thorough
@pytest.mark.parametrize("case", OTHERS, ids=["64 decodes", "4,096 tokens"])
def test_other_sizes_do_not_differ(case):
    one = compiler()(case)
    check(one)
    assert sums(one.text) == sums(compiler()(DECODES).text)


@pytest.mark.parametrize(
    "change",
    [*thorough({"numerics": "integer"}), *exhaustive({"size": "fp8"}, {"sampler": sample})],
)
def test_other_settings_do_not_differ(change):
    two = [compiler()(case._replace(**change)) for case in (BASE, DECODES)]
    for one in two:
        check(one)
    assert sums(two[0].text) == sums(two[1].text)


@pytest.mark.thorough
def test_by_default_contractions_are_cut():
    with pytest.raises(AssertionError, match="is cut"):
        products(compiler()(BASE._replace(numerics="fast")).text)

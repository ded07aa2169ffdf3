"""The recipe of `docs/CORE.md` for a sampling parameter, performed in a copy of the sources."""

import pytest
from copied import change, changed_files, copy_tree, run

PROTO = "serving/proto/shiftjax.proto"
# What a newcomer writes: by file, a text that occurs once, and what takes its place.
CHANGES = {
    "shiftjax/core/sampling_params.py": (
        "    repetition_penalty: float = _param(\n",
        """\
    max_gap: float = _param(
        100.0,
        _number(0.0, 100.0),
        "only tokens whose logit, over temperature, is at most so far below the best one's",
        device=OnDevice(100.0, draws=True),
    )
    repetition_penalty: float = _param(
""",
    ),
    "shiftjax/device/sampling.py": (
        "odds >= inputs.min_p[:, None]",
        "odds >= jnp.maximum(inputs.min_p, jnp.exp(-inputs.max_gap))[:, None]",
    ),
    PROTO: (
        "  oneof constraint {\n",
        "  optional double max_gap = 99;\n  oneof constraint {\n",
    ),
}
CHECK = """
import jax
import numpy as np

import shiftjax
from serving.http.app import all_routes
from serving.http.openapi import document
from serving.proto import shiftjax_pb2 as pb
from serving.rpc.convert import sampling_values
from serving.run.flags import SAMPLING_SETTINGS
from serving.server.dialects.messages import read_messages
from serving.server.errors import ServeError
from serving.server.options import ServerOptions
from serving.server.schema import read_chat, read_completion
from serving.server.service import Service
from shiftjax.arch.presets import PRESETS
from shiftjax.core.request import Request, ScheduledSequence, SequenceState, StepPlan
from shiftjax.device.sampling import SamplingInputs, sample
from shiftjax.device.sampling_inputs import VocabSplit, build_rows, neutral_tables, refresh_params
from shiftjax.models.exchange import Parallel
from shiftjax.parallel.layout import Layout

assert shiftjax.__file__.startswith(COPY)
USER = [{"role": "user", "content": "x"}]

# HTTP, in each of its dialects; flags and the description
for read, body in (
    (read_completion, {"prompt": "x"}),
    (read_chat, {"messages": USER}),
    (read_messages, {"messages": USER, "max_tokens": 1}),
):
    wish = read(body | {"max_gap": 0.5})
    assert (wish.sampling.max_gap, wish.unknown) == (0.5, ())
    assert read(body).sampling.max_gap == 100.0
    for wrong, words in ((100.5, "must be between 0 and 100"), ("1", "must be `float`")):
        try:
            read(body | {"max_gap": wrong})
        except ServeError as error:
            assert error.message.startswith(f"max_gap {words}".replace("`", "")), error.message
        else:
            raise AssertionError(wrong)
routes = all_routes(Service(ServerOptions()))
described = document(routes)["components"]["schemas"]["ChatFields"]["properties"]["max_gap"]
assert described["description"].startswith("only tokens whose logit")
assert SAMPLING_SETTINGS["max_gap"].flags == ("--max-gap",)

# gRPC, where 0 is a value too
for value in (0.0, 0.5):
    message = pb.GenerateRequest(text="x", sampling=pb.Sampling(max_gap=value))
    assert sampling_values(message) == {"max_gap": value}

# the device's inputs
VOCAB, ROWS = VocabSplit(8, 8), 128


def inputs(**fields):
    request = Request("r", [1], read_completion({"prompt": "x"} | fields).sampling)
    sequences = [
        SequenceState(request, 0, seed, (0, 0.0, 0, 0), [1], 1, 9, frozenset(), [])
        for seed in range(ROWS)
    ]
    items = [ScheduledSequence(each, 0, 1, 1, -1) for each in sequences]
    plan = StepPlan(items, ROWS, ROWS, 0, [], [], step_id=0)
    rows = build_rows(plan, refresh_params(plan, {}, 8), ROWS, VOCAB)
    return SamplingInputs(
        **rows.scalars,
        **neutral_tables(ROWS, VOCAB)._asdict(),
        positions=np.zeros(ROWS, np.int32),
        pending_ids=np.full(ROWS, -1, np.int32),
    )


assert inputs(max_gap=0.5).max_gap.dtype == np.float32
assert inputs(max_gap=0.5).max_gap.tolist() == [0.5] * ROWS
assert inputs(max_gap=0.5, temperature=0).max_gap.tolist() == [100.0] * ROWS

# the sampler: gaps are 0.25, 0.5 ... and twice that at half the temperature
layout = Layout(PRESETS["tiny"], 1, 1)
parallel = Parallel(layout, layout.shift)
choose = jax.jit(lambda logits, asked, key: sample(logits, asked, key, parallel, vocab_size=8))
logits = np.tile(-0.25 * np.arange(8, dtype=np.float32), (ROWS, 1))


def chosen(**fields):
    return set(choose(logits, inputs(**fields), jax.random.key(0)).token_ids.tolist())


assert chosen() == set(range(8))
assert chosen(max_gap=0.6) == {0, 1, 2}
assert chosen(max_gap=0.6, temperature=0.5) == {0, 1}
"""


@pytest.fixture
def copy(tmp_path):
    return copy_tree(tmp_path)


def test_a_sampling_parameter_takes_three_files(copy):
    for name, (old, new) in CHANGES.items():
        change(copy, name, old, new)
    assert len(CHANGES) == 3 and changed_files(copy) == set(CHANGES)
    run(copy, "-m", "grpc_tools.protoc", "-I.", "--python_out=.", "--pyi_out=.", PROTO)
    run(copy, "-c", f"COPY = {str(copy)!r}\n{CHECK}")

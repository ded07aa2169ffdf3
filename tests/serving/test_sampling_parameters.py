"""A sampling parameter is one row: every API, gRPC and the device have what the row says."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from google.protobuf.descriptor import FieldDescriptor

from serving.http.app import all_routes
from serving.http.openapi import document
from serving.proto import shiftjax_pb2 as pb
from serving.rpc.convert import sampling_values
from serving.server.dialects import messages, responses_api
from serving.server.errors import ServeError
from serving.server.options import ServerOptions
from serving.server.refused_fields import REFUSED
from serving.server.schema import read_chat, read_completion
from serving.server.service import Service
from shiftjax.core.request import Request, ScheduledSequence, SequenceState, StepPlan
from shiftjax.core.sampling_params import DIALECTS, HTTP, PARAMS, SamplingParams
from shiftjax.device.sampling_inputs import SCALARS, VocabSplit, build_rows, refresh_params
from shiftjax.options import settings_of

SETTINGS = settings_of(SamplingParams)
USER = [{"role": "user", "content": "x"}]
READERS = {
    "completion": (read_completion, {"prompt": "x"}),
    "chat": (read_chat, {"messages": USER}),
    "message": (messages.read_messages, {"messages": USER, "max_tokens": 5}),
    "response": (responses_api.read_response, {"input": "x"}),
}
# What a dialect calls a parameter in its own body, where that is not the name in a chat.
DIALECT_NAMES = {"message": messages.NAMES, "response": responses_api.NAMES}
# The dialects answer once and score no prompts.
NOT_IN = {
    "message": {"n", "allowed_token_ids", "logprobs", "prompt_logprobs"},
    "response": {"n", "allowed_token_ids", "stop", "logprobs", "prompt_logprobs"},
}
FITTING: Mapping[type, tuple[Any, ...]] = {
    float: (0.5, 1.5, 7.0),
    int: (2, 1, 7),
    bool: (True, False),
    Mapping: ({"5": 2.0},),
    tuple: ([3], ["x"]),
}
# Of scalars and of entries of lists.
KINDS = {
    float: {FieldDescriptor.TYPE_DOUBLE},
    int: {FieldDescriptor.TYPE_INT32, FieldDescriptor.TYPE_INT64, FieldDescriptor.TYPE_UINT32},
    bool: {FieldDescriptor.TYPE_BOOL},
    str: {FieldDescriptor.TYPE_STRING},
}


def other(name: str) -> tuple[Any, Any]:
    """A value that is not the default, as JSON has it and as `SamplingParams` has it."""
    for value in FITTING[SETTINGS[name].kind]:
        given = {int(key): x for key, x in value.items()} if isinstance(value, dict) else value
        try:
            wanted = PARAMS[name].check(given)
        except ValueError:
            continue
        if wanted != SETTINGS[name].default:
            return value, wanted
    raise AssertionError(f"no value fits {name}")


def given_to(reader: str, name: str, value: Any) -> dict[str, Any]:
    """The fields of a body that ask for it."""
    if name == "logprobs" and reader == "chat":
        return {"logprobs": True, "top_logprobs": value}
    return {DIALECT_NAMES.get(reader, {}).get(name, name): value}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("name", PARAMS)
def test_every_api_takes_it_or_says_that_it_does_not(name, reader):
    read, body = READERS[reader]
    value, wanted = other(name)
    wish = read(body | given_to(reader, name, value))
    is_known = name not in NOT_IN.get(reader, ())
    assert (getattr(wish.sampling, name) == wanted) is is_known
    assert (name in wish.unknown) is not is_known


@pytest.mark.parametrize("name", [name for name in PARAMS if SETTINGS[name].kind in (int, float)])
def test_a_number_out_of_range_is_refused_by_name(name):
    read, body = READERS["completion"]
    with pytest.raises(ServeError) as refused:
        read(body | {name: -(2**70)})
    assert refused.value.param == name


def test_none_is_among_the_fields_that_are_not_supported():
    assert not PARAMS.keys() & REFUSED.keys()


def test_the_description_is_in_openapi():
    schemas = document(all_routes(Service(ServerOptions())))["components"]["schemas"]
    for name, param in PARAMS.items():
        homes = {HTTP: ("CompletionFields", "ChatFields"), DIALECTS: ("MessagesFields",)}
        for home in (home for api in param.apis for home in homes.get(api, ())):
            assert schemas[home]["properties"][name]["description"] == param.help


def test_the_message_of_grpc_has_every_parameter():
    others = {each.name for each in pb.Sampling.DESCRIPTOR.oneofs_by_name["constraint"].fields}
    assert set(pb.Sampling.DESCRIPTOR.fields_by_name) == PARAMS.keys() | others


@pytest.mark.parametrize("name", PARAMS)
def test_a_field_of_grpc_has_the_type_of_the_row(name):
    setting, wire = SETTINGS[name], pb.Sampling.DESCRIPTOR.fields_by_name[name]
    assert wire.is_repeated == (setting.kind in (tuple, Mapping))
    if setting.kind is Mapping:
        entry = wire.message_type.fields_by_name
        assert entry["key"].type in KINDS[int] and entry["value"].type in KINDS[float]
        return
    assert wire.type in KINDS[setting.item if setting.kind is tuple else setting.kind]
    # What is not sent is not set: only false and nothing can do without being told from it.
    assert wire.has_presence or setting.default in (False, (), None)


@pytest.mark.parametrize("name", PARAMS)
def test_grpc_says_what_http_says(name):
    given, wanted = other(name)
    plain = {int(key): x for key, x in given.items()} if isinstance(given, dict) else given
    message = pb.GenerateRequest(text="x", sampling=pb.Sampling(**{name: plain}))
    assert sampling_values(message) == {name: given}
    wish = read_completion({"prompt": "x", **sampling_values(message)})
    assert getattr(wish.sampling, name) == wanted


def test_what_grpc_sends_as_zero_is_set():
    zeros = {name: 0 for name in PARAMS if SETTINGS[name].kind in (int, float)}
    message = pb.GenerateRequest(text="x", sampling=pb.Sampling(**zeros))
    assert sampling_values(message) == zeros
    assert sampling_values(pb.GenerateRequest(text="x")) == {}


def scalars_of(**asked: Any) -> dict[str, np.ndarray]:
    """What the device gets for one row."""
    request = Request("r", [1, 2], SamplingParams(**asked))
    sequence = SequenceState(request, 0, 0, (0, 0.0, 0, 0), [1, 2], 2, 100, frozenset(), [])
    plan = StepPlan([ScheduledSequence(sequence, 1, 1, 1, -1)], 1, 1, 0, [], [], step_id=0)
    params = refresh_params(plan, {}, 70)
    return build_rows(plan, params, 1, VocabSplit(70, 70)).scalars


READ = [name for name, param in PARAMS.items() if param.device is not None]


@pytest.mark.parametrize("name", READ)
def test_the_device_gets_what_it_reads(name):
    device = PARAMS[name].device
    row, kind = device.name or name, SETTINGS[name].kind
    assert type(device.neutral) is kind
    _, wanted = other(name)
    asked = {name: wanted}
    drawn, plain = scalars_of(**asked)[row], scalars_of()[row]
    assert drawn.dtype == {float: np.float32, int: np.int32}[kind]
    assert drawn == np.array([wanted], drawn.dtype)
    assert plain == device.value(SETTINGS[name].default)
    greedy = scalars_of(**asked | {"temperature": 0.0})[row]
    assert greedy == (device.neutral if device.draws else drawn)


def test_no_two_have_one_name_on_the_device():
    assert len(SCALARS) == len(READ)

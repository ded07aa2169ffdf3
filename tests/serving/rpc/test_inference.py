"""The gRPC front end through a real channel: the same text as HTTP, health, reflection, errors."""

import grpc
import pytest
from google.protobuf import descriptor_pool, message_factory
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)
from grpc_status import rpc_status
from kit import MAX_MODEL_LEN, VOCAB_SIZE, running_server

from serving.proto import shiftjax_pb2 as pb
from serving.proto import shiftjax_pb2_grpc as pb_grpc
from serving.rpc import convert
from serving.server.errors import ServeError
from serving.server.json_body import MAX_VALUES


@pytest.fixture
def channel(server):
    with grpc.insecure_channel(server.server.grpc.address) as channel:
        yield channel
    server.assert_quiescent()


@pytest.fixture
def stub(channel):
    return pb_grpc.InferenceStub(channel)


def request(text: str | None = None, **sampling) -> pb.GenerateRequest:
    return pb.GenerateRequest(text=text, sampling=pb.Sampling(**sampling))


MANY_LISTS = '{"a": [%s1]}' % ("[]," * 100_000)


def collect(events) -> tuple[pb.Accepted, dict[int, str], dict[int, pb.Finished], pb.Usage]:
    """What a stream said, which must come in the order of the contract."""
    events = list(events)
    kinds = [event.WhichOneof("event") for event in events]
    assert kinds[0] == "accepted"
    assert kinds[-1] == "usage"
    assert {"accepted", "usage"}.isdisjoint(kinds[1:-1])
    texts, ends = {}, {}
    for event in events[1:-1]:
        if event.HasField("delta"):
            assert event.delta.index not in ends
            texts[event.delta.index] = texts.get(event.delta.index, "") + event.delta.text
        else:
            assert event.finished.index not in ends
            ends[event.finished.index] = event.finished
    return events[0].accepted, texts, ends, events[-1].usage


@pytest.mark.parametrize("n", [1, 3])
def test_streamed_is_unstreamed_is_http(server, stub, n):
    wanted = request("é日本", seed=3, n=n, max_tokens=60, stop=["a", "\ufffdb"])
    accepted, texts, ends, usage = collect(stub.Generate(wanted))
    once = stub.GenerateOnce(wanted)
    body = {"prompt": "é日本", "seed": 3, "n": n, "max_tokens": 60, "stop": ["a", "\ufffdb"]}
    with server.client() as client:
        choices = client.post("/v1/completions", json=body).json()["choices"]
    expected = {choice["index"]: choice["text"] for choice in choices}
    assert {index: texts.get(index, "") for index in expected} == expected
    assert {one.index: one.text for one in once.completions} == expected
    reasons = {"stop": pb.FINISH_REASON_STOP, "length": pb.FINISH_REASON_LENGTH}
    for choice in choices:
        assert ends[choice["index"]].reason == reasons[choice["finish_reason"]]
    assert once.usage.completion_tokens == usage.completion_tokens
    assert accepted.num_prompt_tokens == usage.prompt_tokens == len("é日本".encode())


def test_a_chat(stub):
    message = pb.Message(role="user", content="hi")
    sampling = pb.Sampling(seed=1, max_tokens=8, logprobs=2)
    chat = pb.GenerateRequest(chat=pb.Chat(messages=[message]), sampling=sampling)
    same = stub.GenerateOnce(request("user: hi\nassistant:", seed=1, max_tokens=8, logprobs=2))
    once = stub.GenerateOnce(chat)
    assert once.completions[0].text == same.completions[0].text
    assert len(once.completions[0].logprobs) == 8
    assert len(once.completions[0].logprobs[0].top) == 2


def test_fields_of_prompts_and_texts(stub):
    asked = request("abcdefgh", seed=3, max_tokens=20, ignore_eos=True)
    plain = stub.GenerateOnce(asked)
    asked.truncate_prompt_tokens = 3
    cut = stub.GenerateOnce(asked)
    assert (plain.usage.prompt_tokens, cut.usage.prompt_tokens) == (8, 3)
    text = next(c for c in cut.completions[0].text if c.isascii() and c.isprintable())
    asked.sampling.bad_words.append(text)
    assert text not in stub.GenerateOnce(asked).completions[0].text
    asked.sampling.ClearField("bad_words")
    asked.sampling.stop.append(text)
    asked.sampling.include_stop_str_in_output = True
    assert stub.GenerateOnce(asked).completions[0].text.endswith(text)
    said = [pb.Message(role="user", content="hi"), pb.Message(role="assistant", content="So")]
    options = '{"continue_final_message": true}'
    chat = pb.Chat(messages=said, template_variables_json=options)
    ids = stub.Tokenize(pb.TokenizeRequest(chat=chat)).token_ids
    assert len(ids) == len("user: hi\nassistant: So")


def test_scores(stub):
    ids = pb.TokenIds(ids=[5, 104, 105])
    score = stub.Score(pb.ScoreRequest(token_ids=ids, num_top=1))
    assert [entry.token_id for entry in score.logprobs] == [5, 104, 105]
    assert not score.logprobs[0].HasField("logprob")
    assert [entry.logprob for entry in score.logprobs[1:]] == [-(104 % 7), -(105 % 7)]


@pytest.mark.parametrize("num_top", [-1, 21, 2**31 - 1])
def test_scores_of_too_many(stub, num_top):
    with pytest.raises(grpc.RpcError) as caught:
        stub.Score(pb.ScoreRequest(text="x", num_top=num_top))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert details(caught.value)["BadRequest"].field_violations[0].field == "num_top"


def test_structure(stub):
    schema = '{"type":"object","properties":{"a":{"type":"boolean"}},"required":["a"]}'
    once = stub.GenerateOnce(request("x", max_tokens=200, json_schema=schema, seed=1))
    assert '"a"' in once.completions[0].text
    choice = pb.Choices(options=["ja", "nein"])
    once = stub.GenerateOnce(request("x", max_tokens=20, choice=choice, n=4))
    assert {one.text for one in once.completions} <= {"ja", "nein"}


def test_tokens_and_models(stub):
    ids = stub.Tokenize(pb.TokenizeRequest(text="hé"))
    assert len(ids.token_ids) == 3
    assert stub.Detokenize(pb.DetokenizeRequest(token_ids=ids.token_ids)).text == "hé"
    message = pb.Message(role="user", content="hi")
    variables = '{"unused": [1]}'
    chat = pb.Chat(messages=[message], template_variables_json=variables)
    ids = stub.Tokenize(pb.TokenizeRequest(chat=chat))
    assert len(ids.token_ids) == len("user: hi\nassistant:")
    models = stub.ListModels(pb.ListModelsRequest()).models
    assert [model.id for model in models] == ["echo", "echo-alias"]
    model = stub.GetModel(pb.GetModelRequest(model="echo"))
    assert (model.max_model_len, model.vocab_size) == (MAX_MODEL_LEN, VOCAB_SIZE)


def details(error: grpc.RpcError) -> dict[str, object]:
    """The details of a status by the names of their types."""
    status = rpc_status.from_call(error)
    assert status is not None
    kinds = (
        error_details_pb2.ErrorInfo,
        error_details_pb2.BadRequest,
        error_details_pb2.RetryInfo,
        error_details_pb2.RequestInfo,
    )
    found = {}
    for detail in status.details:
        for kind in kinds:
            if detail.Is(kind.DESCRIPTOR):
                found[kind.__name__] = message = kind()
                detail.Unpack(message)
    return found


@pytest.mark.parametrize(
    ("wanted", "field"),
    [
        (request(), "prompt"),
        (request(""), "prompt"),
        (request("x", temperature=-1), "temperature"),
        (request("x", temperature=float("nan")), "temperature"),
        (request("x", top_p=0.0), "top_p"),
        (request("x", top_p=float("inf")), "top_p"),
        (request("x", top_k=-2), "top_k"),
        (request("x", min_p=2.0), "min_p"),
        (request("x", n=0), "n"),
        (request("x", max_tokens=-1), "max_tokens"),
        (request("x", max_tokens=0), "max_tokens"),
        (request("x", max_tokens=2**62), "max_tokens"),
        (request("x", min_tokens=17), "min_tokens"),
        (request("x", repetition_penalty=0.0), "repetition_penalty"),
        (request("x", presence_penalty=float("-inf")), "presence_penalty"),
        (request("x", stop=[""]), "stop"),
        (request("x", stop=["x"] * 1000), "stop"),
        (request("x", stop_token_ids=[VOCAB_SIZE]), "stop_token_ids"),
        (request("x", allowed_token_ids=[2**32 - 1]), "allowed_token_ids"),
        (request("x", logit_bias={999: 1.0}), "logit_bias"),
        (request("x", logit_bias={1: float("nan")}), "logit_bias"),
        (request("x", logprobs=21), "logprobs"),
        (request("x", regex="("), "structured_outputs"),
        (request("x", json_schema=""), "structured_outputs"),
        (request("x", json_schema="false"), "structured_outputs"),
        (request("x" * 1000), "prompt"),
        (pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1, VOCAB_SIZE])), "prompt"),
        (pb.GenerateRequest(token_ids=pb.TokenIds()), "prompt"),
        (pb.GenerateRequest(chat=pb.Chat()), "messages"),
        (pb.GenerateRequest(chat=pb.Chat(template_variables_json="[")), "chat"),
        (request("x", stop=["x"] * 5000), "stop"),
        (request("x", logit_bias={i: 1.0 for i in range(5000)}), "logit_bias"),
        (request("x", choice=pb.Choices(options=["x"] * 5000)), "structured_outputs"),
        (request("x", regex="(?<=a)b"), "structured_outputs"),
        (pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1] * (MAX_VALUES + 1))), "prompt"),
        (pb.GenerateRequest(chat=pb.Chat(messages=[pb.Message(role="user")] * 5000)), "messages"),
        (pb.GenerateRequest(chat=pb.Chat(template_variables_json=MANY_LISTS)), "chat"),
        (pb.GenerateRequest(text="x", priority=2**40), "priority"),
        (pb.GenerateRequest(text="x", min_width=0), "min_width"),
        (pb.GenerateRequest(text="x", min_width=2), "min_width"),  # there is no fleet
        (pb.GenerateRequest(text="x", cache_salt=""), "cache_salt"),
        (pb.GenerateRequest(text="x", request_id="a\nb"), "request_id"),
    ],
)
def test_bad_input_is_an_invalid_argument(stub, wanted, field):
    for call in (stub.GenerateOnce, lambda each: list(stub.Generate(each))):
        with pytest.raises(grpc.RpcError) as caught:
            call(wanted)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        found = details(caught.value)
        assert found["ErrorInfo"].domain == "shiftjax"
        violated = found["BadRequest"].field_violations[0].field
        assert violated.split(".")[0].split("[")[0] == field
        assert "RetryInfo" not in found


def test_long_lists_are_refused_before_they_are_copied():
    """A message of 64 MiB can hold 60 million entries, as long as nobody looks at them all."""

    class Long(list):
        def __len__(self):
            return MAX_VALUES + 1

        def __iter__(self):
            raise AssertionError("copied")

    with pytest.raises(ServeError, match="stop must have at most 4096 entries"):
        convert.bounded("stop", Long())


@pytest.mark.parametrize("method", ["GenerateOnce", "Tokenize", "Detokenize"])
def test_messages_over_the_limit_of_a_request_are_not_parsed(stub, channel, method):
    call = channel.unary_unary(f"/shiftjax.v1.Inference/{method}")
    with pytest.raises(grpc.RpcError) as caught:
        call(b"\xff" * ((8 << 20) + 1))
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert details(caught.value)["ErrorInfo"].reason == "REQUEST_TOO_LARGE"
    assert "RetryInfo" not in details(caught.value)


def test_many_log_probabilities_are_those_of_a_stream(stub):
    wanted = request("x", max_tokens=100, n=4, logprobs=20, ignore_eos=True, seed=1)
    streamed = [event.delta for event in stub.Generate(wanted) if event.HasField("delta")]
    for one in stub.GenerateOnce(wanted).completions:
        deltas = [delta for delta in streamed if delta.index == one.index]
        assert list(one.logprobs) == [entry for delta in deltas for entry in delta.logprobs]
        assert len(one.logprobs) == 100


def test_what_is_not_there(stub, channel):
    with pytest.raises(grpc.RpcError) as caught:
        stub.GenerateOnce(pb.GenerateRequest(text="x", model="other"))
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    unknown = channel.unary_unary("/shiftjax.v1.Inference/Explode")
    with pytest.raises(grpc.RpcError) as caught:
        unknown(b"")
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
    broken = channel.unary_unary("/shiftjax.v1.Inference/GenerateOnce")
    with pytest.raises(grpc.RpcError) as caught:
        broken(b"\xff\xff\xff\xff")
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    admin = pb_grpc.AdminStub(channel)
    with pytest.raises(grpc.RpcError) as caught:
        admin.GetLoad(pb.GetLoadRequest())
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


def test_ids_travel_and_are_made(stub):
    answer, call = stub.GenerateOnce.with_call(
        request("x", max_tokens=1), metadata=(("x-request-id", "mine"),)
    )
    assert answer.request_id == dict(call.trailing_metadata())["x-request-id"] == "mine"
    answer, call = stub.GenerateOnce.with_call(request("x", max_tokens=1))
    assert answer.request_id == dict(call.trailing_metadata())["x-request-id"]
    with pytest.raises(grpc.RpcError) as caught:
        stub.GenerateOnce(request(), metadata=(("x-request-id", "mine"),))
    assert details(caught.value)["RequestInfo"].request_id == "mine"
    assert dict(caught.value.trailing_metadata())["x-request-id"] == "mine"


@pytest.mark.parametrize("name", ["x" * 129, "a b", "<script>"])
def test_ids_that_are_none(stub, name):
    for call in (stub.GenerateOnce, lambda *a, **k: list(stub.Generate(*a, **k))):
        with pytest.raises(grpc.RpcError) as caught:
            call(request("x", max_tokens=1), metadata=(("x-request-id", name),))
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert name not in dict(caught.value.trailing_metadata())["x-request-id"]


def test_a_duplicate_id(server, stub):
    server.runner.gate.clear()
    wanted = pb.GenerateRequest(text="x", request_id="twice")
    first = stub.Generate(wanted)
    next(first)  # accepted
    with pytest.raises(grpc.RpcError) as caught:
        stub.GenerateOnce(wanted)
    assert caught.value.code() is grpc.StatusCode.ALREADY_EXISTS
    server.runner.gate.set()
    collect([pb.GenerateEvent(accepted=pb.Accepted()), *first])
    assert stub.GenerateOnce(wanted).request_id == "twice"


def test_health(channel):
    health = health_pb2_grpc.HealthStub(channel)
    for name in ("", "shiftjax.v1.Inference"):
        answer = health.Check(health_pb2.HealthCheckRequest(service=name))
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
    with pytest.raises(grpc.RpcError) as caught:
        health.Check(health_pb2.HealthCheckRequest(service="other"))
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


def test_a_client_that_knows_nothing_but_reflection(channel):
    database = ProtoReflectionDescriptorDatabase(channel)
    assert "shiftjax.v1.Inference" in database.get_services()
    pool = descriptor_pool.DescriptorPool(database)
    service = pool.FindServiceByName("shiftjax.v1.Inference")
    method = service.FindMethodByName("GenerateOnce")
    request_type = message_factory.GetMessageClass(method.input_type)
    answer_type = message_factory.GetMessageClass(method.output_type)
    call = channel.unary_unary(
        f"/{service.full_name}/{method.name}",
        request_serializer=request_type.SerializeToString,
        response_deserializer=answer_type.FromString,
    )
    answer = call(request_type(text="hello", sampling={"max_tokens": 4}))
    assert answer.usage.completion_tokens == 4


def test_the_key(server):
    with (
        running_server(keys=("secret",)) as guarded,
        grpc.insecure_channel(guarded.server.grpc.address) as channel,
    ):
        stub = pb_grpc.InferenceStub(channel)
        for metadata in ((), (("authorization", "Bearer wrong"),), (("authorization", "secret"),)):
            for call in (stub.GenerateOnce, lambda *a, **k: list(stub.Generate(*a, **k))):
                with pytest.raises(grpc.RpcError) as caught:
                    call(request("x"), metadata=metadata)
                assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        good = (("authorization", "Bearer secret"),)
        assert stub.GenerateOnce(request("x", max_tokens=2), metadata=good).usage.prompt_tokens == 1
        health = health_pb2_grpc.HealthStub(channel)
        health.Check(health_pb2.HealthCheckRequest())

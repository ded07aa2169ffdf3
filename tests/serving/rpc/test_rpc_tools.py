"""Tools and the timeline of an answer over gRPC: what HTTP says, through a real channel."""

import json
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import grpc
import pytest
from grpc_status import rpc_status
from kit import CHAT, make_engine, running_server
from scripted import say, scripted_server

from serving.proto import shiftjax_pb2 as pb
from serving.proto import shiftjax_pb2_grpc as pb_grpc

ROME = {"city": "Rome", "days": 2}
CALL = f'<tool_call>\n{{"name": "get_weather", "arguments": {json.dumps(ROME)}}}\n</tool_call>'
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city", "days"],
}
FUNCTION = {"name": "get_weather", "description": "of a city", "parameters": SCHEMA}
TOOL = pb.Tool(
    name="get_weather", description="of a city", parameters_json=json.dumps(SCHEMA), strict=False
)
USER = pb.Message(role="user", content="hi")


@pytest.fixture(scope="module")
def server():
    with scripted_server("hermes") as running:
        yield running


@contextmanager
def stub_of(server):
    with grpc.insecure_channel(server.server.grpc.address) as channel:
        yield pb_grpc.InferenceStub(channel)
    server.assert_quiescent()


@pytest.fixture
def stub(server):
    with stub_of(server) as stub:
        yield stub


def chat(*more: pb.Message, tools=(TOOL,), max_tokens=400, **fields) -> pb.GenerateRequest:
    sampling = pb.Sampling(max_tokens=max_tokens, seed=1, n=fields.pop("n", 1))
    asked = pb.Chat(messages=[USER, *more], tools=tools)
    return pb.GenerateRequest(chat=asked, sampling=sampling, **fields)


def joined(events) -> list[pb.Completion]:
    """What a client makes of a stream."""
    found: dict[int, pb.Completion] = {}
    for event in events:
        if event.HasField("delta"):
            one = found.setdefault(event.delta.index, pb.Completion(index=event.delta.index))
            one.text += event.delta.text
            one.reasoning += event.delta.reasoning
            one.token_ids.extend(event.delta.token_ids)
            for delta in event.delta.tool_calls:
                assert len(one.tool_calls) == delta.number + bool(delta.arguments_json)
                if delta.id:
                    one.tool_calls.append(pb.ToolCall(id=delta.id, name=delta.name))
                one.tool_calls[delta.number].arguments_json += delta.arguments_json
        elif event.HasField("finished"):
            found[event.finished.index].finished.CopyFrom(event.finished)
    return [found[index] for index in sorted(found)]


def without_ids(completions) -> list[pb.Completion]:
    copies = [pb.Completion.FromString(one.SerializeToString()) for one in completions]
    for call in (call for one in copies for call in one.tool_calls):
        call.id = "id"
    return copies


def ask(stub, request: pb.GenerateRequest) -> list[pb.Completion]:
    """The same, streamed and not."""
    once = list(stub.GenerateOnce(request).completions)
    streamed = joined(stub.Generate(request))
    assert without_ids(streamed) == without_ids(once)
    return once


@pytest.mark.parametrize(
    ("said", "fields"),
    [
        (CALL, {}),
        (f"Let me see.\n{CALL}\n{CALL}", {}),
        (f"{CALL}\n{CALL}", {"parallel_tool_calls": False}),
        (CALL, {"choice": "none"}),
        ("No.", {"choice": "required"}),
        ("No.", {"function": "get_weather"}),
        ("<tool_call>{", {}),
    ],
)
def test_calls_are_those_of_http(server, stub, said, fields):
    say(server, said)
    completions = ask(stub, chat(n=2, **fields))
    choice = fields.get("choice")
    named = {"type": "function", "function": {"name": "get_weather"}}
    body = {"messages": [{"role": "user", "content": "hi"}], "n": 2, "seed": 1}
    body |= {"tools": [{"type": "function", "function": FUNCTION}], "max_tokens": 400}
    body |= {"tool_choice": named if "function" in fields else choice or "auto"}
    body |= {name: value for name, value in fields.items() if name == "parallel_tool_calls"}
    with server.client() as client:
        choices = client.post(CHAT, json=body).json()["choices"]
    assert len(completions) == len(choices) == 2
    for one, other in zip(completions, choices, strict=True):
        message, calls = other["message"], other["message"].get("tool_calls", [])
        assert one.text == (message["content"] or "")
        assert [(each.name, each.arguments_json) for each in one.tool_calls] == [
            (each["function"]["name"], each["function"]["arguments"]) for each in calls
        ]
        reason = pb.FinishReason.Name(one.finished.reason)
        assert reason == f"FINISH_REASON_{other['finish_reason'].upper()}"
    ids = [call.id for one in completions for call in one.tool_calls]
    assert len(set(ids)) == len(ids) and all(ids)


def test_a_conversation_goes_on(server, stub):
    """The prompt is that of HTTP for the same messages and tools."""
    say(server, "It is sunny.")
    call = pb.ToolCall(id="1", name="get_weather", arguments_json='{"a": "Rome"}')
    called = pb.Message(role="assistant", tool_calls=[call])
    result = pb.Message(role="tool", tool_call_id="1", content="sunny")
    (one,) = ask(stub, chat(called, result))
    assert one.text == "It is sunny."
    asked = pb.Chat(messages=[USER, called, result], tools=[TOOL])
    ids = stub.Tokenize(pb.TokenizeRequest(chat=asked)).token_ids
    function = {"name": "get_weather", "arguments": '{"a": "Rome"}'}
    plain = {"role": "assistant", "content": None}
    messages = [
        {"role": "user", "content": "hi"},
        plain | {"tool_calls": [{"id": "1", "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": "1", "content": "sunny"},
    ]
    body = {"messages": messages, "tools": [{"type": "function", "function": FUNCTION}]}
    with server.client() as client:
        assert client.post("/tokenize", json=body).json()["tokens"] == list(ids)


def test_reasoning_comes_apart():
    with scripted_server("think") as server, stub_of(server) as stub:
        say(server, "hmm</think>yes")
        (one,) = ask(stub, chat(tools=()))
        assert (one.reasoning, one.text) == ("hmm", "yes")


DEEP = '{"a":' * 40 + "1" + "}" * 40


@pytest.mark.parametrize(
    ("wanted", "field"),
    [
        (chat(tools=[pb.Tool(name="a b")]), "tools[0].function.name"),
        (chat(tools=[TOOL, TOOL]), "tools[1].function.name"),
        (chat(tools=[TOOL] * 513), "tools"),
        (chat(tools=[pb.Tool(name="f", parameters_json="[]")]), "tools[0].parameters_json"),
        (chat(tools=[pb.Tool(name="f", parameters_json="")]), "tools[0].parameters_json"),
        (chat(tools=[pb.Tool(name="f", parameters_json=DEEP)]), "tools[0].function.parameters"),
        (chat(choice="maybe"), "tool_choice"),
        (chat(choice="required", tools=()), "tool_choice"),
        (chat(function="other"), "tool_choice.function.name"),
        (pb.GenerateRequest(text="x", function="f"), "tool_choice"),
        (
            chat(pb.Message(role="assistant", tool_calls=[pb.ToolCall(arguments_json=DEEP)])),
            "messages[1].tool_calls[0].function.arguments",
        ),
        (
            chat(pb.Message(role="assistant", tool_calls=[pb.ToolCall()] * 600)),
            "messages[1].tool_calls",
        ),
    ],
)
def test_what_is_wrong_is_named(stub, wanted, field):
    for call in (stub.GenerateOnce, lambda each: list(stub.Generate(each))):
        with pytest.raises(grpc.RpcError) as caught:
            call(wanted)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        status = rpc_status.from_call(caught.value)  # pyright: ignore[reportArgumentType]
        assert status is not None and field in status.message


# ---------------------------------------------------------------- the timeline


def test_the_timeline_of_an_answer_and_the_wait_before_it():
    """One sequence at a time, so that another waits; 70 tokens are a step of base."""
    sampling = pb.Sampling(max_tokens=20, ignore_eos=True, seed=3)
    wanted = pb.GenerateRequest(text="x" * 70, sampling=sampling, timeline=True)
    with running_server(make_engine(max_num_seqs=1)) as server, stub_of(server) as stub:
        once = stub.GenerateOnce(wanted)
        assert [(run.mode, run.num_tokens) for run in once.timeline.modes] == [
            *(("base", 1), ("shift", 19))
        ]
        assert dict(once.timeline.steps) == dict(once.timeline.tokens) == {"base": 1, "shift": 19}
        assert once.timeline.prompt_tokens == 70 and once.timeline.output_tokens == 20
        for phase in ("queue", "prefill", "decode"):
            assert 0 <= getattr(once.timeline, f"{phase}_seconds") < 30
        plain = pb.GenerateRequest(text="x", sampling=sampling)
        assert not stub.GenerateOnce(plain).HasField("timeline")
        assert [e.WhichOneof("event") for e in stub.Generate(plain)][-1] == "usage"
        server.runner.gate.clear()
        with ThreadPoolExecutor(1) as pool:
            ahead = pool.submit(stub.GenerateOnce, plain)
            server.wait_until(lambda: server.engine.stats.num_running == 1)
            events = stub.Generate(wanted)
            assert next(events).WhichOneof("event") == "accepted"
            server.runner.step_seconds = 0.05
            server.runner.gate.set()
            waiting = next(events).waiting
            assert (waiting.position, waiting.of) == (1, 1) and waiting.expected_seconds > 0
            server.let_go()
            *_, usage, last = events
            assert usage.HasField("usage") and sum(last.timeline.tokens.values()) == 20
            assert len(ahead.result().completions[0].token_ids) == 20

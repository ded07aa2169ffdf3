"""The `openai` package goes on with what the server keeps: turns, streams, tools, conversations."""

import httpx
import openai
import pytest
from scripted import say, scripted_server

ASK = {"model": "echo", "max_output_tokens": 400}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {"type": "function", "name": "get_weather", "parameters": PARAMETERS, "strict": False}


@pytest.fixture(scope="module")
def server():
    with scripted_server("hermes", store_responses="16MiB") as running:
        yield running


@pytest.fixture
def package(server, client):
    with openai.OpenAI(
        base_url=f"{server.url}/v1",
        api_key="x",
        max_retries=0,
        http_client=httpx.Client(trust_env=False),
    ) as package:
        yield package


@pytest.fixture(params=[False, True], ids=["whole", "streamed"])
def ask(request, package):
    """Responses of turns, whole or out of a stream."""

    def create(**fields):
        if not request.param:
            return package.responses.create(**ASK, **fields)
        with package.responses.stream(**ASK, **fields) as stream:
            return stream.get_final_response()

    return create


def num_prompt_tokens(client, turns, **fields) -> int:
    body = {"messages": turns} | fields
    return client.post("/tokenize", json=body).json()["count"]


def test_turns_with_a_call(server, client, package, ask):
    """The model is told what it would be told of the whole conversation."""
    say(server, CALL)
    first = ask(input="Weather in Rome?", tools=[TOOL])
    (call,) = first.output
    say(server, "It is warm.")
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "27 degrees"}
    second = ask(input=[output], tools=[TOOL], previous_response_id=first.id)
    assert second.output_text == "It is warm."
    assert second.previous_response_id == first.id and second.store is True
    spelt = [{"role": "user", "content": "Weather in Rome?"}, call.to_dict(), output]
    whole = package.responses.create(**ASK, input=spelt, tools=[TOOL], store=False)
    assert second.usage.input_tokens == whole.usage.input_tokens
    say(server, "Yes.")
    third = ask(input="Sure?", tools=[TOOL], previous_response_id=second.id)
    spelt += [*(each.to_dict() for each in second.output), {"role": "user", "content": "Sure?"}]
    whole = package.responses.create(**ASK, input=spelt, tools=[TOOL], store=False)
    assert third.usage.input_tokens == whole.usage.input_tokens
    assert package.responses.retrieve(third.id).output_text == "Yes."


def test_items_of_an_input_are_listed(server, package, ask):
    say(server, CALL)
    first = ask(input="Weather in Rome?", tools=[TOOL])
    say(server, "Warm.")
    output = {"type": "function_call_output", "call_id": first.output[0].call_id, "output": "27"}
    second = ask(input=[output], previous_response_id=first.id)
    listed = [*package.responses.input_items.list(second.id, limit=2, order="asc")]
    assert [each.type for each in listed] == ["message", "function_call", "function_call_output"]
    assert all(each.id for each in listed)
    package.responses.delete(second.id)
    with pytest.raises(openai.NotFoundError):
        package.responses.retrieve(second.id)


def test_a_conversation(server, package, ask):
    say(server, "Hello.")
    talk = package.conversations.create(items=[{"role": "user", "content": "I am Ada."}])
    ask(input="Who am I?", conversation=talk.id)
    say(server, "Ada.")
    ask(input="And now?", conversation=talk.id)
    items = [*package.conversations.items.list(talk.id, order="asc", limit=2)]
    texts = [each.content[0].text for each in items]
    assert texts == ["I am Ada.", "Who am I?", "Hello.", "And now?", "Ada."]
    package.conversations.items.create(talk.id, items=[{"role": "user", "content": "Bye."}])
    last = package.conversations.items.list(talk.id, limit=1).data[0]
    assert package.conversations.items.retrieve(last.id, conversation_id=talk.id) == last
    package.conversations.items.delete(last.id, conversation_id=talk.id)
    changed = package.conversations.update(talk.id, metadata={"topic": "names"})
    assert package.conversations.retrieve(talk.id) == changed
    assert len([*package.conversations.items.list(talk.id)]) == 5
    assert package.conversations.delete(talk.id).deleted
    with pytest.raises(openai.NotFoundError):
        package.conversations.retrieve(talk.id)


def test_a_response_in_the_background(server, package):
    say(server, CALL)
    answer = package.responses.create(**ASK, input="Rome?", tools=[TOOL], background=True)
    assert (answer.status, answer.background) == ("queued", True)
    while answer.status in ("queued", "in_progress"):
        answer = package.responses.retrieve(answer.id)
    assert answer.status == "completed" and answer.output[0].name == "get_weather"
    assert package.responses.cancel(answer.id).status == "completed"


def test_what_is_not_there_is_named(package):
    with pytest.raises(openai.BadRequestError) as caught:
        package.responses.create(**ASK, input="x", previous_response_id="resp_none")
    assert caught.value.code == "previous_response_not_found"
    assert caught.value.param == "previous_response_id"

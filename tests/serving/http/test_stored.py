"""Responses and conversations over HTTP: who sees what, and what is refused."""

import pytest
from kit import COMPLETION, events, is_error, running_server

RESPONSES, CONVERSATIONS = "/v1/responses", "/v1/conversations"
ONE, OTHER = ({"authorization": f"Bearer {key}"} for key in ("key-one", "key-other"))
BODY = {"model": "echo", "max_output_tokens": 6, "seed": 1, "ignore_eos": True}


@pytest.fixture(scope="module")
def server():
    keys = ("key-one", "key-other")
    with running_server(grpc=False, keys=keys, store_responses="1MiB") as running:
        yield running


@pytest.fixture
def client(server):
    with server.client(headers=ONE) as client:
        yield client
    server.let_go()
    server.assert_quiescent()


def ask(client, text, **fields) -> dict:
    answer = client.post(RESPONSES, json=BODY | {"input": text} | fields)
    assert answer.status_code == 200, answer.text
    assert "warning" not in answer.headers
    return answer.json()


def text_of(response: dict) -> str:
    return response["output"][0]["content"][0]["text"]


def continued(client, prompt: str) -> str:
    body = {"prompt": prompt, "max_tokens": 6, "seed": 1, "ignore_eos": True}
    return client.post(COMPLETION, json=body).json()["choices"][0]["text"]


def test_a_response_goes_on_with_the_one_before_and_is_given_again(client):
    first = ask(client, "hi")
    assert (first["store"], first["previous_response_id"]) == (True, None)
    second = ask(client, "and?", previous_response_id=first["id"], instructions="Be brief.")
    said = text_of(first)
    prompt = f"system: Be brief.\nuser: hi\nassistant: {said}\nuser: and?\nassistant:"
    assert text_of(second) == continued(client, prompt)
    assert client.get(f"{RESPONSES}/{second['id']}").json() == second
    third = ask(client, "so?", previous_response_id=second["id"])
    prompt = f"user: hi\nassistant: {said}\nuser: and?\nassistant: {text_of(second)}\n"
    assert text_of(third) == continued(client, f"{prompt}user: so?\nassistant:")


def test_tokens_are_counted_with_what_was_before(client):
    first = ask(client, "hi")
    body = {"model": "echo", "input": "and?", "previous_response_id": first["id"]}
    counted = client.post(f"{RESPONSES}/input_tokens", json=body)
    assert "warning" not in counted.headers
    second = ask(client, "and?", previous_response_id=first["id"])
    assert counted.json()["input_tokens"] == second["usage"]["input_tokens"]
    body["previous_response_id"] = "resp_none"
    refused = client.post(f"{RESPONSES}/input_tokens", json=body)
    is_error(refused, 400, "previous_response_id")


def test_a_stream_is_kept_before_its_end_is_told(client):
    first = ask(client, "hi")
    body = BODY | {"input": "and?", "previous_response_id": first["id"], "stream": True}
    lines = client.post(RESPONSES, json=body).text + "\n\ndata: [DONE]"
    objects = [line.split("\n")[-1] for line in lines.split("\n\n") if line]
    last = events("\n\n".join(objects))[-1]["response"]
    assert client.get(f"{RESPONSES}/{last['id']}").json() == last
    whole = ask(client, "and?", previous_response_id=first["id"])
    assert text_of(last) == text_of(whole)


def test_input_items_are_those_of_the_whole_chain(client):
    first = ask(client, "one")
    second = ask(client, [{"role": "user", "content": "two"}], previous_response_id=first["id"])
    third = ask(client, "three", previous_response_id=second["id"])
    path = f"{RESPONSES}/{third['id']}/input_items"
    listed = client.get(path, params={"order": "asc"}).json()
    texts = [item["content"][0]["text"] for item in listed["data"]]
    assert texts == ["one", text_of(first), "two", text_of(second), "three"]
    ids = [item["id"] for item in listed["data"]]
    assert len(set(ids)) == 5 and listed["has_more"] is False
    part = client.get(path, params={"limit": 1, "after": ids[4]}).json()
    assert ([each["id"] for each in part["data"]], part["has_more"]) == ([ids[3]], True)
    is_error(client.get(path, params={"limit": 0}), 400, "limit")
    is_error(client.get(path, params={"order": "up"}), 400, "order")
    is_error(client.get(path, params={"after": "x"}), 404, "after")


def test_what_is_not_to_be_kept_is_not(client):
    answer = ask(client, "hi", store=False)
    assert answer["store"] is False
    is_error(client.get(f"{RESPONSES}/{answer['id']}"), 404)
    asked = client.post(RESPONSES, json=BODY | {"input": "x", "previous_response_id": answer["id"]})
    is_error(asked, 400, "previous_response_id")
    assert asked.json()["error"]["code"] == "previous_response_not_found"


def test_what_is_deleted_is_gone_for_those_that_follow_it(client):
    first = ask(client, "hi")
    second = ask(client, "and?", previous_response_id=first["id"])
    path = f"{RESPONSES}/{first['id']}"
    assert client.delete(path).json() == {"id": first["id"], "object": "response", "deleted": True}
    is_error(client.delete(path), 404)
    asked = client.post(RESPONSES, json=BODY | {"input": "x", "previous_response_id": second["id"]})
    is_error(asked, 400, "previous_response_id")
    assert "gone" in asked.text


def test_no_key_reads_or_changes_what_is_of_another(server, client):
    mine = ask(client, "a secret")
    talk = client.post(CONVERSATIONS, json={"items": [{"role": "user", "content": "s"}]}).json()
    with server.client(headers=OTHER) as other:
        for path in (f"{RESPONSES}/{mine['id']}", f"{CONVERSATIONS}/{talk['id']}"):
            is_error(other.get(path), 404)
            is_error(other.delete(path), 404)
        is_error(other.get(f"{RESPONSES}/{mine['id']}/input_items"), 404)
        is_error(other.get(f"{CONVERSATIONS}/{talk['id']}/items"), 404)
        is_error(other.post(f"{CONVERSATIONS}/{talk['id']}", json={"metadata": {"a": "b"}}), 404)
        for field, name in (("previous_response_id", mine["id"]), ("conversation", talk["id"])):
            is_error(other.post(RESPONSES, json=BODY | {"input": "x", field: name}), 400, field)
        # The same id is free under another key, and is another response.
        own = ask(other, "mine", request_id=mine["id"].removeprefix("resp_"))
        assert own["id"] == mine["id"] and other.get(f"{RESPONSES}/{own['id']}").json() == own
    assert client.get(f"{RESPONSES}/{mine['id']}").json() == mine
    with server.client() as nobody:
        is_error(nobody.get(f"{RESPONSES}/{mine['id']}"), 401)


def test_an_id_is_not_given_twice(client):
    first = ask(client, "hi", request_id="again")
    is_error(client.post(RESPONSES, json=BODY | {"input": "x", "request_id": "again"}), 409)
    assert client.get(f"{RESPONSES}/resp_again").json() == first


def test_a_conversation_goes_on_by_itself(client):
    about = client.post(CONVERSATIONS, json={"metadata": {"topic": "tea"}}).json()
    path = f"{CONVERSATIONS}/{about['id']}"
    assert client.get(path).json() == about and about["metadata"] == {"topic": "tea"}
    first = ask(client, "hi", conversation=about["id"])
    assert first["conversation"] == {"id": about["id"]}
    second = ask(client, "and?", conversation={"id": about["id"]}, store=False)
    prompt = f"user: hi\nassistant: {text_of(first)}\nuser: and?\nassistant:"
    assert text_of(second) == continued(client, prompt)
    items = client.get(f"{path}/items", params={"order": "asc"}).json()["data"]
    assert [each["role"] for each in items] == ["user", "assistant"] * 2
    asked = BODY | {"input": "x", "previous_response_id": first["id"]}
    is_error(client.post(RESPONSES, json=asked), 400, "previous_response_id")  # of a conversation
    asked["conversation"] = about["id"]
    is_error(client.post(RESPONSES, json=asked), 400, "conversation")


def test_items_of_a_conversation_come_and_go(client):
    path = f"{CONVERSATIONS}/{client.post(CONVERSATIONS, json={}).json()['id']}"
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    added = client.post(f"{path}/items", json={"items": [{"role": "user", "content": "a"}, call]})
    first, second = added.json()["data"]
    assert (first["type"], second["type"]) == ("message", "function_call")
    assert client.get(f"{path}/items/{second['id']}").json() == second
    assert client.delete(f"{path}/items/{first['id']}").json()["object"] == "conversation"
    is_error(client.delete(f"{path}/items/{first['id']}"), 404)
    assert client.get(f"{path}/items").json()["data"] == [second]
    is_error(client.post(f"{path}/items", json={"items": [{"type": "nonsense"}]}), 400, "items")
    is_error(client.post(f"{path}/items", json={"items": [call] * 21}), 400, "items")
    told = client.post(f"{path}", json={"metadata": {"a": "b"}, "colour": 1})
    assert told.json()["metadata"] == {"a": "b"} and "colour" in told.headers["warning"]
    is_error(client.post(path, json={"metadata": {"a": "b" * 600}}), 400, "metadata")
    assert client.delete(path).json()["deleted"] is True
    is_error(client.get(f"{path}/items"), 404)


@pytest.mark.parametrize("field", ["previous_response_id", "conversation"])
@pytest.mark.parametrize(
    "value", [7, [], {"id": 3}, "", "resp_" + "x" * 3000, "../x", "%00", "a\0"]
)
def test_ids_that_are_none(client, field, value):
    is_error(client.post(RESPONSES, json=BODY | {"input": "x", field: value}), 400, field)


@pytest.mark.parametrize(
    "name", ["resp_", "..%2f..%2fetc%2fpasswd", "resp_%00", "conv_x", "'; DROP TABLE documents; --"]
)
def test_paths_with_ids_that_are_none(client, name):
    for path in (RESPONSES, CONVERSATIONS):
        is_error(client.get(f"{path}/{name}"), 404)
        is_error(client.delete(f"{path}/{name}"), 404)


def test_a_kind_of_document_is_not_another(client):
    talk = client.post(CONVERSATIONS, json={}).json()["id"]
    is_error(client.get(f"{RESPONSES}/{talk}"), 404)
    is_error(client.delete(f"{RESPONSES}/{talk}"), 404)
    answer = ask(client, "hi")["id"]
    is_error(client.get(f"{CONVERSATIONS}/{answer}"), 404)
    is_error(client.delete(f"{CONVERSATIONS}/{answer}"), 404)
    is_error(client.post(f"{RESPONSES}/{answer}/cancel"), 400, "background")
    is_error(client.get(f"{RESPONSES}/{answer}?stream=true"), 400, "stream")


def test_what_finds_no_room_is_answered_and_says_so(client):
    answer = ask(client, "hi", metadata={"a": "b"}, instructions="x" * 100)
    assert answer["store"] is True
    tools = [{"type": "function", "name": f"f{n}", "description": "d" * 52_000} for n in range(20)]
    metadata = {f"m{n}": "x" * 512 for n in range(16)}
    body = BODY | {"input": "hi", "tools": tools, "tool_choice": "none", "metadata": metadata}
    big = client.post(RESPONSES, json=body).json()
    assert big["store"] is False
    is_error(client.get(f"{RESPONSES}/{big['id']}"), 404)
    assert client.get(f"{RESPONSES}/{answer['id']}").status_code == 200


def test_a_conversation_that_is_longer_than_a_body_may_be_is_refused():
    options = {"grpc": False, "store_responses": "1MiB", "max_request_bytes": 4096}
    with running_server(**options) as server, server.client() as client:
        body = BODY | {"input": "x"}
        while (answer := client.post(RESPONSES, json=body)).status_code == 200:
            body["previous_response_id"] = answer.json()["id"]
        is_error(answer, 400, "previous_response_id")
        assert "too long" in answer.text


def test_a_server_that_keeps_nothing_says_what_would():
    with running_server(grpc=False) as server, server.client() as client:
        answer = client.post(RESPONSES, json=BODY | {"input": "hi", "store": True})
        assert answer.json()["store"] is False and "store" in answer.headers["warning"]
        for path in (f"{RESPONSES}/resp_1", f"{CONVERSATIONS}/conv_1"):
            refused = client.get(path)
            is_error(refused, 404)
            assert "--store-responses" in refused.text
        for field in ("previous_response_id", "conversation"):
            refused = client.post(RESPONSES, json=BODY | {"input": "hi", field: "resp_1"})
            is_error(refused, 400, field)
            assert "--store-responses" in refused.text
            counted = client.post(f"{RESPONSES}/input_tokens", json={"input": "x", field: "resp_1"})
            is_error(counted, 400, field)


def test_a_restart_keeps_responses_and_conversations(tmp_path):
    options = {"grpc": False, "store_responses": "1MiB", "store_dir": str(tmp_path / "kept")}
    with running_server(**options) as server, server.client() as client:
        first = ask(client, "hi")
        talk = client.post(CONVERSATIONS, json={"items": [{"role": "user", "content": "a"}]}).json()
    with running_server(**options) as server, server.client() as client:
        assert client.get(f"{RESPONSES}/{first['id']}").json() == first
        second = ask(client, "and?", previous_response_id=first["id"])
        prompt = f"user: hi\nassistant: {text_of(first)}\nuser: and?\nassistant:"
        assert text_of(second) == continued(client, prompt)
        (item,) = client.get(f"{CONVERSATIONS}/{talk['id']}/items").json()["data"]
        assert item["content"] == [{"type": "input_text", "text": "a"}]

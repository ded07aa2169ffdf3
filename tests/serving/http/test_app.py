"""What the HTTP front end answers beside generations, and how requests are told apart."""

from kit import MAX_MODEL_LEN


def test_tokens_and_text(client):
    ids = client.post("/tokenize", json={"prompt": "hé"}).json()
    assert ids["count"] == 3
    assert ids["max_model_len"] == MAX_MODEL_LEN
    assert client.post("/detokenize", json={"tokens": ids["tokens"]}).json() == {"prompt": "hé"}
    messages = [{"role": "user", "content": "hi"}]
    chat = client.post("/tokenize", json={"messages": messages, "return_token_strs": True}).json()
    assert chat["count"] == len(chat["token_strs"]) == len("user: hi\nassistant:")


def test_models_health_and_version(client):
    models = client.get("/v1/models").json()["data"]
    assert [model["id"] for model in models] == ["echo", "echo-alias"]
    assert client.get("/v1/models/echo-alias").json()["max_model_len"] == MAX_MODEL_LEN
    assert client.get("/v1/models/other").status_code == 404
    for path in ("/health", "/health/live", "/health/ready", "/health/progress"):
        assert client.get(path).status_code == 200
    assert "version" in client.get("/version").json()


def test_ids_travel(client):
    answer = client.post(
        "/v1/completions",
        json={"prompt": "x", "max_tokens": 1},
        headers={"x-request-id": "my-id.1"},
    )
    assert answer.headers["x-request-id"] == "my-id.1"
    assert answer.json()["id"] == "cmpl-my-id.1"


def test_traces_are_logged_and_prompts_are_not(client, caplog):
    caplog.set_level("INFO")
    trace = "4bf92f3577b34da6a3ce929d0e0e4736"
    headers = {"traceparent": f"00-{trace}-00f067aa0ba902b7-01"}
    client.post("/v1/completions", json={"prompt": "a secret"}, headers=headers)
    client.post("/v1/completions", json={"prompt": "a secret", "n": 0}, headers=headers)
    client.get("/v1/models", headers={"traceparent": "evil\tline"})
    assert caplog.text.count(f"trace={trace}") == 2
    assert "secret" not in caplog.text
    assert "evil" not in caplog.text
    assert "Traceback" not in caplog.text

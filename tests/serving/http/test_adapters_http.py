"""Adapters over HTTP and gRPC: models of their own, which come and go."""

import json
import shutil
import threading

import grpc
import pytest
from adapters_kit import adapter, expected, modules, pool_of
from engines import build_tiny, checkpoint
from kit import CHAT, COMPLETION, USER, is_error, metric_total, metric_values, running_server

from serving.http.adapters import PATHS
from serving.proto import shiftjax_pb2 as pb
from serving.proto import shiftjax_pb2_grpc as pb_grpc
from shiftjax.adapters.pool import AdapterState
from shiftjax.adapters.state_told import metrics

LOAD, UNLOAD = PATHS
KEY, CONTROL = "sk-user", "sk-trainer"
TRAINER = {"authorization": f"Bearer {CONTROL}"}
USER_KEY = {"authorization": f"Bearer {KEY}"}
BYTES = {"vocab_size": 264}  # a token for each byte, and some
PROMPT = (5, 6, 7, 8)
NUM = 8
GREEDY = {"max_tokens": NUM, "temperature": 0, "ignore_eos": True}
NAMES = {"echo": None, "a1": 1, "a2": 2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where adapters may be loaded from: the third, and one that is none."""
    path = tmp_path_factory.mktemp("adapters")
    shutil.copytree(adapter(3, **BYTES)[0], path / "third")
    shutil.copytree(adapter(4, **BYTES)[0], path / "fourth")
    shutil.copytree(adapter(5, rank=32, **BYTES)[0], path / "wide")
    (path / "empty").mkdir()
    (path / "broken").mkdir()
    (path / "broken/adapter_config.json").write_text("{")
    (path / "away").symlink_to(adapter(6, **BYTES)[0])
    return path


@pytest.fixture(scope="module")
def built():
    directory, *_ = checkpoint(**BYTES)
    own = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}
    own |= {"lora_modules": modules(1, 2, **BYTES)}
    return build_tiny(directory, sp=1, tp=1, whole=True, **own)


@pytest.fixture(scope="module")
def server(built, folder, tmp_path_factory):
    file = tmp_path_factory.mktemp("keys") / "control"
    file.write_text(CONTROL)
    options = {"keys": (KEY,), "api_key": KEY, "control_key_file": str(file)}
    options |= {"adapters": pool_of(built), "adapter_folder": folder}
    options |= {"store_responses": "1MiB", "files_bytes": "2MiB", "max_file_bytes": "1MiB"}
    options |= {"files_dir": str(tmp_path_factory.mktemp("files"))}
    with running_server(built.engine, **options) as running:
        yield running


@pytest.fixture
def user(server):
    with server.client(headers=USER_KEY) as client:
        yield client
    server.assert_quiescent()


@pytest.fixture
def trainer(server):
    """Afterwards there are the adapters of the start alone."""
    with server.client(headers=TRAINER) as client:
        yield client
        for name in set(server.service.model.adapters.names) - {"a1", "a2"}:
            client.post(UNLOAD, json={"lora_name": name})


def right(ids, name: str, num: int = NUM) -> list[int]:
    return expected(tuple(ids), NAMES.get(name), num, **BYTES)


def said(client, name: str | None, prompt=PROMPT) -> list[int]:
    body = {"model": name, "prompt": [*prompt], "return_token_ids": True, **GREEDY}
    answer = client.post(COMPLETION, json=body).json()
    assert answer["model"] == (name or "echo")
    return answer["choices"][0]["token_ids"]


def ids_of_chat(client, name: str) -> list[int]:
    return client.post("/tokenize", json={"model": name, "messages": USER}).json()["tokens"]


@pytest.mark.parametrize("name", NAMES)
def test_completions(user, name):
    assert said(user, name) == right(PROMPT, name)


def test_no_name_and_another_name_of_the_model_are_the_model(user):
    assert said(user, None) == right(PROMPT, "echo")
    body = {"model": "echo-alias", "prompt": [*PROMPT], "return_token_ids": True, **GREEDY}
    answer = user.post(COMPLETION, json=body).json()
    assert answer["model"] == "echo"
    assert answer["choices"][0]["token_ids"] == right(PROMPT, "echo")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("stream", [False, True])
def test_chats(user, name, stream):
    body = {"model": name, "messages": USER, "return_token_ids": True, "stream": stream, **GREEDY}
    text = user.post(CHAT, json=body).text
    wanted = right(ids_of_chat(user, name), name)
    if not stream:
        answer = json.loads(text)
        assert answer["model"] == name
        assert answer["choices"][0]["token_ids"] == wanted
        return
    chunks = [json.loads(line[6:]) for line in text.split("\n\n") if line[6:7] == "{"]
    assert {chunk["model"] for chunk in chunks} == {name}
    found = [c.get("token_ids") or [] for chunk in chunks for c in chunk["choices"]]
    assert [token for each in found for token in each] == wanted


def texts_of(server, user, name: str) -> str:
    """What the tokens of a chat with an adapter are as a text."""
    wanted = right(ids_of_chat(user, name), name)
    return server.service.model.tokenizer.decode(wanted, skip_special_tokens=True)


@pytest.mark.parametrize("name", NAMES)
def test_responses_and_messages(server, user, name):
    text = texts_of(server, user, name)
    own = {"max_output_tokens": NUM, "temperature": 0, "ignore_eos": True}
    answer = user.post("/v1/responses", json={"model": name, "input": "hi", **own}).json()
    assert answer["model"] == name
    assert answer["output"][0]["content"][0]["text"] == text
    answer = user.post("/v1/messages", json={"model": name, "messages": USER, **GREEDY}).json()
    assert answer["model"] == name
    assert answer["content"][0]["text"] == text


def test_a_response_in_the_background(server, user):
    body = {"model": "a2", "input": "hi", "max_output_tokens": NUM, "temperature": 0}
    body |= {"background": True, "ignore_eos": True}
    queued = user.post("/v1/responses", json=body).json()
    assert (queued["status"], queued["model"]) == ("queued", "a2")
    path = f"/v1/responses/{queued['id']}"
    server.wait_until(lambda: user.get(path).json()["status"] == "incomplete")
    found = user.get(path).json()
    assert found["model"] == "a2"
    assert found["output"][0]["content"][0]["text"] == texts_of(server, user, "a2")


@pytest.mark.parametrize("name", NAMES)
def test_tokens_alone(user, name):
    sampling = {"max_tokens": NUM, "temperature": 0, "ignore_eos": True}
    body = {"model": name, "token_ids": [*PROMPT], "sampling_params": sampling}
    answer = user.post("/inference/v1/generate", json=body).json()
    assert answer["choices"][0]["token_ids"] == right(PROMPT, name)


@pytest.mark.parametrize("name", NAMES)
def test_rpc(server, name):
    call = {"metadata": [("authorization", f"Bearer {KEY}")]}
    with grpc.insecure_channel(server.server.grpc.address) as channel:
        stub = pb_grpc.InferenceStub(channel)
        sampling = pb.Sampling(max_tokens=NUM, temperature=0, ignore_eos=True)
        prompt = pb.TokenIds(ids=PROMPT)
        wish = pb.GenerateRequest(model=name, token_ids=prompt, sampling=sampling)
        once = stub.GenerateOnce(wish, **call)
        assert [*once.completions[0].token_ids] == right(PROMPT, name)
        first = next(iter(stub.Generate(wish, **call)))
        assert first.accepted.model == name
        listed = stub.ListModels(pb.ListModelsRequest(), **call)
        assert [each.id for each in listed.models] == ["echo", "echo-alias", "a1", "a2"]
        assert stub.GetModel(pb.GetModelRequest(model=name), **call).id == name
        with pytest.raises(grpc.RpcError) as error:
            stub.GetModel(pb.GetModelRequest(model="a7"), **call)
        assert error.value.code() == grpc.StatusCode.NOT_FOUND


def test_a_batch_with_an_adapter_on_each_line(server, user):
    lines = [
        {
            "custom_id": name,
            "method": "POST",
            "url": COMPLETION,
            "body": {"model": name, "prompt": [*PROMPT], "return_token_ids": True, **GREEDY},
        }
        for name in (*NAMES, "a7")
    ]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    form = {"files": {"file": ("in.jsonl", text)}, "data": {"purpose": "batch"}}
    made = user.post("/v1/files", **form).json()
    wish = {"input_file_id": made["id"], "endpoint": COMPLETION, "completion_window": "24h"}
    batch = f"/v1/batches/{user.post('/v1/batches', json=wish).json()['id']}"
    server.wait_until(lambda: user.get(batch).json()["status"] == "completed")
    done = user.get(batch).json()
    text = user.get(f"/v1/files/{done['output_file_id']}/content").text
    found = {each["custom_id"]: each["response"] for each in map(json.loads, text.splitlines())}
    for name in NAMES:
        assert found[name]["body"]["choices"][0]["token_ids"] == right(PROMPT, name)
    text = user.get(f"/v1/files/{done['error_file_id']}/content").text
    (failed,) = map(json.loads, text.splitlines())
    assert (failed["custom_id"], failed["response"]["status_code"]) == ("a7", 404)


def test_the_list_of_models(user):
    listed = {each["id"]: each for each in user.get("/v1/models").json()["data"]}
    assert [*listed] == ["echo", "echo-alias", "a1", "a2"]
    assert [each["parent"] for each in listed.values()] == [None, None, "echo", "echo"]
    assert listed["echo"]["root"] == "echo"
    assert listed["a1"]["root"] == str(adapter(1, **BYTES)[0])
    assert user.get("/v1/models/a1").json() == listed["a1"]
    is_error(user.get("/v1/models/a7"), 404, "model")
    found = user.get("/v1/models", headers={"anthropic-version": "2023-06-01"}).json()
    assert [each["id"] for each in found["data"]] == [*listed]


@pytest.mark.parametrize("path", ["/v1/completions", "/tokenize"])
def test_an_unknown_name(user, path):
    is_error(user.post(path, json={"model": "a7", "prompt": "x"}), 404, "model")


# ---------------------------------------------------------------- they come and go


def test_load_and_unload(user, trainer, folder):
    wish = {"lora_name": "a3", "lora_path": "third"}
    answer = trainer.post(LOAD, json=wish | {"is_3d_lora_weight": False})
    assert (answer.status_code, answer.text) == (
        200,
        "Success: LoRA adapter 'a3' added successfully.",
    )
    assert answer.headers["content-type"].startswith("text/plain")
    wanted = expected(PROMPT, 3, NUM, **BYTES)
    assert said(user, "a3") == wanted
    assert user.get("/v1/models/a3").json()["root"] == str(folder / "third")
    again = trainer.post(LOAD, json=wish)
    is_error(again, 400)
    assert "'a3' has already been loaded" in again.json()["error"]["message"]
    other = wish | {"lora_path": str(folder / "fourth"), "load_inplace": True}
    assert trainer.post(LOAD, json=other).status_code == 200
    assert said(user, "a3") == expected(PROMPT, 4, NUM, **BYTES) != wanted
    answer = trainer.post(UNLOAD, json={"lora_name": "a3"})
    assert (answer.status_code, answer.text) == (
        200,
        "Success: LoRA adapter 'a3' removed successfully.",
    )
    is_error(user.post(COMPLETION, json={"model": "a3", "prompt": [1]}), 404, "model")
    gone = trainer.post(UNLOAD, json={"lora_name": "a3"})
    is_error(gone, 404, "lora_name")
    assert "'a3' cannot be found" in gone.json()["error"]["message"]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("headers", [{}, USER_KEY])
def test_a_users_key_loads_nothing(server, path, headers):
    with server.client(headers=headers) as client:
        is_error(client.post(path, json={"lora_name": "a1", "lora_path": "third"}), 401)
        is_error(client.get(path), 401)
    assert [*server.service.model.adapters.names] == ["a1", "a2"]


@pytest.mark.parametrize("has_key", [False, True])
def test_without_adapters_or_a_key_nothing_is_loaded(tmp_path, has_key):
    (tmp_path / "key").write_text(CONTROL)
    own = {"control_key_file": str(tmp_path / "key")} if has_key else {}
    with running_server(grpc=False, **own) as running, running.client(headers=TRAINER) as client:
        for path in PATHS:
            answer = client.post(path, json={"lora_name": "a", "lora_path": "b"})
            is_error(answer, 404)
            assert ("--enable-lora" in answer.text) == has_key


def test_unloaded_while_a_request_runs(server, user, trainer):
    """It is served to its end; then nobody is."""
    assert trainer.post(LOAD, json={"lora_name": "a3", "lora_path": "third"}).status_code == 200
    body = {"model": "a3", "prompt": [*PROMPT], "return_token_ids": True, "stream": True}
    runner, gate = server.engine._engine.lanes[0].runner, threading.Event()
    launch, steps = runner.launch, []

    def held(*args, **more):
        steps.append(None)
        assert len(steps) < 3 or gate.wait(60)
        return launch(*args, **more)

    runner.launch = held
    try:
        with user.stream("POST", COMPLETION, json=body | GREEDY) as answer:
            lines = answer.iter_lines()
            first = next(line for line in lines if line)
            assert trainer.post(UNLOAD, json={"lora_name": "a3"}).status_code == 200
            is_error(trainer.post(UNLOAD, json={"lora_name": "a3"}), 404, "lora_name")
            gate.set()
            chunks = [json.loads(line[6:]) for line in (first, *lines) if line[6:7] == "{"]
    finally:
        gate.set()
        del runner.launch
    found = [c.get("token_ids") or [] for chunk in chunks for c in chunk["choices"]]
    assert [token for each in found for token in each] == expected(PROMPT, 3, NUM, **BYTES)
    is_error(user.post(COMPLETION, json={"model": "a3", "prompt": [1]}), 404, "model")
    assert said(user, "a1") == right(PROMPT, "a1")  # and the page hears of it
    rows = user.get("/ui/data").json()["adapters"]["rows"]
    assert [row["name"] for row in rows] == ["a1", "a2"]


OUTSIDE = "The path of the adapter is outside of --lora-folder."


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("..", OUTSIDE),
        ("../..", OUTSIDE),
        (".", OUTSIDE),
        ("/etc", OUTSIDE),
        ("away", OUTSIDE),
        ("third/../../x", OUTSIDE),
        ("a\0b", "The path of the adapter cannot be read."),
        ("x" * 5000, ""),
        ("wide", "rank 32 is more than max_lora_rank = 8"),
        ("broken", "broken/adapter_config.json"),
        ("", "Both 'lora_name' and 'lora_path' must be provided."),
    ],
)
def test_paths_that_are_refused(trainer, user, folder, path, words):
    answer = trainer.post(LOAD, json={"lora_name": "a9", "lora_path": path})
    is_error_of_a_path(answer, 400, words, folder)
    is_error(user.get("/v1/models/a9"), 404)


@pytest.mark.parametrize("path", ["nowhere", "empty", "third/adapter_model.safetensors"])
def test_paths_without_an_adapter(trainer, user, folder, path):
    """They are not found, as vLLM has it."""
    answer = trainer.post(LOAD, json={"lora_name": "a9", "lora_path": path})
    is_error_of_a_path(answer, 404, f"'{path}' is no directory with an adapter_config.json", folder)
    is_error(user.get("/v1/models/a9"), 404)


def is_error_of_a_path(answer, status: int, words: str, folder) -> None:
    """It may name the path that was asked for, and nothing else of the inside."""
    is_error(answer, status)
    assert words in answer.json()["error"]["message"]
    assert str(folder) not in answer.text


@pytest.mark.parametrize(
    "name",
    ["", "a\nb", "a\x00b", "\x1b[31m", "\u202eevil", "n" * 300, "echo", "echo-alias", 3, None],
)
def test_names_that_are_refused(trainer, user, name):
    before = user.get("/v1/models").json()
    is_error(trainer.post(LOAD, json={"lora_name": name, "lora_path": "third"}), 400)
    assert user.get("/v1/models").json() == before
    assert said(user, "echo") == right(PROMPT, "echo")


@pytest.mark.parametrize("name", ['a"b\\c', "a/b c,d", "é日本", "<script>", "n" * 256])
def test_names_that_are_odd(trainer, user, name):
    assert trainer.post(LOAD, json={"lora_name": name, "lora_path": "third"}).status_code == 200
    assert said(user, name) == expected(PROMPT, 3, NUM, **BYTES)
    assert user.get(f"/v1/models/{name}").json()["id"] == name
    assert metric_values(user)  # still to be parsed
    shown = user.get("/ui/data").json()["adapters"]["rows"]
    assert {"name": name, "in_slot": True, "running": 0, "waiting": 0} in shown


@pytest.mark.parametrize(
    "body", [{}, {"lora_name": "a"}, {"lora_name": "a", "lora_path": "third", "more": 1}, [], "x"]
)
def test_bodies_that_are_wrong(trainer, body):
    is_error(trainer.post(LOAD, json=body), 400)
    is_error(trainer.post(UNLOAD, json=[]), 400)
    is_error(trainer.post(UNLOAD, json={"lora_name": ""}), 400)


def test_a_load_disturbs_nobody(server, trainer):
    """Adapters come and go beside requests, whose tokens stay what they are."""
    found: dict[str, list[list[int]]] = {name: [] for name in NAMES}
    done = threading.Event()

    def ask(name: str) -> None:
        with server.client(headers=USER_KEY) as own:
            while not done.is_set():
                found[name].append(said(own, name))

    threads = [threading.Thread(target=ask, args=(name,)) for name in NAMES]
    for thread in threads:
        thread.start()
    try:
        with server.client(headers=USER_KEY) as own:
            for turn in range(6):
                path, seed = (("third", 3), ("fourth", 4))[turn % 2]
                wish = {"lora_name": "a3", "lora_path": path, "load_inplace": turn > 0}
                assert trainer.post(LOAD, json=wish).status_code == 200
                assert said(own, "a3") == expected(PROMPT, seed, NUM, **BYTES)
            assert trainer.post(UNLOAD, json={"lora_name": "a3"}).status_code == 200
    finally:
        done.set()
        for thread in threads:
            thread.join()
    for name, tokens in found.items():
        assert tokens and all(each == right(PROMPT, name) for each in tokens)
    server.assert_quiescent()


def test_unloaded_while_the_request_is_on_its_way(server, user, trainer, monkeypatch):
    """It is refused as any unknown name is, whichever thread finds it out."""
    pool, thread = server.service.model.adapters, server.engine._thread
    assert trainer.post(LOAD, json={"lora_name": "a3", "lora_path": "third"}).status_code == 200
    post = thread.post

    def late(command):
        if getattr(command, "func", None) == server.engine._admit and "a3" in pool.names:
            pool.unload("a3")
            post(lambda engine: engine.stats() and None)  # forgets what nobody has
        post(command)

    monkeypatch.setattr(thread, "post", late)
    is_error(user.post(COMPLETION, json={"model": "a3", "prompt": [1]}), 404, "model")
    assert said(user, "a1") == right(PROMPT, "a1")


def test_metrics_and_the_page(server, user):
    for name in NAMES:
        said(user, name)
    values = metric_values(user)
    told = [dict(labels) for name, labels in values if name == "shiftjax:lora_requests_info"]
    (labels,) = told
    assert labels["max_lora"] == "2"
    assert labels["running_lora_adapters"] == labels["waiting_lora_adapters"] == ""
    for name, number in (("loaded", 2), ("in_slots", 2)):
        assert metric_total(values, f"shiftjax:lora_adapters_{name}") == number
    assert metric_total(values, "shiftjax:lora_slot_writes_total") >= 2
    assert metric_total(values, "shiftjax:lora_adapter_reads_total") == 0
    page = user.get("/ui/data").json()["adapters"]
    assert {page[f"num_{each}"] for each in ("slots", "in_slots", "loaded")} == {2}
    assert [row["name"] for row in page["rows"]] == ["a1", "a2"]


def test_names_write_no_lines_of_metrics():
    name = 'a"} 1\\x{b="'
    state = AdapterState(1, [name], [], 0, 0, running={name: 1})
    with running_server(grpc=False) as running, running.client() as client:
        running.service.metrics.collectors.append(lambda: metrics(state, clock=lambda: 7.5))
        found = {key: value for key, value in metric_values(client).items() if "lora_re" in key[0]}
        ((_, labels),) = found
        assert dict(labels)["running_lora_adapters"] == name and [*found.values()] == [7.5]


def test_an_adapter_whose_files_have_gone(tmp_path):
    """Host memory has not kept it: who asks for it hears so, and all else goes on."""
    shutil.copytree(adapter(3, **BYTES)[0], tmp_path / "third")
    own = {"enable_lora": True, "max_loras": 1, "max_lora_rank": 8, "max_cpu_loras": 1}
    own |= {"lora_modules": f"{modules(1, **BYTES)},a3={tmp_path / 'third'}"}
    built = build_tiny(checkpoint(**BYTES)[0], sp=1, tp=1, whole=True, **own)
    pool = pool_of(built)
    with (
        running_server(built.engine, adapters=pool, grpc=False) as running,
        running.client() as client,
    ):
        assert said(client, "a3") == expected(PROMPT, 3, NUM, **BYTES)
        assert said(client, "a1") == right(PROMPT, "a1")
        shutil.move(tmp_path / "third", tmp_path / "away")
        for _ in range(2):
            is_error(client.post(COMPLETION, json={"model": "a3", "prompt": [1]}), 404, "model")
        assert said(client, "a1") == right(PROMPT, "a1")
        running.assert_quiescent()
        assert [*pool.names] == ["a1"] and pool.told().lost == []
        shutil.move(tmp_path / "away", tmp_path / "third")
        pool.load("a3", str(tmp_path / "third"))
        assert said(client, "a3") == expected(PROMPT, 3, NUM, **BYTES)

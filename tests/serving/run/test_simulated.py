"""`shiftjax serve --simulate`: real servers over devices that are not there."""

import json
import threading

import grpc
import pytest
from engines import checkpoint
from google.protobuf.json_format import MessageToDict
from in_thread import server_in_thread
from kit import (
    CHAT,
    COMPLETION,
    USER,
    VOCAB_SIZE,
    byte_tokenizer,
    events,
    is_error,
    metric_total,
    metric_values,
    run_command,
)
from served import serve

from serving.proto import shiftjax_pb2 as pb
from serving.proto import shiftjax_pb2_grpc as rpc
from serving.run.simulated import open_simulated
from serving.server.async_engine import AsyncEngine
from serving.server.options import ServerOptions
from shiftjax.config import EngineConfig
from shiftjax.costs.step_times import predicted
from shiftjax.costs.work import Work
from shiftjax.options import ConfigError

LONG = {"prompt": "x", "max_tokens": 100_000, "ignore_eos": True}
SIZES = {"max_num_seqs": 1, "max_num_batched_tokens": 64}


def simulated(options=None, **settings):
    config = EngineConfig.from_options(**({"model": "llama-3.2-1b"} | settings))
    return open_simulated(config, options or ServerOptions(simulate="h200x8"))


@pytest.fixture(scope="module")
def server():
    """Of one sequence at a time; two more may wait."""
    opened = opener(simulated(**SIZES))
    with server_in_thread(opened, simulate="h200x8", max_num_queued_reqs=2) as running:
        yield running


def opener(opened):
    def open_engine(service):
        tokenizer = opened.served.tokenizer
        engine = AsyncEngine(opened.engine, tokenizer, service.observers, service.options)
        service.open(opened.served, engine)
        return engine

    return open_engine


@pytest.fixture
def client(server):
    with server.client() as client:
        yield client


def test_plain_and_streamed_answers_are_the_same_text(client):
    body = {"messages": USER, "seed": 5, "max_tokens": 9, "ignore_eos": True}
    answer = client.post(CHAT, json=body).json()
    text = answer["choices"][0]["message"]["content"]
    assert len(text) == 9 and text.isprintable() and "\ufffd" not in text
    assert answer["usage"]["completion_tokens"] == 9
    parts = events(client.post(CHAT, json=body | {"stream": True}).text)
    assert "".join(each["choices"][0]["delta"].get("content") or "" for each in parts) == text
    stopped = client.post(CHAT, json=body | {"stop": text[3:5]}).json()["choices"][0]
    assert (stopped["message"]["content"], stopped["finish_reason"]) == (text[:3], "stop")


def test_made_up_answers_keep_to_a_schema(client):
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    schema["additionalProperties"] = False
    for seed in range(4):
        body = {"messages": USER, "seed": seed, "max_tokens": 500, "response_format": form}
        choice = client.post(CHAT, json=body).json()["choices"][0]
        assert choice["finish_reason"] == "stop", choice
        assert isinstance(json.loads(choice["message"]["content"])["a"], bool)


def test_everybody_is_told_that_devices_are_simulated(server, client):
    (model,) = client.get("/v1/models").json()["data"]
    assert model["simulated"] == "h200x8"
    titles = client.get("/v1/models", headers={"anthropic-version": "2023-06-01"}).json()["data"]
    assert "simulated h200x8" in titles[0]["display_name"]
    assert client.get("/health").json()["simulated"] == "h200x8"
    assert client.get("/model_info").json()["simulated"] == "h200x8"
    assert client.get("/server_info").json()["engine"]["devices"] == "simulated h200x8"
    with grpc.insecure_channel(server.server.grpc.address) as channel:
        told = rpc.InferenceStub(channel).GetModel(pb.GetModelRequest())
        assert told.simulated == "h200x8"
    assert client.get("/ui/data").json()["model"]["mesh"].startswith("simulated h200x8: ")
    told = {dict(labels).get("devices") for _, labels in metric_values(client)}
    assert "simulated h200x8" in told


@pytest.mark.parametrize("fleet", [False, True], ids=["threshold", "fleet"])
def test_it_tells_what_other_modes_sizes_and_groups_would_have_cost(tmp_path, fleet):
    """JSON and gRPC say the same: the seconds of the cost model for the work that they tell."""
    settings = {"fleet": True, "fleet_policy": "load"} if fleet else {"sp": 4, "tp": 2}
    opened = simulated(model="llama-70b", quantization="fp8", **settings)
    token = tmp_path / "token"
    token.write_text("admin")
    options = {"simulate": "h200x8", "admin_port": 0, "admin_token_file": str(token)}
    with server_in_thread(opener(opened), **options) as server, server.client() as client:
        body = {"prompt": "x" * 700, "max_tokens": 9, "ignore_eos": True}
        assert client.post(COMPLETION, json=body).status_code == 200
        told = client.get("/explain").json()
        with grpc.insecure_channel(server.server.admin.address) as channel:
            metadata = (("authorization", "Bearer admin"),)
            same = rpc.AdminStub(channel).Explain(pb.ExplainRequest(), metadata=metadata)
        page = client.get("/ui/data").json()["explained"]
        costs = {lane.group.width: lane.costs for lane in opened.engine.lanes}
    plain = MessageToDict(
        same, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    assert plain.keys() == told.keys() and plain["sizes"] == told["sizes"]
    assert [each["predicted"] for each in plain["steps"]] == [
        each["predicted"] for each in told["steps"]
    ]
    assert told["policy"] == "threshold" and told["machine"] == "h200x8"
    assert {each["mode"] for each in told["steps"]} >= {"base", "shift"}
    for step in told["steps"]:
        assert [each["mode"] for each in step["predicted"]] == ["base", "shift"]
        cost = costs[step["width"]]
        for mode, each in zip(modes_of(cost), step["predicted"], strict=True):
            last = {"base": modes_of(cost)[0], "shift": modes_of(cost)[1]}.get(step["last_mode"])
            work = Work(**step["work"])
            assert each["seconds"] == predicted(cost, mode, last, work, step["is_hidden"])
    assert told["sizes"][0]["sizes"][0]["tokens"] == 1024
    assert {each["mode"] for each in page["steps"]} == {"base", "shift"} and not page["unknown"]
    if fleet:
        now, (begun, *_) = told["fleet"]["now"], plain["fleet"]["now"]["arrangements"]
        assert now["from"] == "8" and "last_change" not in told["fleet"]
        assert begun.keys() == now["arrangements"][0].keys()
        assert len(page["fleet"]["now"]["arrangements"]) == len(now["arrangements"]) == 4
    else:
        assert "fleet" not in told


def modes_of(costs):
    layout = costs.layout
    return layout.modes[0], layout.modes[-1]


def test_log_probabilities_are_refused(client):
    fields = {"prompt": "x", "max_tokens": 2}
    for more in ({"logprobs": 1}, {"prompt_logprobs": 0}):
        is_error(client.post(COMPLETION, json=fields | more), 400, next(iter(more)))


def test_overload_waits_or_is_refused_and_an_abort_frees_the_devices(server, client):
    def send(number):
        with server.client() as own:
            return own.post(COMPLETION, json=LONG | {"request_id": f"long{number}"})

    threads = [threading.Thread(target=send, args=(n,)) for n in range(3)]
    for number, thread in enumerate(threads):
        thread.start()
        server.wait_until(lambda number=number: len(server.engine.handles) == number + 1)
    server.wait_until(lambda: server.engine.stats.num_waiting == 2)
    is_error(client.post(COMPLETION, json=LONG), 429)
    values = metric_values(client)
    assert metric_total(values, "shiftjax:num_requests_running") == 1
    assert metric_total(values, "shiftjax:num_requests_waiting") == 2

    async def abort():
        return [server.engine.abort(f"long{number}") for number in range(3)]

    assert server.on_loop(abort()) == ["ABORTED"] * 3
    for thread in threads:
        thread.join(30)
    server.wait_until(lambda: server.engine.stats.kv_usage == 0)
    assert client.post(COMPLETION, json={"prompt": "x", "max_tokens": 1}).status_code == 200
    values = metric_values(client)
    assert metric_total(values, "shiftjax:generation_tokens_total") > 0


def test_a_process_answers_by_both_protocols_and_drains(tmp_path):
    """No weights, a tokenizer beside a config.json; a request that runs finishes."""
    directory = tmp_path / "described"
    directory.mkdir()
    source = checkpoint(vocab_size=VOCAB_SIZE)[0] / "config.json"
    (directory / "config.json").write_bytes(source.read_bytes())
    byte_tokenizer().save(directory)
    with serve(directory, tmp_path, "--simulate=h200x8") as served:
        served.wait_for("/health/ready", 200)
        with grpc.insecure_channel(f"127.0.0.1:{served.grpc_port}") as channel:
            sampling = pb.Sampling(max_tokens=3, ignore_eos=True)
            request = pb.GenerateRequest(text="x", sampling=sampling)
            answer = rpc.InferenceStub(channel).GenerateOnce(request)
        assert answer.usage.completion_tokens == 3
        assert len(served.complete(max_tokens=40).json()["choices"][0]["token_ids"]) == 40
        log = served.end_well()
    assert "devices are simulated (h200x8): answers are made up" in log


def test_check_says_what_would_be_simulated(capsys):
    code, out, _ = run_command(capsys, "check", "llama-70b", "--simulate=h200x8", "--tp=4")
    assert code == 0 and "simulated h200x8: dp=1 sp=2 tp=4" in out


@pytest.mark.parametrize(
    ("options", "settings", "words"),
    [
        ({"simulate": "h900"}, {}, "h900"),
        ({"simulate": "h200x8"}, {"model": "llama-7000b"}, "llama-7000b"),
        ({"simulate": "h200x8"}, {"model": "tiny"}, "too few tokens to spell bytes"),
        ({"simulate": "h200x8"}, {"model": "minilm-l6"}, "is an encoder"),
        ({"simulate": "h200x8", "profile_dir": "p"}, {}, "nothing to profile"),
        ({"simulate": "l4x8"}, {"model": "llama-405b"}, "do not fit"),
    ],
)
def test_what_cannot_be_is_refused_in_words(options, settings, words):
    with pytest.raises(ConfigError, match=words):
        simulated(ServerOptions(**options), **settings)


def test_adapters_are_made_up_and_told_apart(tmp_path):
    """They are names alone: nothing is read, and each request is one of its adapter."""
    (tmp_path / "key").write_text("k")
    own = {"enable_lora": True, "lora_modules": "a=/nowhere,b=/else", "max_loras": 1}
    opened = simulated(**own, lora_folder=str(tmp_path))

    def open_engine(service):
        tokenizer = opened.served.tokenizer
        engine = AsyncEngine(opened.engine, tokenizer, service.observers, service.options)
        service.open(opened.served, engine)
        return engine

    options = {"simulate": "h200x8", "control_key_file": str(tmp_path / "key"), "grpc": False}
    with (
        server_in_thread(open_engine, **options) as running,
        running.client(headers={"authorization": "Bearer k"}) as client,
    ):
        for name in ("a", "b", "a"):
            body = {"model": name, "prompt": "x", "max_tokens": 4, "ignore_eos": True}
            answer = client.post(COMPLETION, json=body).json()
            assert (answer["model"], answer["usage"]["completion_tokens"]) == (name, 4)
        is_error(client.post(COMPLETION, json=body | {"model": "c"}), 404)
        wish = {"lora_name": "c", "lora_path": "anything"}
        assert client.post("/v1/load_lora_adapter", json=wish).status_code == 200
        assert client.post(COMPLETION, json=body | {"model": "c"}).json()["model"] == "c"
        values = metric_values(client)
        assert metric_total(values, "shiftjax:lora_slot_writes_total") == 4
        assert metric_total(values, "shiftjax:lora_adapters_loaded") == 3


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("n" * 300, "The name of an adapter must be 1 to 256 printable"),
        ("llama-3.2-1b", "lora_modules: 'llama-3.2-1b' is a name of the model itself"),
    ],
)
def test_a_made_up_adapter_without_a_proper_name_ends_the_start(name, words):
    with pytest.raises(ConfigError, match=words):
        simulated(enable_lora=True, lora_modules=f"{name}=/nowhere")

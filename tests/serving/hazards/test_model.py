"""The server over a tiny float32 model, where tokens are exact: loads, modes, structure."""

import asyncio
import json
import random
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle, islice

import grpc
import pytest
from background import with_clients
from cases.load_kit import Clients, mixed_body
from engines import RandomPolicy, checkpoint, make
from kit import EOS, VOCAB_SIZE, byte_tokenizer, events, metric_total, metric_values, serving
from oracle import numpy_llama

from serving.bench.client import Sample, complete, parse_url
from serving.bench.load import open_loop
from serving.http.dialects import DIALECTS
from serving.proto import shiftjax_pb2 as pb
from serving.proto import shiftjax_pb2_grpc as pb_grpc
from serving.server.kv_events import KvEvents
from serving.server.schema import read_completion

PATH = "/v1/completions"
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "tags": {"type": "array", "items": {"enum": ["x", "yy"]}, "maxItems": 3},
    },
    "required": ["name", "tags"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def model():
    return checkpoint(vocab_size=VOCAB_SIZE, eos_token_id=EOS)


@pytest.fixture(scope="module")
def server(model):
    # A pool that holds 1.2 of the longest requests; both modes of every size, compiled ahead.
    built = make(model[0], 2, 2, whole=True, max_num_seqs=8, num_blocks=39)
    (runner,) = built.runners
    for program in runner.programs:
        for mode in runner.step.weights.modes:
            runner.compiled(program, mode)
    built.engine.policy = RandomPolicy(3)
    with serving(built.engine) as running:
        yield running


def prompts(count: int) -> list[list[int]]:
    rng = random.Random(1)
    return [[rng.randrange(256) for _ in range(rng.randint(1, 60))] for _ in range(count)]


def body_of(prompt: list[int], **fields) -> dict:
    fixed = {"prompt": prompt, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    return fixed | {"max_tokens": 12} | fields


@pytest.mark.costs(15)
def test_greedy_tokens_are_those_of_the_oracle(model, client):
    _, config, tensors = model
    for prompt in prompts(3):  # L0
        (choice,) = client.post(PATH, json=body_of(prompt)).json()["choices"]
        assert choice["token_ids"] == numpy_llama.greedy(config, tensors, prompt, 12)


@pytest.mark.thorough
def test_a_mixed_load_gives_the_tokens_of_each_alone(server, client):
    """L1: 8 clients with 8 requests each over HTTP and gRPC, streams and not."""
    wanted = prompts(8)
    alone = [client.post(PATH, json=body_of(p, max_tokens=40)).json()["choices"] for p in wanted]
    before = sum(server.engine.stats.num_preemptions.values())

    def over_http(number: int, streams: bool) -> tuple[str, list[int]]:
        body = body_of(wanted[number], max_tokens=40, stream=streams)
        with server.client() as own:
            response = own.post(PATH, json=body)
        if not streams:
            (choice,) = response.json()["choices"]
            return choice["text"], choice["token_ids"]
        chunks = [each["choices"][0] for each in events(response.text)]
        ids = [token for chunk in chunks for token in chunk["token_ids"]]
        return "".join(chunk["text"] for chunk in chunks), ids

    def over_grpc(number: int, streams: bool) -> tuple[str, list[int]]:
        sampling = pb.Sampling(temperature=0, max_tokens=40, ignore_eos=True)
        request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=wanted[number]), sampling=sampling)
        stub = pb_grpc.InferenceStub(channel)
        if not streams:
            (one,) = stub.GenerateOnce(request).completions
            return one.text, list(one.token_ids)
        deltas = [event.delta for event in stub.Generate(request) if event.HasField("delta")]
        ids = [token for delta in deltas for token in delta.token_ids]
        return "".join(delta.text for delta in deltas), ids

    def one_client(number: int) -> list[tuple[str, list[int]]]:
        calls = [(over_http, False), (over_http, True), (over_grpc, False), (over_grpc, True)]
        return [call(number, streams) for call, streams in islice(cycle(calls), 8)]

    with (
        grpc.insecure_channel(server.server.grpc.address) as channel,
        ThreadPoolExecutor(8) as pool,
    ):
        answers = list(pool.map(one_client, range(8)))
    for number, given in enumerate(answers):
        assert {text for text, _ in given} == {alone[number][0]["text"]}
        assert all(ids == alone[number][0]["token_ids"] for _, ids in given)
    assert sum(server.engine.stats.num_preemptions.values()) > before
    assert server.service.model.num_compiles() == 0


@pytest.mark.thorough
def test_a_router_knows_what_is_left_after_a_mixed_load(server):
    kv_kit = pytest.importorskip("kv_kit", reason="KV events need pyzmq")
    sent = KvEvents(kv_kit.FREE, "kv@pod@model")
    engine, subscriber = server.engine, kv_kit.Subscriber(sent.address)
    core = engine._engine

    def one(prompt: list[int]) -> None:
        with server.client() as own:
            assert own.post(PATH, json=body_of(prompt, max_tokens=40)).status_code == 200

    async def listen() -> None:
        engine._tell_of_blocks(core, sent)

    server.on_loop(listen())
    try:
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(one, prompts(16)))
        server.assert_quiescent()
        subscriber.hear_until(lambda: subscriber.index == kv_kit.truth(core))
        assert len(subscriber.index) > 20
    finally:
        engine._thread.after_turn = lambda: None
        sent.close()
        subscriber.socket.close(0)


@pytest.mark.thorough
def test_a_pool_for_one_serves_many(server, client):
    """L4: all finish, nobody is preempted more often than the cap, and the tokens stay."""
    rng = random.Random(2)
    lengths = [(88, 40) if number % 4 == 0 else (rng.randint(4, 30), 60) for number in range(32)]
    bodies = [body_of([rng.randrange(256) for _ in range(n)], max_tokens=m) for n, m in lengths]

    def one(body: dict) -> list[dict]:
        with server.client() as own:
            return own.post(PATH, json=body).json()["choices"]

    alone = [one(body) for body in bodies]
    with ThreadPoolExecutor(32) as pool:
        assert list(pool.map(one, bodies)) == alone
    recent = server.service.timeline.snapshot(60)["requests"][-32:]
    counts = [row["preemptions"] for row in recent]
    assert sum(counts) > 0
    assert max(counts) <= server.engine._engine.lanes[0].scheduler.config.max_preemptions
    server.assert_quiescent()


@pytest.mark.thorough
def test_bursts_switch_modes_both_ways_and_compile_nothing(model):
    """On 8 devices: the prefills of a burst run in base, its decodes in shift."""
    built = make(model[0], 4, 2, whole=True, max_num_seqs=8, num_blocks=128, shift_threshold=8)
    with serving(built.engine) as server, server.client() as client:
        target = parse_url(server.url)

        async def burst(number: int) -> list[Sample]:
            some = prompts(16)[8 * number :][:8]
            return await asyncio.gather(*(complete(target, body_of(each)) for each in some))

        for number in range(2):
            samples = asyncio.run(burst(number))
            assert [sample.error for sample in samples] == [None] * 8
            server.assert_quiescent()
        values = metric_values(client)
    for before, after in (("base", "shift"), ("shift", "base")):
        labels = {"from": before, "to": after}
        assert metric_total(values, "shiftjax:mode_switches_total", **labels) >= 1
    assert metric_total(values, "shiftjax:recompiles_after_warmup_total") == 0


@pytest.mark.parametrize("asked", [{"prompt_logprobs": 3}, {"prompt_logprobs": 0, "logprobs": 2}])
def test_log_probabilities_of_a_prompt_are_nobody_elses_business(server, client, asked):
    """Steps inside a prompt bring those of the prompt alone, steps after it those of the output."""
    neighbour, prompt = body_of(prompts(8)[7], max_tokens=40), [7, 8, 9] * 20  # in two chunks
    alone = client.post(PATH, json=neighbour).json()["choices"]

    def one(number: int) -> list[dict]:
        body = neighbour if number % 2 else body_of(prompt, n=2, **asked)
        with server.client() as own:
            return own.post(PATH, json=body).json()["choices"]

    with ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(one, range(6)))
    assert answers[1::2] == [alone] * 3
    for choices in answers[::2]:
        first, *entries = choices[0]["prompt_logprobs"]
        assert first is None
        assert len(entries) == 59
        assert all(len(entry) >= max(asked["prompt_logprobs"], 1) for entry in entries)
        for choice in choices:
            assert len(choice["token_ids"]) == 12
            assert (choice["logprobs"] is not None) == ("logprobs" in asked)


@pytest.mark.thorough
def test_structure_combines_with_everything(server, client):
    """n, seeds, penalties, log-probabilities, the prefix cache, preemption and both modes."""
    wanted = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
    body = {
        "prompt": "an object:",
        "response_format": wanted,
        "n": 3,
        "seed": 11,
        "temperature": 1.3,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.2,
        "repetition_penalty": 1.1,
        "logit_bias": {"65": 2.0},
        "logprobs": 2,
        "max_tokens": 100,
    }
    alone = client.post(PATH, json=body).json()["choices"]
    for choice in alone:
        if choice["finish_reason"] == "stop":
            value = json.loads(choice["text"])
            assert set(value) == {"name", "tags"}
            assert len(value["name"]) <= 8
            assert set(value["tags"]) <= {"x", "yy"}
        assert all(value <= 0 for value in choice["logprobs"]["token_logprobs"])
    assert "stop" in {choice["finish_reason"] for choice in alone}
    assert len({choice["text"] for choice in alone}) == 3

    def again(number: int) -> list[dict]:
        with server.client() as own:
            if number % 2:
                own.post(PATH, json=body_of(prompts(8)[number], max_tokens=60))
            return own.post(PATH, json=body).json()["choices"]

    def words(choices: list[dict]) -> list[tuple[str, str]]:
        return [(choice["text"], choice["finish_reason"]) for choice in choices]

    with ThreadPoolExecutor(6) as pool:
        for choices in pool.map(again, range(6)):
            assert words(choices) == words(alone)


@pytest.mark.thorough
def test_arrivals_and_cancels_change_no_texts(server, client):
    """L2 with F1: those who stay get what they get alone, whoever leaves meanwhile."""
    bodies = [mixed_body(number, 60, 24) for number in range(20)]
    rng = random.Random(6)

    async def load(senders: Clients) -> list[bool]:
        alone = [(await senders.send_any(body, rng)).outcome for body in bodies]

        async def one(number: int) -> bool:
            leaves_after = rng.random() * 0.2 if number % 4 == 0 else None
            send = senders.send_any(bodies[number % 20], rng)
            try:
                answer = await asyncio.wait_for(send, leaves_after)
            except TimeoutError:
                return False
            assert answer.outcome == alone[number % 20]
            return True

        assert all(alone)  # it says how each continuation ended
        return await open_loop(one, [rng.random() * 2 for _ in range(80)])

    stayed = asyncio.run(with_clients(server, load))
    assert 60 <= sum(stayed) < 80
    assert server.engine.stats.num_failed_steps == 0


def test_a_dead_end_is_the_requests_fault(server, client):
    body = {"prompt": "x", "structured_outputs": {"regex": "a{200}"}, "max_tokens": 5}
    answer = client.post(PATH, json=body)
    assert answer.json()["choices"][0]["text"] == "aaaaa"
    assert answer.json()["choices"][0]["finish_reason"] == "length"


def test_prefixes_are_shared_but_not_across_salts(client):
    prompt = prompts(1)[0] * 4
    body = body_of(prompt[:60], max_tokens=1)

    def cached(**fields) -> int:
        usage = client.post(PATH, json=body | fields).json()["usage"]
        return usage["prompt_tokens_details"]["cached_tokens"]

    cached(cache_salt="a")
    assert cached(cache_salt="a") > 0
    assert cached(cache_salt="b") == 0


def test_priorities_go_first(server):
    async def run() -> list[str]:
        order: list[str] = []
        names = {f"low-{i}": 5 for i in range(24)} | {"high": -5}
        generations = [
            await server.service.start(
                read_completion, body_of([7, 8, 9], priority=priority, request_id=name)
            )
            for name, priority in names.items()
        ]

        async def wait(generation) -> None:
            with generation:
                await generation.handles[0].result()
                order.append(generation.id)

        await asyncio.gather(*map(wait, generations))
        return order

    order = server.on_loop(run())
    assert order.index("high") < 16  # eight run at a time; it came last
    server.assert_quiescent()


# ---------------------------------------------------------------- every API that generates

CHAT_PROMPT = "user: hi\nassistant:"
HI = [{"role": "user", "content": "hi"}]
FIXED = {"seed": 5, "ignore_eos": True}
NUM_TOKENS = 24
COMPLETION = {"prompt": CHAT_PROMPT, "max_tokens": NUM_TOKENS}
BODIES = {
    "/v1/completions": COMPLETION,
    "/v1/chat/completions": {"messages": HI, "max_tokens": NUM_TOKENS},
    "/v1/messages": {"messages": HI, "max_tokens": NUM_TOKENS},
    "/v1/responses": {"input": "hi", "max_output_tokens": NUM_TOKENS},
    "/inference/v1/generate": {"token_ids": byte_tokenizer().encode(CHAT_PROMPT, False)},
}


def body_for(path: str, fixed: dict) -> dict:
    """The body for an API, with sampling that is the same in all."""
    if "token_ids" not in BODIES[path]:
        return BODIES[path] | fixed
    return BODIES[path] | {"sampling_params": fixed | {"max_tokens": NUM_TOKENS}}


def tokens_and_text(server, path: str, body: dict) -> tuple[list[int], str]:
    """What the engine gives for a body."""

    async def generate():
        with await server.service.start(DIALECTS[path].read, body) as generation:
            (output,) = (await generation.handles[0].result()).outputs
            return output.token_ids, output.text

    return server.on_loop(asyncio.wait_for(generate(), 60))


def text_of(answer: dict) -> str:
    """The text of a response of any API."""
    if "choices" in answer:
        (choice,) = answer["choices"]
        if choice["token_ids"] is not None:
            return byte_tokenizer().decode(choice["token_ids"])
        return choice["text"] if "text" in choice else choice["message"]["content"]
    items = answer.get("output") or [answer]
    return "".join(part["text"] for item in items for part in item["content"])


@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize("path", DIALECTS)
def test_tokens_and_text_are_those_of_a_completion(server, client, path, temperature):
    fixed = FIXED | {"temperature": temperature}
    wanted = tokens_and_text(server, "/v1/completions", COMPLETION | fixed)
    assert len(wanted[0]) == NUM_TOKENS
    body = body_for(path, fixed)
    assert tokens_and_text(server, path, body) == wanted
    answer = client.post(path, json=body)
    assert text_of(answer.json()) == wanted[1]

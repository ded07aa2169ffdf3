"""The worker for Dynamo, by the protocol of the package, where that is installed."""

import asyncio
import importlib.util
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip(
    "dynamo.common.backend",
    reason="needs pip install --no-deps ai-dynamo ai-dynamo-runtime",
    exc_type=ImportError,
)
pytest.importorskip("zmq", reason="KV events need pyzmq: pip install 'shiftjax[events]'")
from dynamo._core import Context  # pyright: ignore[reportMissingImports]
from dynamo.llm.exceptions import InvalidArgument  # pyright: ignore[reportMissingImports]

from serving.server.handle import Delta
from shiftjax.core.request import SamplingParams, TokenLogprobs
from shiftjax.options import ConfigError

DEPLOY = Path(__file__).parents[2] / "deploy" / "dynamo_engine.py"
spec = importlib.util.spec_from_file_location("dynamo_engine", DEPLOY)
assert spec is not None and spec.loader is not None
worker = importlib.util.module_from_spec(spec)
spec.loader.exec_module(worker)

SIMULATED = ["llama-70b", "--quantization", "fp8", "--simulate", "h200x8", "--sp", "4", "--tp", "2"]
FREE = ["--kv-events", "zmq", "--kv-events-endpoint", "tcp://127.0.0.1:*"]


@asynccontextmanager
async def started(*argv: str):
    engine, config = await worker.ShiftEngine.from_args([*SIMULATED, *argv])
    registration = await engine.start(7)
    try:
        yield engine, config, registration
    finally:
        await engine.cleanup()
        await engine.cleanup()  # must be safe


async def chunks_of(engine, request: dict, context: Context | None = None) -> list[dict]:
    return [chunk async for chunk in engine.generate(request, context or Context())]


def test_tokens_go_in_and_come_out():
    async def run() -> None:
        async with started("--namespace", "here", "--served-model-name", "big") as opened:
            engine, config, registration = opened
            assert (config.namespace, config.component) == ("here", "backend")
            assert (config.served_model_name, registration.served_model_name) == ("big", "big")
            llm = registration.llm
            assert llm.kv_cache_block_size == 16 and llm.total_kv_blocks > 1000
            assert not config.enable_kv_routing and await engine.kv_event_sources() == []
            request = {
                "token_ids": list(range(40)),
                "stop_conditions": {"max_tokens": 5, "ignore_eos": True},
                "sampling_options": {"temperature": 0.5, "n": 2, "seed": 3, "top_k": None},
            }
            chunks = await chunks_of(engine, request)
            for index in range(2):
                mine = [chunk for chunk in chunks if chunk["index"] == index]
                assert sum(len(chunk["token_ids"]) for chunk in mine) == 5
                assert [chunk.get("finish_reason") for chunk in mine[:-1]] == [None] * (
                    len(mine) - 1
                )
                assert mine[-1]["finish_reason"] == "length"
            assert chunks[-1]["completion_usage"]["total_tokens"] == 40 + 10
            usage = (await chunks_of(engine, request))[-1]["completion_usage"]
            assert usage["prompt_tokens_details"] == {"cached_tokens": 32}
            packed = {**request, "token_ids": b"\x01\0\0\0\x02\0\0\0"}
            usage = (await chunks_of(engine, packed))[-1]["completion_usage"]
            assert usage["prompt_tokens"] == 2
            probe = await engine.health_check_payload()
            assert len((await chunks_of(engine, probe))[-1]["token_ids"]) == 1

    asyncio.run(run())


def test_every_wish_is_heard():
    wish = {
        "token_ids": [1, 2, 3],
        "sampling_options": {"temperature": 0.5, "top_p": 0.9, "top_k": 7, "seed": 3, "n": None},
        "stop_conditions": {
            **{"max_tokens": 9, "min_tokens": 2, "ignore_eos": True, "stop": ["the frontend's"]},
            **{"stop_token_ids": [5], "stop_token_ids_hidden": [6]},
        },
        "output_options": {"logprobs": 2},
    }
    request = worker.request_of(wish, "name")
    assert (request.request_id, request.prompt_token_ids) == ("name", [1, 2, 3])
    ends = {"max_tokens": 9, "min_tokens": 2, "ignore_eos": True, "stop_token_ids": (5, 6)}
    assert request.sampling == SamplingParams(
        temperature=0.5, top_p=0.9, top_k=7, seed=3, logprobs=2, **ends
    )
    plain = worker.request_of({"token_ids": [1]}, "plain").sampling
    assert plain == SamplingParams(max_tokens=None)  # as many as there is room for


def test_logprobs_come_with_their_tokens():
    handle = SimpleNamespace(request=SimpleNamespace(prompt_token_ids=[1]), num_output_tokens=1)
    logprobs = [TokenLogprobs(4, -0.5, [4, 9], [-0.5, -1.5])]
    chunk = worker.chunk_of(Delta(1, token_ids=[4], logprobs=logprobs), handle)
    assert (chunk["index"], chunk["token_ids"], chunk["log_probs"]) == (1, [4], [-0.5])
    ((first, second),) = chunk["top_logprobs"]
    assert first == {"rank": 1, "token_id": 4, "token": None, "logprob": -0.5}
    assert (second["rank"], second["token_id"], second["logprob"]) == (2, 9, -1.5)


def test_what_cannot_be_done_is_refused():
    async def run() -> None:
        async with started() as (engine, _, _):
            for wrong, words in (
                ({"prefill_result": {}}, "prefill_result"),
                ({"sampling_options": {"guided_decoding": {"json": {}}}}, "guided_decoding"),
                ({"sampling_options": {"temperature": -1}}, "temperature"),
                ({"output_options": {"prompt_logprobs": 1}}, "prompt_logprobs"),
                ({"token_ids": [10**6]}, "token"),
            ):
                with pytest.raises(InvalidArgument, match=words):
                    await chunks_of(engine, {"token_ids": [1, 2]} | wrong)

    asyncio.run(run())


def test_an_abort_ends_a_request():
    async def run() -> None:
        async with started() as (engine, _, _):
            context = Context()
            endless = {"token_ids": [1, 2], "stop_conditions": {"ignore_eos": True}}
            reasons, num_tokens = [], 0
            async for chunk in engine.generate(endless, context):
                num_tokens += len(chunk["token_ids"])
                reasons.append(chunk.get("finish_reason"))
                if num_tokens == 3:
                    await engine.abort(context)
            assert reasons[-1] == "cancelled" and set(reasons[:-1]) == {None}
            left = engine.generate(endless, Context())
            await anext(left)
            await left.aclose()  # whoever reads no more
            assert not engine._engine.handles
            await engine.abort(Context())  # which nobody knows

    asyncio.run(run())


def test_the_router_hears_of_blocks():
    import zmq

    async def run() -> None:
        async with started(*FREE, "--kv-events-topic", "kv@here") as (engine, config, _):
            (source,) = await engine.kv_event_sources()
            assert config.enable_kv_routing and (source.topic, source.dp_rank) == ("kv@here", 0)
            with zmq.Context.instance().socket(zmq.SUB) as socket:
                socket.subscribe(source.topic)
                socket.connect(source.endpoint)
                await chunks_of(
                    engine, {"token_ids": [5] * 40, "stop_conditions": {"max_tokens": 1}}
                )
                heard = b""
                while b"BlockStored" not in heard:
                    assert await asyncio.to_thread(socket.poll, 20_000)
                    heard = socket.recv_multipart()[-1]

    asyncio.run(run())


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--port", "1"], "port has no meaning for a worker of Dynamo"),
        ([*FREE, "--dp", "2"], "use a worker for each replica"),
        (["--no-such-flag"], "no-such-flag"),
        ([*FREE, "--no-enable-prefix-caching"], "nothing to tell"),
    ],
)
def test_settings_of_no_use_are_refused(argv, words):
    with pytest.raises(ConfigError, match=words):
        asyncio.run(worker.ShiftEngine.from_args([*SIMULATED, *argv]))

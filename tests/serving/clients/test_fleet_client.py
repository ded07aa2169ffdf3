"""A fleet as its users see it: requests, `LLM.fleet()`, metrics, the administrator, the page."""

import json
import logging
import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
from engines import checkpoint
from kit import (
    COMPLETION,
    EOS,
    VOCAB_SIZE,
    byte_tokenizer,
    is_error,
    metric_total,
    metric_values,
    running_server,
)
from oracle import numpy_llama

from serving.cli.check import make_plan
from serving.proto import shiftjax_pb2 as pb
from serving.proto import shiftjax_pb2_grpc as pb_grpc
from shiftjax import LLM, SamplingParams
from shiftjax.config import EngineConfig
from shiftjax.fleet.regrouping import Fleet
from shiftjax.fleet.state import REASONS, FleetState
from shiftjax.model_files import open_files

pytestmark = pytest.mark.thorough

UNITS = 4
DASHBOARD = Path(__file__).parents[3] / "deploy" / "grafana" / "shiftjax.json"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
SETTINGS = {
    "fleet": True,
    "devices": UNITS,
    "fleet_widths": (1, 4),
    "fleet_policy": "load",
    "bind_at": 0.5,
    "release_at": 1.5,
    "dtype": "float32",
    "max_model_len": 128,
    "block_size": 4,
    "num_blocks": 64,
    "max_num_seqs": 6,
    "max_num_batched_tokens": 32,
    "token_buckets": [32],
    "cache_dir": "none",
}
TOKEN = (("authorization", "Bearer admin-token"),)


@pytest.fixture(scope="module")
def model():
    return checkpoint(vocab_size=VOCAB_SIZE, eos_token_id=EOS)


@pytest.fixture(scope="module")
def started() -> list[str]:
    """Lines of the log of the start."""
    return []


@pytest.fixture(scope="module")
def llm(model, started):
    with pytest.MonkeyPatch.context() as patch:
        log = logging.getLogger("shiftjax.device.backend")
        patch.setattr(log, "info", lambda text, *values: started.append(text % values))
        llm = LLM(str(model[0]), **SETTINGS)
    yield llm
    llm.close()


@pytest.fixture(scope="module")
def server(llm, tmp_path_factory):
    """Quiet, so one group; the only one over this engine, which drains with its server."""
    tokens = tmp_path_factory.mktemp("admin") / "token"
    tokens.write_text("admin-token\n")
    options = {"admin_port": 0, "admin_token_file": str(tokens)}
    with running_server(llm.engine, tokenizer=byte_tokenizer(), **options) as running:
        yield running
        running.assert_quiescent()


def body_of(number: int, **fields) -> dict:
    fixed = {"prompt": [5 + number, 6, 7], "temperature": 0, "ignore_eos": True}
    return fixed | {"max_tokens": 40, "return_token_ids": True} | fields


def busy_then_quiet(server) -> None:
    """Many requests beside one that runs, for which units part; they end, and it runs on."""

    def one(number: int, **fields) -> None:
        with server.client() as own:
            body = body_of(number, **fields)
            assert own.post(COMPLETION, json=body).status_code == 200

    with ThreadPoolExecutor(13) as pool:
        long = pool.submit(one, 12, max_tokens=120, request_id="long")
        server.wait_until(lambda: server.has_tokens("long"))
        list(pool.map(one, range(12)))
        long.result()
    server.assert_quiescent()


def test_tokens_are_those_of_the_oracle_and_the_changes_are_told(model, llm):
    _, config, tensors = model
    prompts = [[5 + number, 6, 7] for number in range(12)]
    assert llm.fleet()["arrangement"] == "4"
    before = llm.num_compiles
    lengths = [40, *[12] * 11]  # the first runs on when the others have ended
    sampling = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in lengths]
    outputs = llm.generate(prompts, sampling)
    for prompt, length, output in zip(prompts, lengths, outputs, strict=True):
        tokens = output.outputs[0].token_ids
        assert tokens == numpy_llama.greedy(config, tensors, prompt, length)
    found = llm.fleet()
    assert found["arrangement"] == "4" and found["widths"] == [1, 4]
    (group,) = found["groups"]
    assert (group["first"], group["width"], group["state"]) == (0, 4, "open")
    first, last = found["changes"][0], found["changes"][-1]
    assert (first["what"], first["from"], first["to"]) == ("release", "4", "1+1+1+1")
    assert (first["reason"], first["why"]) == ("load", REASONS["load"])
    assert (last["what"], last["reason"], last["kind"]) == ("bind", "quiet", "move")
    assert 0 < last["seconds_ago"] < first["seconds_ago"] < 600
    counters = llm.stats()["fleet"]
    assert counters["releases"] == {4: 1}
    assert {"width": 4, "kind": "move", "reason": "quiet", "count": 1} in counters["binds"]
    assert counters["num_moved_sequences"] == sum(c["num_sequences"] for c in found["changes"]) > 0
    # Blocks of a unit, 4 tokens, of keys and values, layers, 4 heads with padding, in float32.
    block_bytes = 4 * 2 * config["num_hidden_layers"] * 4 * config["head_dim"] * 4
    moved, blocks = counters["kv_moved_bytes"], llm.engine.topology.find(Fleet).stats.moved_blocks
    assert moved == {way: block_bytes * count for way, count in blocks.items()}
    assert moved["bind"] >= 4 * block_bytes  # 13 tokens and more
    assert llm.num_compiles == before


def test_the_start_says_what_is_compiled_and_check_foretells_it(llm, model, started):
    started = [line for line in started if line.startswith("fleet: ")]
    assert [line.split(":")[1].split("(")[0].strip() for line in started] == [
        *("4 x 1 units", "1 x 4 units")
    ]
    counts = [
        sum(len(program.steps) for program in runner.programs)
        for width in (1, 4)
        for runner in [llm.engine.topology.find(Fleet).lanes[0, width].runner]
    ]
    for line, count in zip(started, counts, strict=True):
        assert f": {count} programs for 1 sizes of steps" in line
    assert "sp 4, tp 1; sp 1, tp 4" in started[-1]
    config = EngineConfig.from_options(model=str(model[0]), **SETTINGS)
    planned = make_plan(config, open_files(config))
    for width, line in zip((1, 4), started, strict=True):
        assert planned[f"groups of {width}"].startswith(line.removeprefix("fleet: "))


def test_a_request_names_the_least_width_that_it_wants(server):
    with server.client() as client:
        for width in (0, -1, 1025, 2**40):
            is_error(client.post(COMPLETION, json=body_of(1, min_width=width)), 400, "min_width")
        answer = client.post(COMPLETION, json=body_of(1, min_width=8))
        is_error(answer, 400, "min_width")
        assert "the widest group has 4 units" in answer.text
        for width in (1, 2, 3, 4):
            answer = client.post(COMPLETION, json=body_of(1, min_width=width))
            assert answer.status_code == 200
    with grpc.insecure_channel(server.server.grpc.address) as channel:
        stub = pb_grpc.InferenceStub(channel)
        ids = pb.TokenIds(ids=[6, 6, 7])
        sampling = pb.Sampling(temperature=0, max_tokens=40, ignore_eos=True)
        wanted = pb.GenerateRequest(token_ids=ids, sampling=sampling, min_width=4)
        result = stub.GenerateOnce(wanted)
        (choice,) = answer.json()["choices"]
        assert list(result.completions[0].token_ids) == choice["token_ids"]
        with pytest.raises(grpc.RpcError) as caught:
            stub.GenerateOnce(pb.GenerateRequest(text="x", min_width=8))
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_a_group_is_bound_for_a_request_that_wants_it_wide(server):
    """Although there is so much to do that units are apart."""

    def one(number: int, **fields) -> int:
        with server.client() as own:
            return own.post(COMPLETION, json=body_of(number, **fields)).status_code

    before = server.engine.stats.find(FleetState).stats
    with ThreadPoolExecutor(12) as pool:
        others = [pool.submit(one, number, max_tokens=110) for number in range(12)]
        server.wait_until(lambda: len(server.engine.stats.find(FleetState).arrangement) == UNITS)
        assert one(12, min_width=2) == 200
        assert {other.result() for other in others} == {200}
    server.assert_quiescent()
    binds = server.engine.stats.find(FleetState).stats.binds - before.binds
    assert binds[4, "move", "need"] == 1


def test_the_dashboard_names_what_a_fleet_tells(server):
    panels = json.loads(DASHBOARD.read_text())["panels"]
    text = json.dumps([panel for panel in panels if panel["title"].startswith("Fleet")])
    used = set(re.findall(r"\$prefix:([a-z0-9_]+)", text))
    busy_then_quiet(server)
    with server.client() as client:
        known = set(re.findall(r"^# TYPE shiftjax:(\S+)", client.get("/metrics").text, re.M))
    assert len(used) == 5 and used <= known, used - known


def test_metrics_tell_of_groups_and_their_changes(server):
    stats = server.engine.stats
    before = stats.find(FleetState).stats
    with server.client() as client:
        old = metric_values(client)
        busy_then_quiet(server)
        values = metric_values(client)

    def total(name: str, **labels: str) -> float:
        return metric_total(values, f"shiftjax:{name}", **labels)

    def gained(name: str, **labels: str) -> float:
        return total(name, **labels) - metric_total(old, f"shiftjax:{name}", **labels)

    stats = server.engine.stats
    fleet = stats.find(FleetState).stats
    assert fleet.num_changes >= before.num_changes + 2
    assert [total("fleet_groups", width=width) for width in ("1", "4")] == [0, 1]
    assert total("fleet_releases_total", width="4") == fleet.releases[4] > before.releases[4]
    binds = total("fleet_binds_total", width="4", kind="move", reason="quiet")
    assert binds == fleet.binds[4, "move", "quiet"] > before.binds[4, "move", "quiet"]
    assert total("binds_failed_total") == 0
    for way in ("bind", "release"):
        assert total("kv_moved_bytes_total", direction=way) == fleet.moved_bytes[way]
    assert fleet.moved_bytes["release"] > before.moved_bytes["release"]
    assert total("kv_compacted_blocks_total") == fleet.num_compacted_blocks
    assert gained("move_seconds_count") == fleet.num_changes - before.num_changes
    assert total("sequences_paused") == total("paused_seconds_total") == 0
    assert gained("queue_seconds_count", priority="0") == 13
    steps = [gained("steps_total", width=width, mode="shift") for width in ("1", "4")]
    assert min(steps) > 0
    by_mode = stats.steps_by_mode
    assert {mode: total("steps_total", mode=mode) for mode in by_mode} == by_mode


def test_labels_of_priorities_are_few(server):
    with server.client() as client:
        for priority in (-1, -(2**20), 2**20, 2**21):
            client.post(COMPLETION, json=body_of(1, priority=priority, max_tokens=2))
        server.assert_quiescent()
        values = metric_values(client)
    name = "shiftjax:queue_seconds_count"
    labels = {dict(found)["priority"]: v for (key, found), v in values.items() if key == name}
    labels.pop("0", None)
    assert labels == {"-1": 1, "below -9": 1, "above 9": 2}


def test_the_administrator_sees_the_groups(server):
    busy_then_quiet(server)
    with grpc.insecure_channel(server.server.admin.address) as channel:
        found = pb_grpc.AdminStub(channel).GetServer(pb.GetServerRequest(), metadata=TOKEN).fleet
    state = server.engine.stats.find(FleetState)
    assert found.arrangement == "4" and list(found.widths) == [1, 4]
    assert len(found.changes) == len(state.changes) >= 2
    assert (found.changes[-1].what, found.changes[-1].reason) == ("bind", "quiet")
    assert found.releases[4] == state.stats.releases[4]
    assert found.kv_moved_bytes["release"] == state.stats.moved_bytes["release"] > 0


def test_the_data_of_the_page_has_a_strip(server):
    busy_then_quiet(server)
    with server.client() as client:
        data = client.get("/ui/data").json()
    assert data["model"]["choice"]["groups"] is None
    assert data["fleet"]["units"] == UNITS and data["fleet"]["arrangement"] == "4"
    change = data["fleet"]["changes"][-1]
    assert (change["what"], change["first"], change["width"]) == ("bind", 0, 4)
    assert data["now"] - 60 < change["at"] <= data["now"]
    entries = data["strip"]["entries"]
    assert entries
    for entry in entries:
        assert sum(width for _, width, _, _ in entry["groups"]) == UNITS
    assert max(load for entry in entries for *_, load in entry["groups"]) > 0
    assert [entry["at"] for entry in entries] == sorted({each["at"] for each in entries})


@pytest.mark.skipif(CHROMIUM is None, reason="needs Debian's package chromium")
def test_the_page_says_what_the_machine_just_did(server):
    api = pytest.importorskip("playwright.sync_api", reason="needs: pip install playwright")
    busy_then_quiet(server)
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page()
        problems: list[str] = []
        page.on("console", lambda m: problems.append(m.text) if m.type == "error" else None)
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.goto(f"{server.url}/ui")
        page.wait_for_selector("#strip[data-entries]")
        assert page.inner_text("#arrangement") == "4"
        assert page.locator("#widths i").all_text_contents() == ["1 unit", "4 units"]
        last = page.inner_text("#why")
        assert "units 0 to 3 were bound into a group" in last and REASONS["quiet"] in last
        page.focus("#strip")
        page.keyboard.press("ArrowLeft")
        assert "were released" in page.inner_text("#why")
        page.keyboard.press("ArrowRight")
        assert "were bound" in page.inner_text("#why")
        changes = page.locator("#changes li").all_text_contents()
        assert len(changes) == min(8, len(server.engine.stats.find(FleetState).changes))
        assert REASONS["quiet"] in changes[0]
        legend = page.inner_text("#strip-legend")
        assert legend.startswith("A row is a unit, unit 0 on top") and "sequence" in legend
        colours = page.evaluate(
            "() => { const c = document.getElementById('strip');"
            " const d = c.getContext('2d').getImageData(0, 0, c.width, c.height).data;"
            " return new Set(new Uint32Array(d.buffer)).size; }"
        )
        assert colours > 4  # ground, tints and loads of two widths, text
        assert problems == []
        page.goto("about:blank")
        browser.close()

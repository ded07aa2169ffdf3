"""`shiftjax check`: the plan, or what is wrong with it, without loading anything."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from engines import checkpoint
from harness import held_bytes
from kit import run_command
from oracle import numpy_speculator, quantised_files

from serving.cli.check import _sum_rows, make_plan
from serving.cli.main import make_parser
from serving.run.flags import parse_args, settle
from serving.run.start import open_model
from serving.server.start_phases import Phases
from shiftjax import Embedder
from shiftjax.arch.presets import PRESETS
from shiftjax.build import build
from shiftjax.config import EngineConfig
from shiftjax.deploy.deployment import Devices
from shiftjax.deploy.resolve import resolve
from shiftjax.model_files import open_files
from shiftjax.options import ConfigError
from shiftjax.sim.experiments import target_from
from shiftjax.sim.modelled import memory_of
from shiftjax.sim.named import deploy
from shiftjax.weights.locate import open_source, resolve_model


@pytest.mark.costs(10)
def test_check_prints_the_plan(capsys):
    flags = ("--model", "random:smollm2-135m", "--sp", "4", "--tp", "2", "--max-model-len", "512")
    flags += ("--dtype", "bfloat16")  # or what a probe of this CPU prefers
    code, out, problems = run_command(capsys, "check", *flags)
    rows = {line[:20].strip(): line[20:].strip() for line in out.splitlines()}
    assert code == 0, problems
    assert rows["base mode"] == "sp 4, tp 2"
    assert rows["shift mode"] == "sp 1, tp 8"
    assert rows["query / KV heads"] == "9 / 3, padded to 16 / 4"
    assert rows["longest sequence"] == "512 tokens"
    assert rows["weights"] == "145.2 MiB"  # what loading puts on a device: 152.2 MB


COPIES = {"shift_weights": "replicate"}


@pytest.mark.parametrize(("controls", "engine"), [({}, "shiftjax"), (COPIES, "vllm")])
@pytest.mark.parametrize(("sp", "tp"), [(8, 1), (4, 2), (2, 4), (1, 8)])
def test_check_and_plan_agree_on_the_weights(sp, tp, controls, engine):
    options = {"max_model_len": 512, "num_blocks": 64, "dtype": "bfloat16", "controls": controls}
    config = EngineConfig.from_options(model="random:llama-70b", sp=sp, tp=tp, **options)
    target = target_from({"model": "llama-70b", "machine": "h200x8", "engine": engine})
    planned = memory_of(target, deploy(target, f"sp={sp},tp={tp},policy=threshold"))
    held = planned.weight_bytes + planned.shift_weight_bytes
    assert make_plan(config, open_files(config))["weights"] == f"{held / 2**20:,.1f} MiB"


@pytest.mark.thorough
@pytest.mark.parametrize("controls", [{}, COPIES])
def test_check_says_what_the_engine_then_has(controls):
    options = {"controls": controls, "num_blocks": 40, "max_model_len": 64, "cache_dir": "none"}
    model = {"model": "random:tiny", "sp": 2, "tp": 2, "token_buckets": [8, 64]}
    config = EngineConfig.from_options(
        **model, **options, max_num_seqs=4, max_num_batched_tokens=64
    )
    built = build(config, open_source(resolve_model("random:tiny"), seed=0), lambda *_: None)
    (runner,) = built.runners
    arrays = [x for mode in built.deployment.layout.modes for x in runner.memory.params(mode)]
    (held,) = set(held_bytes(arrays).values())
    assert held == sum(built.deployment.memory(Devices(4, 0, 0))[:2])
    rows = make_plan(config, open_files(config))
    assert rows["weights"] == f"{held / 2**20:,.1f} MiB"
    assert rows["KV blocks"].startswith("about 40, ")
    assert runner.pool.num_blocks == 40
    pools = sum(x.nbytes for pair in runner.memory.pools for x in pair) // 4
    assert rows["KV blocks"].endswith(f" {pools / 2**20:,.1f} MiB")


@pytest.mark.parametrize("dtype", ["auto", "bfloat16"])
def test_check_says_what_an_embedder_then_has(capsys, dtype):
    options = {"dtype": dtype, "max_num_batched_tokens": 256, "max_num_seqs": 24}
    config = {"model": "random:tiny-bert", "devices": 3, "cache_dir": "none"} | options
    parsed = EngineConfig.from_options(**config)
    rows = make_plan(parsed, open_files(parsed))
    embedder = Embedder(**config)
    (held,) = set(held_bytes(list(embedder.runner._leaves)).values())
    assert rows["weights"] == f"{held / 2**20:,.1f} MiB, whole on every device"
    assert rows["computed in"] == str(embedder.dtype)
    assert rows["devices"].startswith(f"{embedder.num_devices} x ")
    assert rows["rows of a device"] == "up to 4 of 64 tokens in a step"
    assert rows["texts of a device"] == "up to 24 in a step"
    assert (embedder.runner.shape.rows, embedder.runner.shape.max_texts) == (((3, 6, 12),), 72)
    assert not {"base mode", "KV blocks"} & rows.keys()


def test_check_of_an_encoder_refuses_what_an_embedder_refuses(capsys):
    flags = ("random:tiny-bert", "--block-size=32", "--devices=99")
    code, _, lines = run_command(capsys, "check", *flags)
    assert (code, len(lines)) == (2, 2)
    assert "block_size = 32 has no meaning for tiny-bert, which embeds texts" in lines[0]


@pytest.mark.parametrize("command", [("plan",), ("mesh", "simulate", "--trace=poisson")])
def test_there_is_nothing_to_plan_of_an_encoder(capsys, command):
    code, out, lines = run_command(capsys, *command, "minilm-l6")
    assert (code, out, len(lines)) == (2, "", 1)
    assert "minilm-l6 is an encoder, which every device holds whole" in lines[0]


def test_check_counts_the_codes_of_a_checkpoint(tmp_path):
    _, stored, _ = quantised_files.write(tmp_path, "fp8-channel")
    options = {"model": str(tmp_path), "tp": 1, "sp": 1, "dtype": "bfloat16", "max_model_len": 64}
    codes, plain = (
        make_plan(config, open_files(config))
        for config in (
            EngineConfig.from_options(**options, quantization=each) for each in ("auto", "none")
        )
    )
    numbers = sum(x.size for name, x in stored.items() if not name.endswith("_scale"))
    coded = sum(x.size for x in stored.values() if x.itemsize == 1)
    scales = sum(x.size for name, x in stored.items() if name.endswith("_scale"))
    assert plain["computed in"] == "bfloat16"
    assert codes["computed in"] == "bfloat16, matrices in fp8"
    assert plain["weights"] == f"{2 * numbers / 2**20:,.1f} MiB"
    assert codes["weights"] == f"{(2 * numbers - coded + 4 * scales) / 2**20:,.1f} MiB"


def test_check_says_what_is_wrong_with_a_quantised_checkpoint(tmp_path, capsys):
    def edit(_, stored):
        stored["model.layers.0.mlp.up_proj.weight_scale"][3] = float("nan")

    quantised_files.write(tmp_path, "fp8-channel", edit=edit)
    code, _, [line] = run_command(capsys, "check", "--model", str(tmp_path))
    assert code == 3 and "up_proj.weight_scale: expected scales above 0, found 1 of 96" in line


def test_check_refuses_what_the_model_cannot_do(capsys):
    flags = ("--model", "random:smollm2-135m", "--tp", "10", "--max-model-len", "10000")
    code, _, lines = run_command(capsys, "check", *flags)
    assert (code, len(lines)) == (2, 3)  # positions, devices of this test run, heads


@pytest.mark.parametrize(
    "command",
    [["check", "--model", "random:tiny"], ["generate", "--model", "random:tiny", "x"], ["doctor"]],
    ids=lambda command: command[0],
)
def test_several_hosts_are_for_serve_alone(command, capsys):
    hosts = ("--hosts=2", "--coordinator=127.0.0.1:5", "--host-secret-file=x", "--cache-dir=none")
    code, out, [line] = run_command(capsys, *command, *hosts, "--sp", "2", "--tp", "1")
    assert (code, out) == (2, "")
    assert "hosts = 2 can be had with shiftjax serve alone" in line


@pytest.fixture
def places(tmp_path: Path) -> Path:
    """A file, and folders that a cache of programs cannot be in."""
    (tmp_path / "file").write_text("x")
    (tmp_path / "open").mkdir(mode=0o777)
    (tmp_path / "open").chmod(0o777)
    (tmp_path / "empty").write_text("\n")
    return tmp_path


@pytest.mark.parametrize(
    ("flag", "words"),
    [
        ("--cache-dir={}/file", "file cannot be made: File exists"),
        ("--cache-dir={}/file/below", "below cannot be made: Not a directory"),
        ("--cache-dir={}/open", "open can be written by others; chmod 700 it"),
        ("--attention=pallas", "attention = pallas: cpu cannot run the attention kernels"),
        ("--policy=cost --machine=nosuch", "nosuch"),
    ],
)
def test_check_refuses_what_a_start_refuses(capsys, places, flag, words):
    """In its very words."""
    argv = ["serve", "random:tiny", *flag.format(places).split()]
    arguments = parse_args(make_parser(), argv)
    config, _ = settle(arguments)
    with pytest.raises(ConfigError) as error:
        open_model(config, arguments.server, Phases())
    code, out, lines = run_command(capsys, "check", *argv[1:])
    assert (code, out) == (2, "")
    assert lines == [f"shiftjax: {problem}" for problem in error.value.problems]
    assert words in lines[0]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--api-key-file={}/absent",), "api_key_file: "),
        (("--api-key-file={}/empty",), "empty is empty"),
        (("--control-key-file={}/absent",), "control_key_file: "),
        (("--admin-port=0", "--admin-token-file={}/absent"), "admin_token_file: "),
        (("--ssl-certfile={0}/file", "--ssl-keyfile={0}/file"), "ssl_certfile, ssl_keyfile"),
        (("--host=192.0.2.1",), "cannot listen on 192.0.2.1"),
    ],
)
def test_check_refuses_what_a_server_cannot_listen_with(capsys, places, flags, words):
    given = [flag.format(places) for flag in flags]
    code, out, lines = run_command(capsys, "check", "random:tiny", *given)
    assert (code, out, len(lines)) == (2, "", 1)
    assert words in lines[0]


def test_check_tells_of_the_attention_and_of_devices_without_cores(capsys, caplog, monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr("os.getloadavg", lambda: (1.2, 0, 0))
    code, out, _ = run_command(capsys, "check", "random:tiny", "--sp=2", "--tp=1")
    assert code == 0
    assert "xla (the kernels are for GPUs, not for cpu)" in " ".join(out.split())
    assert "2 virtual devices share 2 cores, 1 of them idle" in caplog.text


def test_check_prints_the_groups_of_a_fleet(capsys, tmp_path):
    """From a file, as a server's settings are."""
    path = tmp_path / "fleet.yaml"
    # Sizes of steps and dtype are named: left out, they are what suits this CPU.
    named = {"dtype": "bfloat16", "token_buckets": [16, 256, 2048], "num_blocks": 101}
    fleet = {"model": "random:smollm2-135m", "fleet": True, "devices": 8, "fleet_widths": [1, 4]}
    path.write_text(json.dumps(fleet | named))
    flags = ("--config", str(path), "--max-model-len", "512")
    code, out, problems = run_command(capsys, "check", *flags)
    assert code == 0, problems
    text = " ".join(line.strip() for line in out.splitlines())
    assert "units of a fleet 8 of tp 1" in " ".join(text.split())
    config = EngineConfig.from_options(**fleet, **named)
    rows = make_plan(config, open_files(config))
    assert rows["groups at the start"] == "4+4"  # of the cost policy: as wide as it can be
    assert rows["groups of 1"].endswith("KV blocks of 16 tokens, about 1,600 in a group")
    assert rows["groups of 4"].startswith("2 x 4 units (sp 4, tp 1; sp 1, tp 4): 3 programs")
    assert rows["groups of 4"].endswith("KV blocks of 64 tokens, about 6,400 in a group")
    padding = "9 query heads to 12 (+33%), 3 KV heads to 4 (+33%), weights (+7%)"
    assert rows["padding"] == f"{padding} beside a unit alone"
    assert not {"base mode", "groups (dp)"} & rows.keys()


@pytest.mark.parametrize(
    ("flags", "fragment"),
    [
        (["--fleet", "--devices=1"], "one unit of tp = 1, and a fleet has several"),
        (["--fleet", "--devices=7"], "7 units in groups of 1 alone"),
        (["--fleet", "--devices=8", "--dp=2"], "dp = 2 has no meaning with fleet"),
        (["--fleet", "--devices=8", "--fleet-policy=fixed:4+3+1"], "no groups of 3 units"),
        (["--fleet", "--devices=8", "--bind-at=2"], "with fleet_policy = cost"),
        (["--fleet-widths=1,2"], "fleet_widths has no meaning without fleet"),
    ],
)
def test_check_refuses_a_fleet_that_cannot_be(capsys, flags, fragment):
    code, _, lines = run_command(capsys, "check", "random:smollm2-135m", *flags)
    assert (code, len(lines)) == (2, 1)
    assert fragment in lines[0]


def test_check_names_what_each_stage_holds():
    """Of a tied head both ends have the table; blocks are as many as the fullest stage can have."""
    options = {"max_model_len": 64, "dtype": "float32", "pp": 3, "tp": 2}
    config = EngineConfig.from_options(model="random:smollm2-135m", **options)
    rows = make_plan(config, open_files(config))
    assert rows["stage 1 of 3"].startswith("layers 0 to 9, embedding: 127.")
    assert rows["stage 2 of 3"].startswith("layers 10 to 19: 73.")
    assert rows["stage 3 of 3"].startswith("layers 20 to 29, LM head: 127.")
    assert all("160.0 KiB a KV block" in rows[f"stage {i} of 3"] for i in (1, 2, 3))


def test_the_last_stage_has_the_speculator(tmp_path):
    target, _, _ = checkpoint(num_hidden_layers=2)
    speculator = {"architectures": ["ArcticMLPSpeculatorPreTrainedModel"], "n_predict": 3}
    speculator |= {"vocab_size": 199, "emb_dim": 48, "inner_dim": 4096, "tie_weights": True}
    tensors = numpy_speculator.random_tensors(speculator, seed=5)
    where = numpy_speculator.save(tmp_path, speculator, tensors)
    options = {"dtype": "float32", "pp": 2, "sp": 1, "tp": 1, "max_model_len": 64}
    config = EngineConfig.from_options(
        model=str(target), speculation="model", draft_model=str(where), **options
    )
    rows = make_plan(config, open_files(config))
    assert rows["stage 1 of 2"].startswith("layers 0 to 0, embedding: 0.")
    assert rows["stage 2 of 2"].startswith("layers 1 to 1, LM head, speculator: ")
    mebibytes = float(rows["stage 2 of 2"].split(": ")[1].split(" ")[0])
    drafts = 4096 * (48 + 4096) + 2 * 199 * 4096  # of one step, as all are tied
    assert mebibytes == pytest.approx(4 * drafts / 2**20, abs=0.5)


def test_check_says_what_devices_and_host_hold_in_either_phase(capsys):
    """The host the weights, too; one that has no room for both is refused."""
    options = {"model": "random:smollm2-135m", "dtype": "float32", "max_model_len": 64}
    config = EngineConfig.from_options(phases="pp2:tp2", devices=2, host_memory="64MiB", **options)
    rows = make_plan(config, open_files(config))
    assert rows["weights on the host"].startswith("513.")
    assert rows["prefill: stage 2 of 2"].startswith("layers 15 to 29, LM head: 310.")
    assert rows["decode: base mode"] == "sp 1, tp 2" and "decode: stage 1 of 2" not in rows
    assert rows["prefill: KV on the host"] == "64.0 MiB, 1,456 tokens"
    assert rows["decode: KV on the host"] == "64.0 MiB, 1,088 tokens"  # 3 KV heads padded to 4
    flags = "--phases=pp2:tp2", "--devices=2", "--host-memory=900TiB"
    code, _, lines = run_command(capsys, "check", "random:smollm2-135m", *flags)
    assert code == 2 and "that this host, beside the weights, has available" in lines[0]


def test_buffers_of_sums_are_told_on_gpus_alone():
    config = EngineConfig.from_options(sp=2, tp=2)
    deployment = resolve(config, PRESETS["llama-8b"], Devices(4, 1 << 40, 1 << 40))
    kinds = {kind: SimpleNamespace(platform=kind, device_kind=kind) for kind in ("cpu", "gpu")}
    rows = {kind: _sum_rows(deployment, device) for kind, device in kinds.items()}
    assert rows["cpu"] == {} and "MiB outside of JAX's share" in rows["gpu"]["buffers of sums"]

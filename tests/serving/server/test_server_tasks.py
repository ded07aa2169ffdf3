"""Settings that a decoder, or an encoder, has no use for."""

import pytest
from kit import run_command
from served import serve

from serving.cli.main import make_parser
from serving.run.flags import parse_args, settle
from serving.run.start import open_model
from serving.server.options import SERVER_SETTINGS, SERVER_TASKS, ServerOptions, check_server
from serving.server.start_phases import Phases
from shiftjax import LLM, Embedder
from shiftjax.arch.presets import PRESETS
from shiftjax.config import EngineConfig
from shiftjax.deploy.deployment import Devices
from shiftjax.embed.embed_settings import check_embedding
from shiftjax.options import ConfigError

DECODER, ENCODER = PRESETS["tiny"], PRESETS["tiny-bert"]
TASKS = {DECODER: "generate", ENCODER: "embed"}
OTHERS = {
    "max_logprobs": 3,
    "stream_interval": 4,
    "tool_parser": "hermes",
    "chat_template": "template.jinja",
    "reasoning_parser": "think",
    "kv_events": "zmq",
    "kv_events_endpoint": "tcp://*:5557",
    "kv_events_topic": "kv@pod@model",
    "kv_events_replay": "tcp://*:5558",
    "max_seqs_per_key": 4,
    "max_seqs_per_address": 4,
    "store_responses": "1GiB",
    "store_dir": "kept",
    "otlp_traces_endpoint": "http://127.0.0.1:4317",
    "control_key_file": "keys",
    "force_include_usage": True,
    "default_chat_template_kwargs": "{}",
}


def test_every_setting_of_one_task_is_tried_here():
    assert OTHERS.keys() == SERVER_TASKS.keys() <= SERVER_SETTINGS.keys()


@pytest.mark.parametrize("name", OTHERS)
def test_a_setting_of_the_other_task_is_refused_in_a_sentence(name):
    options = ServerOptions(**{name: OTHERS[name]})
    check_server(options, DECODER, "generate")
    with pytest.raises(ConfigError) as caught:
        check_server(options, ENCODER, "embed")
    (problem,) = caught.value.problems
    assert problem.startswith(f"{name} = ")
    assert problem.endswith(" has no meaning for tiny-bert, which embeds texts: drop it")


def test_what_is_left_alone_and_what_both_have_is_fine():
    for model in (DECODER, ENCODER):
        check_server(
            ServerOptions(port=1, max_num_queued_reqs=1, stream_interval=1), model, TASKS[model]
        )


@pytest.mark.parametrize(
    ("model", "flags", "words"),
    [
        ("tiny-bert", ["--stream-interval=2"], "stream_interval = 2 has no meaning for tiny-bert"),
        ("tiny-bert", ["--speculation=ngram"], "speculation = 'ngram' has no meaning for tiny-b"),
        (
            "tiny-bert",
            ['--speculative-config={"method": "suffix"}'],
            "speculation = 'suffix' has no meaning for tiny-bert, which embeds texts",
        ),
        ("tiny-bert", ["--policy=shift"], "policy = 'shift' has no meaning for tiny-bert"),
    ],
)
def test_a_server_opens_no_model_with_them(model, flags, words):
    arguments = parse_args(make_parser(), ["serve", f"--model=random:{model}", *flags])
    config, _ = settle(arguments)
    with pytest.raises(ConfigError, match=words):
        open_model(config, arguments.server, Phases())


@pytest.mark.parametrize(
    "given", [{"revision": "v1"}, {"download_dir": "kept"}, {"plugins": "none"}], ids=str
)
def test_what_finds_a_model_is_of_both_tasks(given):
    config = EngineConfig.from_options(model="organisation/encoder", **given)
    check_embedding(config, ENCODER, Devices(1, 1 << 40, 1 << 40))


def test_a_server_process_ends_with_the_sentence(cache_dir):
    with serve("random:tiny-bert", cache_dir, "--stream-interval=2") as served:
        code, _, err = served.end()
        assert code == 2
        assert "stream_interval = 2 has no meaning for tiny-bert" in err.splitlines()[-1]


@pytest.mark.parametrize(
    ("command", "model", "setting", "words"),
    [
        ("embed", "tiny-bert", "stream_interval", "no meaning for tiny-bert, which embeds texts"),
        ("check", "tiny-bert", "stream_interval", "no meaning for tiny-bert, which embeds texts"),
    ],
)
def test_a_file_that_no_server_could_use_is_of_no_use_to_a_command(
    capsys, tmp_path, command, model, setting, words
):
    """One file does for all commands, of one model."""
    (tmp_path / "config.yaml").write_text(f"model: random:{model}\n{setting}: 2\n")
    (tmp_path / "in").write_text("text")
    files = {
        "embed": [str(tmp_path / "in"), str(tmp_path / "out.npy")],
        "generate": ["text"],
        "batch": [str(tmp_path / "in"), f"--output={tmp_path / 'out'}"],
    }.get(command, [])
    file = str(tmp_path / "config.yaml")
    code, _, lines = run_command(capsys, command, *files, "--config", file)
    assert code == 2
    assert f"{setting} = 2 has" in lines[-1]
    assert words in lines[-1]


@pytest.mark.parametrize("kind", [LLM, Embedder])
@pytest.mark.parametrize("name", OTHERS)
def test_neither_of_python_s_classes_has_settings_of_a_server(kind, name):
    with pytest.raises(ConfigError, match=f"unknown option '{name}'"):
        kind("random:tiny", **{name: OTHERS[name]})

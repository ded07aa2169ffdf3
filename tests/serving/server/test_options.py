"""Settings of the server that go together."""

import pytest

from serving.server.options import ServerOptions, server_problems


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"ssl_certfile": "a"}, "ssl_keyfile"),
        ({"ssl_keyfile": "a"}, "ssl_certfile"),
        ({"ssl_ca_certs": "a"}, "ssl_certfile"),
        ({"admin_port": 1}, "admin_token_file"),
        ({"admin_token_file": "a"}, "admin_port"),
        ({"port": 50051}, "grpc_port"),
        ({"allowed_origins": "app.example"}, "allowed_origins"),
        ({"allowed_origins": "*, https://app.example/path"}, "allowed_origins"),
        ({"root_path": "llm"}, "root_path"),
        ({"root_path": "/llm/"}, "root_path"),
        ({"root_path": "/a/../b?"}, "root_path"),
        ({"kv_events_replay": "tcp://*:5558"}, "kv_events_replay has no meaning"),
        ({"kv_events": "zmq", "kv_events_endpoint": "5557"}, "kv_events_endpoint must be as"),
        ({"kv_events": "zmq", "kv_events_replay": "tcp://*:5558:1"}, "kv_events_replay must be"),
        ({"kv_events": "zmq", "kv_events_topic": "kv\0"}, "kv_events_topic must have"),
    ],
)
def test_options_that_go_together(options, words):
    (problem,) = server_problems(ServerOptions(**options))
    assert words in problem


@pytest.mark.parametrize(
    "options",
    [
        {"allowed_origins": "*"},
        {"allowed_origins": "https://app.example:8443, http://localhost:3000"},
        {"root_path": "/llm/v2"},
        {"kv_events": "zmq"},
        {"kv_events": "zmq", "kv_events_endpoint": "tcp://[::1]:*", "kv_events_replay": "ipc://kv"},
    ],
)
def test_options_that_are_right(options):
    assert server_problems(ServerOptions(**options)) == []

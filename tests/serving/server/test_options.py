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
    ],
)
def test_options_that_go_together(options, words):
    (problem,) = server_problems(ServerOptions(**options))
    assert words in problem

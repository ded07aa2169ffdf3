"""TLS and mutual TLS on both front ends; and what is no secure channel is refused."""

import socket
import ssl
from pathlib import Path

import grpc
import httpx
import pytest
from certificates import NEEDS_OPENSSL, make_authority, make_certificate
from kit import running_server

from serving.proto import shiftjax_pb2 as pb
from serving.proto import shiftjax_pb2_grpc as pb_grpc
from serving.server.options import ServerOptions
from serving.server.tls import Certificates
from shiftjax.options import ConfigError

pytestmark = NEEDS_OPENSSL


@pytest.fixture(scope="module")
def certificates(tmp_path_factory) -> Path:
    """An authority, and certificates of a server and a client that it has signed."""
    directory = tmp_path_factory.mktemp("tls")
    make_authority(directory)
    return directory


def options_of(directory: Path, *, mutual: bool) -> dict:
    files = {"ssl_certfile": str(directory / "server.pem")}
    files |= {"ssl_keyfile": str(directory / "server.key")}
    return files | ({"ssl_ca_certs": str(directory / "ca.pem")} if mutual else {})


@pytest.mark.parametrize("mutual", [False, True])
def test_both_front_ends_speak_tls(certificates, mutual):
    context = ssl.create_default_context(cafile=str(certificates / "ca.pem"))
    root = (certificates / "ca.pem").read_bytes()
    key, chain = None, None
    if mutual:
        context.load_cert_chain(certificates / "client.pem", certificates / "client.key")
        key, chain = ((certificates / f"client.{e}").read_bytes() for e in ("key", "pem"))
    with running_server(**options_of(certificates, mutual=mutual)) as server:
        assert server.url.startswith("https://")
        with httpx.Client(base_url=server.url, verify=context, trust_env=False) as client:
            answer = client.post("/v1/completions", json={"prompt": "x", "max_tokens": 2})
            assert answer.json()["usage"]["completion_tokens"] == 2
        credentials = grpc.ssl_channel_credentials(root, key, chain)
        with grpc.secure_channel(server.server.grpc.address, credentials) as channel:
            stub = pb_grpc.InferenceStub(channel)
            wanted = pb.GenerateRequest(text="x", sampling=pb.Sampling(max_tokens=2))
            assert stub.GenerateOnce(wanted).usage.completion_tokens == 2
        server.assert_quiescent()


def serial_numbers(server, root: bytes) -> set[int]:
    """Of the certificates that both front ends show now."""
    context = ssl.create_default_context(cadata=root.decode())
    numbers = set()
    for address in (server.url.removeprefix("https://"), server.server.grpc.address):
        host, port = address.split(":")
        context.set_alpn_protocols(["h2"])
        with (
            socket.create_connection((host, int(port)), timeout=10) as connection,
            context.wrap_socket(connection, server_hostname="localhost") as secure,
        ):
            numbers.add(int(secure.getpeercert()["serialNumber"], 16))
    return numbers


def test_certificates_are_read_again_while_streams_go_on(certificates, tmp_path):
    for file in certificates.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    root = (tmp_path / "ca.pem").read_bytes()
    with running_server(**options_of(tmp_path, mutual=False)) as server:
        server.runner.step_seconds = 0.01
        (before,) = serial_numbers(server, root)
        credentials = grpc.ssl_channel_credentials(root)
        with grpc.secure_channel(server.server.grpc.address, credentials) as channel:
            sampling = pb.Sampling(max_tokens=60, ignore_eos=True)
            stream = pb_grpc.InferenceStub(channel).Generate(
                pb.GenerateRequest(text="x", sampling=sampling)
            )
            next(stream)
            make_certificate(tmp_path, "server")
            server.loop.call_soon_threadsafe(server.server.certificates.reload)
            server.wait_until(lambda: serial_numbers(server, root) != {before})
            (after,) = serial_numbers(server, root)
            assert after != before
            assert list(stream)[-1].usage.completion_tokens == 60
        (tmp_path / "server.key").write_text("no key")
        server.loop.call_soon_threadsafe(server.server.certificates.reload)
        assert serial_numbers(server, root) == {after}  # what cannot be used changes nothing
        server.assert_quiescent()


def live(server, root: str, client: Path) -> tuple[bool, bool]:
    """Whether HTTPS answers a client with its certificate; whether it may come back without."""
    context = ssl.create_default_context(cadata=root)
    context.load_cert_chain(client / "client.pem", client / "client.key")
    host, port = server.url.removeprefix("https://").split(":")
    request = b"GET /health/live HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    try:
        with (
            socket.create_connection((host, int(port)), timeout=10) as connection,
            context.wrap_socket(connection, server_hostname="localhost") as secure,
        ):
            secure.sendall(request)
            is_live = secure.recv(100).startswith(b"HTTP/1.1 200")
            return is_live, secure.session is not None and secure.session.has_ticket
    except OSError:
        return False, False


def test_an_authority_that_is_taken_away_is_not_trusted_any_more(certificates, tmp_path):
    """Over HTTPS, where a context that is loaded again would keep it; nor are its sessions."""
    for file in certificates.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    with running_server(**options_of(tmp_path, mutual=True)) as server:
        before = (tmp_path / "ca.pem").read_text()
        assert live(server, before, certificates) == (True, False)
        for name in ("ca.pem", "client.pem", "client.key"):  # the server's own stays for a while
            (tmp_path / name).rename(tmp_path / f"old-{name}")
        server_files = {n: (tmp_path / n).read_bytes() for n in ("server.pem", "server.key")}
        make_authority(tmp_path)
        for name, data in server_files.items():
            (tmp_path / name).write_bytes(data)
        server.loop.call_soon_threadsafe(server.server.certificates.reload)
        server.wait_until(lambda: live(server, before, tmp_path)[0])
        assert live(server, before, certificates) == (False, False)
        server.assert_quiescent()


def test_files_that_are_no_certificate_are_refused_at_the_start(certificates, tmp_path):
    (tmp_path / "bad.pem").write_text("nothing")
    good = options_of(certificates, mutual=True)
    for name in good:
        for path in ("bad.pem", "absent.pem"):
            with pytest.raises(ConfigError, match="ssl_certfile"):
                Certificates(ServerOptions(**good | {name: str(tmp_path / path)}))


def test_strangers_stay_outside(certificates):
    context = ssl.create_default_context(cafile=str(certificates / "ca.pem"))
    with running_server(**options_of(certificates, mutual=True)) as server:
        plain = server.url.replace("https", "http")
        for url, verify in ((server.url, context), (plain, True)):
            with (
                httpx.Client(base_url=url, verify=verify, trust_env=False) as client,
                pytest.raises(httpx.TransportError),
            ):
                client.get("/health/live")
        with grpc.insecure_channel(server.server.grpc.address) as channel:
            stub = pb_grpc.InferenceStub(channel)
            with pytest.raises(grpc.RpcError) as caught:
                stub.GenerateOnce(pb.GenerateRequest(text="x"), timeout=5)
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE

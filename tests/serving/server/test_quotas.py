"""How much one client may have open, by key and by address, over both front ends."""

import grpc
import httpx
import pytest
from kit import COMPLETION, is_error, running_server

from serving.proto import shiftjax_pb2 as pb
from serving.proto import shiftjax_pb2_grpc as pb_grpc
from serving.server.errors import ServeError
from serving.server.options import ServerOptions, server_problems
from serving.server.quotas import NOBODY, Caller, Quotas, holder_of, holder_of_peer

LONG = {"prompt": "x", "max_tokens": 200, "ignore_eos": True, "stream": True}
SHORT = {"prompt": "x", "max_tokens": 1}


def test_what_is_lent_comes_back_whatever_happens():
    quotas = Quotas(ServerOptions(max_seqs_per_key=3, max_seqs_per_address=4))
    one, other = Caller(b"a", "10.0.0.1"), Caller(b"b", "10.0.0.1")
    with quotas.lent(one, 3):
        with pytest.raises(ServeError, match="This key has 3 sequences open, and may have 3"):
            quotas.lent(one, 1).__enter__()
        with quotas.lent(other, 1), pytest.raises(ServeError, match="address has 4") as caught:
            quotas.lent(other, 1).__enter__()
        assert caught.value.kind.status == 429 and caught.value.kind.retry_seconds
        with pytest.raises(ZeroDivisionError), quotas.lent(other, 1):
            raise ZeroDivisionError
        with quotas.lent(NOBODY, 99):  # a batch of this process has no quota
            pass
    with quotas.lent(one, 3):
        pass
    assert not quotas._open


def test_more_than_is_ever_lent_is_no_matter_of_waiting():
    with pytest.raises(ServeError, match="lends 3 per key") as caught:
        Quotas(ServerOptions(max_seqs_per_key=3)).lent(Caller(b"a"), 4).__enter__()
    assert (caught.value.kind.status, caught.value.code) == (400, "quota_exceeded")


def test_an_address_counts_as_its_network():
    """Whoever has one IPv6 address has 2^64 of them."""
    assert holder_of("127.0.0.1") == holder_of("::ffff:127.0.0.1") == "127.0.0.1"
    assert holder_of("2001:db8::1") == holder_of("2001:db8::ffff:2") != holder_of("2001:db8:1::1")
    assert holder_of("fe80::1%eth0") == holder_of("fe80::2%eth0")
    assert holder_of(None) is holder_of("unix") is holder_of_peer("unix:/run/x") is None
    assert holder_of_peer("ipv4:10.0.0.7:4242") == "10.0.0.7"
    assert holder_of_peer("ipv6:%5B2001:db8::1%5D:4242") == holder_of("2001:db8::2")


def test_a_quota_of_keys_needs_keys():
    assert "nobody has a key" in server_problems(ServerOptions(max_seqs_per_key=1))[0]
    assert not server_problems(ServerOptions(max_seqs_per_key=1, api_key="k"))


def test_an_address_has_its_quota_over_http():
    with running_server(grpc=False, max_seqs_per_address=2) as server:
        server.runner.step_seconds = 0.02
        elsewhere = httpx.HTTPTransport(local_address="127.0.0.2")
        with (
            server.client() as client,
            httpx.Client(base_url=server.url, transport=elsewhere) as other,
        ):
            with client.stream("POST", COMPLETION, json=LONG | {"n": 2}) as response:
                lines = response.iter_lines()  # without a name it would end, and the stream too
                next(lines)
                refused = client.post(COMPLETION, json=SHORT)
                is_error(refused, 429)
                assert refused.json()["error"]["code"] == "quota_exceeded"
                assert refused.headers["retry-after"] == "1"
                assert other.post(COMPLETION, json=SHORT).status_code == 200
            server.wait_until(lambda: not server.engine.handles)
            assert client.post(COMPLETION, json=SHORT).status_code == 200
            is_error(client.post(COMPLETION, json=SHORT | {"n": 3}), 400)
            bad = SHORT | {"temperature": -1}
            assert {client.post(COMPLETION, json=bad).status_code for _ in range(3)} == {400}
            assert client.post(COMPLETION, json=SHORT | {"n": 2}).status_code == 200
        server.assert_quiescent()


def test_a_key_has_its_quota_over_http_and_grpc_together():
    """The one of `x-api-key`, too; another key is not concerned."""
    options = {"keys": ("first", "second"), "max_seqs_per_key": 1, "api_key": "first"}
    with running_server(**options) as server, server.client() as client:
        server.runner.step_seconds = 0.02
        by_key = {name: {"authorization": f"Bearer {name}"} for name in options["keys"]}
        with grpc.insecure_channel(server.server.grpc.address) as channel:
            stub = pb_grpc.InferenceStub(channel)
            sampling = pb.Sampling(max_tokens=200, ignore_eos=True)
            request = pb.GenerateRequest(text="x", sampling=sampling)
            call = stub.Generate(request, metadata=[*by_key["first"].items()])
            next(call)
            is_error(client.post(COMPLETION, json=SHORT, headers={"x-api-key": "first"}), 429)
            assert client.post(COMPLETION, json=SHORT, headers=by_key["second"]).status_code == 200
            with pytest.raises(grpc.RpcError) as caught:
                stub.GenerateOnce(request, metadata=[*by_key["first"].items()])
            assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            call.cancel()
        server.wait_until(lambda: not server.engine.handles)
        assert client.post(COMPLETION, json=SHORT, headers=by_key["first"]).status_code == 200
        server.assert_quiescent()


def test_an_address_has_its_quota_over_grpc():
    with running_server(max_seqs_per_address=1) as server, server.client() as client:
        server.runner.step_seconds = 0.02
        with grpc.insecure_channel(server.server.grpc.address) as channel:
            sampling = pb.Sampling(max_tokens=200, ignore_eos=True)
            stub = pb_grpc.InferenceStub(channel)
            call = stub.Generate(pb.GenerateRequest(text="x", sampling=sampling))
            next(call)
            is_error(client.post(COMPLETION, json=SHORT), 429)
            call.cancel()
        server.wait_until(lambda: not server.engine.handles)

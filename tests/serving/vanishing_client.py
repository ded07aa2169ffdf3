"""A client that is made to vanish: `python vanishing_client.py HTTP GRPC` begins three requests.

A stream and a plain completion over HTTP, a stream over gRPC. Says so when they run, and waits.
"""

import sys
import threading

import grpc
import httpx

from serving.proto import shiftjax_pb2 as pb
from serving.proto import shiftjax_pb2_grpc as pb_grpc

PROMPT, NUM_TOKENS = [5, 6, 7], 60
BODY = {"prompt": PROMPT, "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True}
SAMPLING = pb.Sampling(n=8, max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True)


def main(http: str, rpc: str) -> None:
    """Begin all three and wait to be killed."""
    client = httpx.Client(base_url=f"http://{http}", timeout=None, trust_env=False)
    post = ("POST", "/v1/completions")
    headers = {"x-request-id": "gone-stream"}
    with client.stream(*post, json=BODY | {"stream": True}, headers=headers) as answer:
        lines = answer.iter_lines()  # which would end the stream if nothing held it
        next(lines)
        plain = {"json": BODY, "headers": {"x-request-id": "gone-plain"}}
        threading.Thread(target=client.request, args=post, kwargs=plain, daemon=True).start()
        request = pb.GenerateRequest(
            request_id="gone-grpc", token_ids=pb.TokenIds(ids=PROMPT), sampling=SAMPLING
        )
        call = pb_grpc.InferenceStub(grpc.insecure_channel(rpc)).Generate(request)
        next(call), next(call)
        print("running", flush=True)
        threading.Event().wait()


if __name__ == "__main__":
    main(*sys.argv[1:])

"""llama.cpp with continuous batching, through llama-cpp-python's low-level interface.

Every call to `llama_decode` takes one token of each decoding sequence and fills the rest of the
batch with prompt chunks, as llama-server does. Contexts are made per number of slots and kept, so
that a single stream does not pay for the slots of a large batch. The defaults were the best of
those tried (CPU seconds for 64 mixed requests): 32 slots 23, 64 slots 30, with a unified KV buffer
39 and 38; flash attention off costs half as much again; ubatch of 128 to 2048 makes no difference.

    python scripts/peers/llama_cpp_worker.py MODEL.gguf [--slots 32] [--ubatch 512] ...
"""

# pyright: reportMissingImports=false
import argparse
import ctypes
import functools
import heapq
import time
from collections import deque
from dataclasses import dataclass, field

import llama_cpp
import numpy as np
from protocol import Generate, main

FLASH_ATTENTION = {"auto": -1, "off": 0, "on": 1}


@dataclass
class Running:
    """One request in a slot."""

    slot: int
    index: int
    prompt: list[int]
    max_tokens: int
    num_computed_tokens: int = 0
    output: list[int] = field(default_factory=list)
    first_at: float = 0.0
    last_at: float = 0.0

    def tpot_seconds(self) -> float | None:
        """Mean time per token after the first."""
        later = len(self.output) - 1
        return (self.last_at - self.first_at) / later if later else None


class Context:
    """A llama.cpp context with its own KV cache, and the batch that feeds it."""

    def __init__(self, model, num_slots: int, args: argparse.Namespace) -> None:
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = num_slots * args.max_model_len
        params.n_seq_max = num_slots
        params.n_batch, params.n_ubatch = args.batch, args.ubatch
        params.n_threads = params.n_threads_batch = args.threads
        params.flash_attn_type = FLASH_ATTENTION[args.flash_attention]
        params.kv_unified = bool(args.unified)
        self.batch_tokens = args.batch
        self.pointer = llama_cpp.llama_init_from_model(model, params)
        if not self.pointer:
            raise RuntimeError(f"llama.cpp made no context of {params.n_ctx} tokens")
        self.vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
        self.batch = llama_cpp.llama_batch_init(args.batch, 0, 1)

    def clear(self) -> None:
        """Forget all sequences."""
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self.pointer), False)

    def add(self, token: int, position: int, slot: int, wants_logits: bool) -> None:
        """Append one token to the batch."""
        batch, n = self.batch, self.batch.n_tokens
        batch.token[n], batch.pos[n], batch.logits[n] = token, position, wants_logits
        batch.n_seq_id[n], batch.seq_id[n][0] = 1, slot
        batch.n_tokens = n + 1

    def room(self) -> int:
        """Tokens that the batch can still take."""
        return self.batch_tokens - self.batch.n_tokens

    def decode(self, num_rows: int) -> list[int]:
        """Run the batch; return the likeliest token of each row that wanted logits, in order."""
        status = llama_cpp.llama_decode(self.pointer, self.batch)
        if status != 0:
            raise RuntimeError(f"llama_decode returned {status}")
        self.batch.n_tokens = 0
        if num_rows == 0:
            return []
        logits = llama_cpp.llama_get_logits(self.pointer)
        return np.ctypeslib.as_array(logits, (num_rows, self.vocab_size)).argmax(axis=1).tolist()


def add_tokens(context: Context, request: Running) -> bool:
    """Put the request's next token or prompt chunk into the batch; True if it will be sampled."""
    if request.output:
        position = len(request.prompt) + len(request.output) - 1
        context.add(request.output[-1], position, request.slot, True)
        return True
    start = request.num_computed_tokens
    end = min(len(request.prompt), start + context.room())
    for position in range(start, end):
        is_last = position == len(request.prompt) - 1
        context.add(request.prompt[position], position, request.slot, is_last)
    request.num_computed_tokens = end
    return end > start and end == len(request.prompt)


def step(context: Context, running: list[Running]) -> None:
    """Advance every running request: decodes first, then prompt chunks."""
    # in the order of slots: without a unified buffer, only sequences in a row share a computation
    decodes_first = sorted(running, key=lambda request: (not request.output, request.slot))
    rows = [request for request in decodes_first if add_tokens(context, request)]
    tokens, now = context.decode(len(rows)), time.perf_counter()
    for request, token in zip(rows, tokens, strict=True):
        request.first_at, request.last_at = request.first_at or now, now
        request.output.append(token)


def generate(
    context: Context, num_slots: int, prompts: list[list[int]], max_tokens: list[int]
) -> dict:
    """Run all requests, a slot's next one as soon as its last one ends."""
    waiting = deque(enumerate(zip(prompts, max_tokens, strict=True)))
    free, running = list(range(num_slots)), []  # a heap: the lowest slot first
    ended: dict[int, Running] = {}
    memory = llama_cpp.llama_get_memory(context.pointer)
    while waiting or running:
        while waiting and free:
            index, (prompt, limit) = waiting.popleft()
            running.append(Running(heapq.heappop(free), index, prompt, limit))
        step(context, running)
        for request in [r for r in running if len(r.output) >= r.max_tokens]:
            ended[request.index] = request
            running.remove(request)
            llama_cpp.llama_memory_seq_rm(memory, request.slot, -1, -1)
            heapq.heappush(free, request.slot)
    context.clear()
    requests = [ended[index] for index in range(len(prompts))]
    return {
        "token_ids": [request.output for request in requests],
        "tpot_seconds": [request.tpot_seconds() for request in requests],
    }


@llama_cpp.llama_log_callback
def ignore_log(*_args: object) -> None:
    """Keep llama.cpp quiet."""


OPTIONS = {
    "--slots": (32, "sequences that run together"),
    "--threads": (2, "of the CPU"),
    "--batch": (4096, "most tokens in one call"),
    "--ubatch": (512, "most tokens computed together"),
    "--max-model-len": (640, "tokens of a request"),
    "--flash-attention": ("auto", "auto, off or on"),
    "--unified": (0, "1: one KV buffer for all sequences"),
}


def start(args: argparse.Namespace) -> tuple[dict, Generate]:
    """Load the model."""
    llama_cpp.llama_log_set(ignore_log, ctypes.c_void_p(0))
    llama_cpp.llama_backend_init()
    options = llama_cpp.llama_model_default_params()
    model = llama_cpp.llama_model_load_from_file(args.model.encode(), options)
    if not model:
        raise FileNotFoundError(f"llama.cpp could not load {args.model}")

    @functools.cache
    def context_for(num_slots: int) -> Context:
        return Context(model, num_slots, args)

    def generate_all(prompts: list[list[int]], max_tokens: list[int]) -> dict:
        num_slots = min(args.slots, len(prompts))
        return generate(context_for(num_slots), num_slots, prompts, max_tokens)

    return {"engine": "llama.cpp", "version": llama_cpp.__version__}, generate_all


if __name__ == "__main__":
    main(__doc__, OPTIONS, start)

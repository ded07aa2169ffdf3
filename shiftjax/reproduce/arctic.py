"""Arctic Inference (arXiv 2507.11830): Shift, SwiftKV and drafts together; embeddings.

Llama-70B in FP8 on 8 x H200, beside DP and TP of vLLM. SwiftKV computes prompts by half of the
layers. How often drafts are right is not published: `ACCEPTANCE` is what our speculators get on the
same kinds of texts (docs/results/reproduce.md).
"""

import statistics
from collections.abc import Iterator, Mapping
from dataclasses import replace

from shiftjax.arch.presets import preset
from shiftjax.costs.work import Work
from shiftjax.draft_options import DraftOptions
from shiftjax.reproduce.figures import Figure, Options, Published
from shiftjax.reproduce.measures import alone, by_name, steady_rate, target
from shiftjax.sim.drafts import AcceptanceModel, acceptance_from
from shiftjax.sim.modelled import Target, cost_model
from shiftjax.sim.replay import replay
from shiftjax.sim.trace import poisson

PROMPT, OUTPUT = 2000, 250  # tokens, of the throughput
PREFILL = 4000  # prompt tokens, of the response
ACCEPTANCE: Mapping[str, tuple[float, float]] = {
    "sharegpt": (1.80, 0.13),  # answers of MT-bench
    "humaneval": (1.57, 0.10),  # HumanEval's solutions
    "swe": (5.63, 0.78),  # HumanEval's functions with a parameter renamed
}
"""Suffix drafts: tokens of a step, and the share of drafted tokens that is accepted."""
LSTM_TOKENS = 1.475  # of a step, by our speculator: docs/speculation.md
ENCODER = preset(  # BERT-base's layers; the two matrices of its MLP are three here, as large
    "bert-base",
    {"architecture": "llama", "vocab_size": 30_522, "max_position_embeddings": 512},
    *(768, 2048, 12, 12, 12, 64),
)
DRAFTS = DraftOptions(speculation="suffix", fixed_drafts=True)

OURS = (
    "Acceptance is ours, of suffix drafts: ShareGPT 1.80 tokens a step (answers of MT-bench), "
    "HumanEval 1.57 (its solutions), SWE-bench 5.63 (functions with a renamed parameter)."
)
HYBRID = (
    f"{OURS} Our LSTM, trained on a CPU for SmolLM2, has {LSTM_TOKENS} tokens a step, fewer than "
    "suffix drafts; theirs is trained for this model, so ours are too slow on new text."
)
BEST = (
    "Published over the best of vLLM, SGLang and TensorRT-LLM, ours over vLLM as simulated; the "
    "plot has 2.3, 2.2 (figure 4) and 4.3, 1.6, 1.17, 2.0 (figure 1) over vLLM."
)
FRONT = "Ours has less outside the engine: tokeniser of a long prompt, front end, client."
MIX = (
    "Neither rates nor lengths are published. Ours: Poisson at 0.5/s, 2,000 in and 250 out on "
    "average, log-normal. Their spread (cv 0.7) was chosen with TP's p95 in view, so that is no "
    "check."
)
MIX_TOKENS = (
    "Of production traces that are not published; ours are 2,000 in and 250 out, as in figure 4."
)
NOT_VLLM = "Not run: that front end (tokeniser, JSON of embeddings, one process) is not modelled."


def with_swiftkv(of: Target) -> Target:
    """The same, with keys and values of the later half of the layers computed from its input."""
    return replace(of, model=replace(of.model, num_kv_layers=of.model.num_layers // 2))


def acceptance(tokens: float, share: float) -> AcceptanceModel:
    """What gives so many tokens a step, of drafts of which this share is accepted."""
    return acceptance_from({"tokens_per_step": tokens, "accepted_of_drafted": share})


def mixed() -> AcceptanceModel:
    """Of texts of all kinds, as many tokens of each: tokens over steps, accepted over drafted."""
    steps = [1 / tokens for tokens, _ in ACCEPTANCE.values()]  # of one token
    shares = (share for _, share in ACCEPTANCE.values())
    drafted = [(1 - each) / share for each, share in zip(steps, shares, strict=True)]
    return acceptance(len(steps) / sum(steps), (len(steps) - sum(steps)) / sum(drafted))


def drafts(paper: Published, options: Options) -> Iterator[Figure]:
    """Speculation alone: bfloat16 on 8 x H100, TP 8, one request (figure of projects/spec_dec)."""
    of = target("llama-70b", "h100x8", "bfloat16")
    output = 400 if options.quick else 2000
    plain = by_name(of, {"tp": "tp"})["tp"]
    drafting = by_name(of, {"tp": "tp"}, drafts=DRAFTS)["tp"]
    format_note = "No number format is published; with FP8 it would be quicker than published."
    yield paper.beside("suffix-none", 1e3 / alone(of, plain, 512, output).tpot, format_note)
    tpot = {
        name: alone(of, drafting, 512, output, acceptance(*figures)).tpot
        for name, figures in ACCEPTANCE.items()
    }
    for name in ("sharegpt", "humaneval"):
        yield paper.beside(f"suffix-{name}", 1e3 / tpot[name], OURS)
    for name, value in tpot.items():
        yield paper.beside(f"hybrid-{name}", 1e3 / value, HYBRID)
    yield paper.beside("hybrid-mixed", 1e3 / statistics.mean(tpot.values()), HYBRID)
    for name, value in tpot.items():
        published = paper.figures[f"hybrid-{name}"]["value"]
        implied = ACCEPTANCE[name][0] * published * value / 1e3
        what = f"tokens a step that the published rate of {name} needs"
        yield paper.alone("spec_dec", what, implied, "tokens")


def speeds(paper: Published, options: Options) -> Iterator[Figure]:
    """Figure 4: response, generation and throughput, each by itself."""
    plain = target("llama-70b")
    swift = with_swiftkv(plain)
    arctic = by_name(swift, {"arctic": "shift"}, threshold=512, drafts=DRAFTS)
    cases = by_name(plain, {"dp": "dp", "tp": "tp"}) | arctic
    prefill, decode = {}, {}
    for name, each in cases.items():
        drafted = name == "arctic"
        of = swift if drafted else plain
        texts = [acceptance(*figures) for figures in ACCEPTANCE.values()] if drafted else [None]
        found = [alone(of, each, PREFILL, OUTPUT, text) for text in texts]
        prefill[name] = 1e3 * PREFILL / found[0].ttft
        decode[name] = 1e3 / statistics.mean(latency.tpot for latency in found)
        yield paper.beside(f"speed-prefill-{name}", prefill[name], FRONT)
        yield paper.beside(f"speed-decode-{name}", decode[name], HYBRID if drafted else "")
        rate = steady_rate(of, each, PROMPT, OUTPUT)
        yield paper.beside(f"speed-tokens-{name}", rate, "In closed form, without drafts.")
    yield paper.beside("speed-prefill-gain", prefill["arctic"] / prefill["tp"], BEST)
    yield paper.beside("speed-decode-gain", decode["arctic"] / decode["tp"], BEST)


def production(paper: Published, options: Options) -> Iterator[Figure]:
    """Figure 1, and figure 16 of the paper on Shift: the compound, and what each part brings."""
    plain = target("llama-70b")
    swift = with_swiftkv(plain)
    requests = poisson(0.5, 30 if options.quick else 240, PROMPT, OUTPUT, length_cv=0.7)
    three = {"dp": "dp", "tp": "tp", "Shift": "shift"}
    cases = {name: (plain, each) for name, each in by_name(plain, three, threshold=512).items()}
    shift = {"Shift, SwiftKV": "shift"}
    for name, each in by_name(swift, shift, threshold=512).items():
        cases[name] = swift, each
    for name, each in by_name(swift, {"arctic": "shift"}, threshold=512, drafts=DRAFTS).items():
        cases[name] = swift, each
    completion, tokens = {}, {}
    for name, (of, each) in cases.items():
        drafted = mixed() if name == "arctic" else None
        run = replay(requests, of, each, acceptance=drafted)
        done = sorted(request.completion for request in run.requests)
        completion[name] = 1e3 * done[int(0.95 * (len(done) - 1))]
        tokens[name] = steady_rate(of, each, PROMPT, OUTPUT)
        if name in ("dp", "tp", "arctic"):
            yield paper.beside(f"mix-completion-{name}", completion[name], MIX)
            yield paper.beside(f"mix-tokens-{name}", tokens[name], MIX_TOKENS)
        else:
            yield paper.alone("16", f"{name}: p95 of completion", completion[name], "ms", MIX)
            yield paper.alone("16", f"{name}: throughput", tokens[name], "tokens/s", MIX_TOKENS)
    for name in ("dp", "tp"):
        ratio = completion[name] / completion["arctic"]
        yield paper.beside(f"mix-completion-over-{name}", ratio, BEST)
        ratio = tokens["arctic"] / tokens[name]
        yield paper.beside(f"mix-tokens-over-{name}", ratio, BEST)


def embeddings(paper: Published, options: Options) -> Iterator[Figure]:
    """Figure 5: texts of one length, arctic-embed-m (BERT-base's layers), one device.

    The simulator has no encoders: these are priced as a decoder's layers with as many parameters,
    whose tokens see their whole text, without a head. Several replicas hide the host.
    """
    note = (
        "Devices alone, as a decoder's layers of the same size; its replicas hide the host. "
        "An A10G has 70 of an A10's 125 TFLOP/s."
    )
    for machine, name in (("h200x8", "h200"), ("a10x8", "a10")):
        of = target("llama-8b", machine, "bfloat16")
        of = replace(of, model=ENCODER)
        costs = cost_model(of, by_name(of, {"one": "dp=8,tp=1,policy=base"})["one"])
        for length in (50, 512):
            texts = 8192 // length
            tokens = texts * length
            work = Work(tokens, 0, texts, 0, tokens, tokens * length)
            rate = tokens / costs.device_seconds(costs.layout.base, work)
            yield paper.beside(f"embed-{name}-{length}", rate, note)
    for length in (50, 512):
        yield paper.beside(f"embed-over-vllm-{length}", None, NOT_VLLM)


PARTS = {each.__name__: each for each in (drafts, speeds, production, embeddings)}

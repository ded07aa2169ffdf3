"""Shift Parallelism (arXiv 2509.16495): DP, TP, SP and Shift in vLLM on 8 x H200.

The paper has vLLM 0.9.2, its artifact 0.10.1. Weights are FP8 and the cache is not, but for
Mooncake's trace: section 4.2.2, and server.sh of the artifact. Steps are those of `vllm serve`; the
threshold is the plug-in's default.
"""

from collections.abc import Iterable, Iterator, Mapping

from shiftjax.costs.work import Work
from shiftjax.deploy.deployment import Deployment
from shiftjax.reproduce.figures import Curve, Figure, Options, Published
from shiftjax.reproduce.measures import (
    LONGEST,
    alone,
    batch_rate,
    by_name,
    steady_rate,
    target,
)
from shiftjax.reproduce.shift_traces import azure, bursts, mooncake
from shiftjax.sim.modelled import Target, cost_model
from shiftjax.sim.replay import replay
from shiftjax.sim.replay_metrics import summary
from shiftjax.sim.trace import poisson

PROMPT, OUTPUT = 4096, 250  # tokens
NAMES = {"dp": "dp", "tp": "tp", "sp": "sp", "shift": "shift"}
SPARSE = {
    "llama-17b-16e": {"dp": "dp,tp=2,dp=4", "shift": "shift,sp=4,tp=2"},
    "qwen-30b-a3b": {},
}
"""Their configurations that are not the rule's: one device has no room for 128k (section 4.6)."""
LABELS = {
    "llama-70b": "Llama-70B",
    "qwen-32b": "Qwen-32B",
    "llama-17b-16e": "Llama-17B-16E",
    "qwen-30b-a3b": "Qwen-30B-A3B",
}
CONTEXTS = (2, 4, 8, 16, 32, 64, 128)  # thousands of tokens
RATES = (1, 2, 3, 5, 7, 10)  # requests/s
COUNT = 1000  # requests that saturate
QWEN_FP8 = (
    "This checkpoint's FP8 has a scale for each block of 128 x 128; the machine's constants are "
    "those of products with a scale for each row."
)
BESIDE = "Ours has less outside the engine: tokeniser of a long prompt, front end, client."
PADDED = "Ours has cheaper all-to-alls for a few tokens."


def deployments(of: Target, names: Mapping[str, str] = NAMES) -> dict[str, Deployment]:
    """The configurations that are compared."""
    return by_name(of, names, threshold=512)


def tradeoff(paper: Published, options: Options) -> Iterator[Figure]:
    """Figure 12 and section 4.3.1: one request, then more than the machine can take."""
    for model in ("llama-70b", "qwen-32b"):
        of = target(model)
        why = QWEN_FP8 if model.startswith("qwen") else ""
        values: dict[str, dict[str, float]] = {"ttft": {}, "tpot": {}, "tokens": {}}
        for name, each in deployments(of).items():
            values["ttft"][name], values["tpot"][name] = alone(of, each, PROMPT, OUTPUT)
            if options.quick:
                values["tokens"][name] = steady_rate(of, each, PROMPT, OUTPUT)
            else:
                values["tokens"][name] = batch_rate(of, each, PROMPT, OUTPUT, COUNT)
        notes = {"ttft": f"{BESIDE} {why}".strip(), "tpot": why, "tokens": why}
        for metric, of_metric in values.items():
            for name, value in of_metric.items():
                note = notes[metric]
                if (metric, name) == ("tpot", "sp"):
                    note = f"{PADDED} {note}".strip()
                yield paper.beside(f"{model}-{metric}-{name}", value, note)
        ttft, tokens = values["ttft"], values["tokens"]
        for name in ("tp", "dp"):
            ratio = ttft[name] / ttft["shift"]
            yield paper.beside(f"{model}-ttft-{name}-over-shift", ratio)
        for name in ("tp", "shift"):
            yield paper.beside(f"{model}-tokens-{name}-over-dp", tokens[name] / tokens["dp"])


def contexts(paper: Published, options: Options) -> Iterator[Figure | Curve]:
    """Figures 13 and 17: latency alone and throughput by context, of four models.

    The curves are in pictures that could not be read; the text says what is most.
    """
    sizes = (2, 32) if options.quick else CONTEXTS
    lines = {model: by_context(model, sizes) for model in LABELS}
    for model, of_model in lines.items():
        for metric, of_metric in of_model.items():
            title = f"{LABELS[model]}, {metric} by context"
            unit = "tokens/s" if metric == "throughput" else "ms"
            yield Curve(title, "prompt tokens", unit, of_metric)

    def most(models: Iterable[str], metric: str, above: str, below: str) -> float:
        """The largest ratio of two deployments over all contexts of these models."""
        of_metric = [lines[model][metric] for model in models]
        pairs = (pair for each in of_metric for pair in zip(each[above], each[below], strict=True))
        return max(over / under for (_, over), (_, under) in pairs)

    dense, note = ("llama-70b", "qwen-32b"), "Of Llama-70B and Qwen-32B; throughput in closed form."
    yield paper.beside("context-ttft-dp", most(dense, "TTFT", "dp", "shift"), note)
    yield paper.beside("context-ttft-tp", most(dense, "TTFT", "tp", "shift"), note)
    yield paper.beside("context-tpot-dp", most(dense, "TPOT", "dp", "shift"), note)
    yield paper.beside("context-tokens-tp", most(dense, "throughput", "shift", "tp"), note)
    yield paper.beside("sparse-tokens-tp", most(SPARSE, "throughput", "shift", "tp"), note)
    full = max(value for _, value in lines["qwen-30b-a3b"]["throughput"]["dp"])
    yield paper.beside("qwen-30b-a3b-tokens-dp", full, QWEN_30B)


Lines = dict[str, list[tuple[float, float]]]  # by deployment: (prompt tokens, value)


def by_context(model: str, sizes: Iterable[int]) -> dict[str, Lines]:
    """TTFT and TPOT of one request (milliseconds) and full throughput, by thousands of tokens."""
    of, three = target(model), {name: NAMES[name] for name in ("dp", "tp", "shift")}
    found: dict[str, Lines] = {metric: {} for metric in ("TTFT", "TPOT", "throughput")}
    for name, each in deployments(of, three | SPARSE.get(model, {})).items():
        for size in sizes:
            prompt = min(1024 * size, LONGEST - OUTPUT)
            latency = alone(of, each, prompt, OUTPUT)
            values = *latency, steady_rate(of, each, prompt, OUTPUT)
            for metric, value in zip(found, values, strict=True):
                found[metric].setdefault(name, []).append((1024.0 * size, value))
    return found


QWEN_30B = (
    "The context of this value is not said; ours is the best. Of 4,096 in and 250 out 225,000 "
    "tokens/s are 13,000 streamed tokens/s: all that one API process has at 0.08 ms a token. Ours "
    "has a front end for each replica."
)


def ulysses(paper: Published, options: Options) -> Iterator[Figure]:
    """Llama-70B on 8 x H100 by context: replicas of TP 2, TP 8, and SP 4 x TP 2 always in base."""
    names = {"dp": "dp,tp=2,dp=4", "tp": "tp", "sp": "sp,sp=4,tp=2"}
    of = target("llama-70b", "h100x8")
    sizes = (8,) if options.quick else (2, 8, 32, 64, 128)
    for name, each in by_name(of, names).items():
        for size in sizes:
            prompt = min(1024 * size, LONGEST - OUTPUT)
            latency = alone(of, each, prompt, OUTPUT)
            yield paper.beside(f"ulysses-ttft-{name}-{size}k", latency.ttft, BESIDE)
            rate = steady_rate(of, each, prompt, OUTPUT)
            note = "In closed form; tokens out are not said, ours are 250."
            yield paper.beside(f"ulysses-tokens-{name}-{size}k", rate, note)


def rates(paper: Published, options: Options) -> Iterator[Figure | Curve]:
    """Figure 14: completion by rate, 8,192 tokens in and 250 out."""
    seconds, chosen = (4, (1, 5)) if options.quick else (40, RATES)
    note = f"Poisson over {seconds} s (ours: neither arrivals nor duration are said); median."
    for model in ("llama-70b", "qwen-32b"):
        of = target(model)
        lines: dict[str, list[tuple[float, float]]] = {}
        for name, each in deployments(of).items():
            if name == "sp":
                continue
            for rate in chosen:
                run = replay(poisson(rate, seconds, 8192, OUTPUT), of, each)
                median = 1e3 * summary(run)["completion_p50_seconds"]
                lines.setdefault(name, []).append((float(rate), median))
        yield Curve(f"{LABELS[model]}, completion by rate", "requests/s", "ms", lines)
        triples = list(zip(*lines.values(), strict=True))
        won = sum(shift[1] <= 1.001 * min(dp[1], tp[1]) for dp, tp, shift in triples)
        yield paper.beside(f"{model}-rates-won", won / len(triples), note)
        for name, of_name in lines.items():
            for at, value in (of_name[0], of_name[-1]):
                what = f"{LABELS[model]}, {name}: median completion at {at:.0f}/s"
                yield paper.alone("14", what, value, "ms", "A picture that could not be read.")


def breakdown(paper: Published, options: Options) -> Iterator[Figure]:
    """Figure 15: where the time of a prompt goes, by context, on 8 x H100."""
    cases = {
        "llama-70b": {"4 x TP 2": "dp,tp=2,dp=4", "TP 8": "tp", "SP 4 x TP 2": "sp,sp=4,tp=2"},
        "qwen-32b": {
            "DP 8": "dp=8,tp=1,policy=base",
            "TP 8": "tp",
            "SP 8": "sp=8,tp=1,policy=base",
        },
    }
    note = "Of the devices' time of a prompt alone; the picture could not be read."
    for model, names in cases.items():
        of = target(model, "h100x8")
        for name, each in by_name(of, names).items():
            costs = cost_model(of, each)
            for size in (2, 128):
                work = Work.prefill(min(8192, 1024 * size), max(0, 1024 * size - 8192))
                cost = costs.breakdown(costs.layout.base, work)
                total = sum(cost)
                for kind in ("attention", "collectives"):
                    what = f"{LABELS[model]}, {name}, {size}k: share of {kind}"
                    yield paper.alone("15", what, getattr(cost, kind) / total, "ratio", note)


PARTS = {
    each.__name__: each
    for each in (tradeoff, contexts, ulysses, bursts, rates, breakdown, azure, mooncake)
}

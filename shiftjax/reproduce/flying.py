"""Flying Serving (arXiv 2602.22593): DP groups that bind to TP, beside static DP, TP and Shift.

The rates and lengths behind its figures were not found; tables of the authors' repository
(Picomp-lab/Flying-Serving, README) give theirs: 4,096 tokens in and 256 out, bfloat16, on four
H200, no prefix cache. `merged` is a group over all devices that was bound while serving.
"""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import NamedTuple

from shiftjax.fleet.setup import move_costs
from shiftjax.fleet.stats import Turn
from shiftjax.reproduce.figures import Curve, Figure, Options, Published
from shiftjax.sim.estimate import Workload, saturated_tokens_per_second
from shiftjax.sim.experiments import target_from
from shiftjax.sim.modelled import Target, cost_model, memory_of
from shiftjax.sim.named import deploy
from shiftjax.sim.replay import Replay, RequestRecord, replay
from shiftjax.sim.replay_metrics import makespan, peak_throughput
from shiftjax.sim.trace import TraceRequest, on_off_times, poisson, requests_at

PROMPT, OUTPUT = 4096, 256  # tokens
MILLION = 1 << 20  # tokens of context of Nemotron-8B-UltraLong-1M
MODELS = {  # the paper's, and the devices of a unit
    "Llama-70B": ("llama-70b", "bfloat16", 2),
    "Nemotron-8B": ("llama-8b", "bfloat16", 1),
    "GPT-OSS-120B": ("gpt-oss-120b", "fp8", 1),
}
BOUNDS = "bind_at=2,release_at=8"  # sequences of a unit: the fleet's policy by load
PERIOD, BURST = 30.0, 8.0  # seconds
QUIET, BUSY = 0.3, 3.0  # of the rate with which DP keeps up: 2 and 21 requests/s for Llama-70B
URGENT_EVERY = 40  # requests
BESIDE = "Ours has a front end of 2 ms a request."
GROWS = "Why DP's prompts wait so long at the highest rate was not found."
EAGER = "Published without CUDA graphs: launches bound a step at 7 ms, whatever the TP."
OURS = (
    "Their lengths were not found: 4,096 in and 256 out; bursts of three times what DP keeps up "
    "with (Llama-70B: 21 requests/s over 2; published are 10 to 30 over 2 to 5)."
)
NO_MXFP4 = "GPT-OSS in FP8, where the paper has MXFP4."
UNKNOWN_STREAMS = "How many streams saturate is not stated: 200 requests of 4,096 in and 256 out."


def target(model: str, dtype: str = "bfloat16", num_devices: int = 8) -> Target:
    """A model on some H200, with vLLM's overhead."""
    found = target_from(
        {"model": model, "machine": "h200x8", "engine": "vllm-sort", "dtype": dtype}
        | {"kv_cache_dtype": "bfloat16"}
    )
    machine = replace(found.machine, num_devices=num_devices)
    longest = max(MILLION, found.model.max_position_embeddings)
    own = replace(found.model, max_position_embeddings=longest)
    return replace(found, machine=machine, model=own, engine=found.engine.completions)


def served(of: Target, name: str, requests: Sequence[TraceRequest]) -> Replay:
    """A trace served by what a name spells."""
    return replay(requests, of, deploy(of, name, max_model_len=8192, prefix_caching=False))


def tokens_per_second(run: Replay) -> float:
    """Of prompts and outputs, over the whole run."""
    total = sum(each.num_prompt_tokens + each.num_output_tokens for each in run.requests)
    return total / makespan(run)


def median_tpot(requests: Sequence[RequestRecord]) -> float:
    """Milliseconds."""
    return 1e3 * statistics.median(each.tpot or 0.0 for each in requests)


def percentile(values: Sequence[float], share: float) -> float:
    """The value that a share of all does not exceed."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def rates(paper: Published, options: Options) -> Iterator[Figure | Curve]:
    """The repository's first table: Poisson arrivals and saturation, Llama-3-70B."""
    of, count = target("llama-70b", num_devices=4), 30 if options.quick else 200
    names = {"dp": "dp2tp2", "tp": "tp4", "merged": "fleet:2:shift:tp2"}
    curve: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    for per_second in (0.5, 1.0, 1.5):
        requests = poisson(per_second, count / per_second, PROMPT, OUTPUT, seed=1)
        for name, spelled in names.items():
            run, key = served(of, spelled, requests), f"r{per_second:g}-{name}"
            ttft = 1e3 * statistics.mean(each.ttft for each in run.requests)
            merged = "Ours binds at no cost of a step." if name == "merged" else ""
            curve[name].append((per_second, ttft))
            yield paper.beside(f"{key}-ttft", ttft, GROWS if name == "dp" else BESIDE)
            yield paper.beside(f"{key}-tpot", median_tpot(run.requests), merged)
    yield Curve("mean TTFT of Llama-70B on 4 x H200", "requests/s", "ms", curve)
    requests = [TraceRequest(0.0, PROMPT, OUTPUT)] * (60 if options.quick else 200)
    for name, spelled in names.items():
        tokens = tokens_per_second(served(of, spelled, requests))
        yield paper.beside(f"full-{name}", tokens, UNKNOWN_STREAMS)


def widths(paper: Published, options: Options) -> Iterator[Figure]:
    """The repository's second table: Llama-3.1-8B, by the width of its groups."""
    of, count = target("llama-8b", num_devices=4), 100 if options.quick else 200
    for width, name in {1: "dp4tp1", 2: "dp2tp2", 4: "tp4"}.items():
        one = served(of, name, [TraceRequest(0.0, PROMPT, OUTPUT)]).requests
        yield paper.beside(f"w{width}-ttft", 1e3 * one[0].ttft, f"{BESIDE} {EAGER}")
        yield paper.beside(f"w{width}-tpot", median_tpot(one), EAGER)
        tokens = tokens_per_second(served(of, name, [TraceRequest(0.0, PROMPT, OUTPUT)] * count))
        yield paper.beside(f"w{width}-full", tokens, f"{UNKNOWN_STREAMS} {EAGER}")


def switches(paper: Published, options: Options) -> Iterator[Figure]:
    """Table 2, the time of a live switch: ours moves what runs, theirs moves nothing."""
    of = target("llama-70b")
    fleet = deploy(of, "fleet:tp2")
    memory = memory_of(of, fleet)
    sized = fleet.with_blocks(memory.num_kv_tokens // fleet.block_size, memory)
    moves = move_costs(sized, of.machine)
    for sequences in (16, 64):
        tokens = sequences * PROMPT // 4  # of each of the four units
        seconds = moves.seconds(tokens, 4)
        note = f"Ours moves the KV of {sequences} sequences of {PROMPT:,} tokens."
        if sequences == 16:
            yield paper.beside("switch", 1e3 * seconds, note)
        else:
            what = f"Llama-70B: bind of four units with {sequences} sequences"
            yield paper.alone("table 2", what, 1e3 * seconds, "ms", note)


def contexts(paper: Published, options: Options) -> Iterator[Figure]:
    """Table 2, the longest context: KV tokens of one group."""
    of = target("llama-70b")
    tokens = {
        name: memory_of(of, deploy(of, spelled)).num_kv_tokens / 1e3
        for name, spelled in {"dp": "dp4tp2", "tp": "tp8"}.items()
    }
    note = "Ours is all that the KV of a group holds; their share of the memory is not stated."
    for name, value in tokens.items():
        yield paper.beside(f"context-{name}", value, note)
    yield paper.beside("context-gain", tokens["tp"] / tokens["dp"], note)
    fleet = deploy(of, "fleet:tp2")
    wide = 4 * memory_of(of, fleet).num_kv_tokens / 1e3
    note = "A unit keeps all weights, so a bind adds KV but frees none."
    what = "Llama-70B: longest context of a bound fleet, thousands of tokens"
    yield paper.alone("table 2", what, wide, "k", note)


@cache
def limit(model: str) -> float:
    """Requests per second with which DP keeps up, in closed form."""
    name, dtype, tp = MODELS[model]
    of = target(name, dtype)
    dp = deploy(of, static(tp)["dp"])
    workload = Workload(PROMPT, OUTPUT)
    tokens = saturated_tokens_per_second(cost_model(of, dp), dp, memory_of(of, dp), workload)
    return tokens / (PROMPT + OUTPUT)


def static(tp: int) -> Mapping[str, str]:
    """What is compared for a unit of so many devices."""
    units = 8 // tp
    return {
        "dp": f"dp{units}tp{tp}",
        "tp": "tp8",
        "shift": f"shift,sp={units},tp={tp}",
        "flying": f"fleet:load:sequential:shift:tp{tp},{BOUNDS}",
        "ours": f"fleet:tp{tp}",
    }


class Burst(NamedTuple):
    """What one deployment makes of bursts; milliseconds, tokens per second."""

    quiet_ttft: float  # median
    burst_ttft: float  # 90th percentile of all
    peak: float
    run: Replay


def changes_of(run: Replay) -> Sequence[Turn]:
    """When the groups of a fleet changed."""
    assert run.fleet is not None
    return run.fleet.turns


def bursts_of(model: str) -> dict[str, Burst]:
    """A model's deployments under a burst that none of them keeps up with."""
    preset, dtype, tp = MODELS[model]
    of, most = target(preset, dtype), limit(model)
    times = on_off_times(QUIET * most, BUSY * most, PERIOD, BURST, PERIOD)
    requests, found = requests_at(times, PROMPT, OUTPUT), {}
    for name, spelled in static(tp).items():
        run = served(of, spelled, requests)
        quiet = [each for each in run.requests if each.arrival < PERIOD - BURST]
        found[name] = Burst(
            1e3 * statistics.median(each.ttft for each in quiet),
            1e3 * percentile([each.ttft for each in run.requests], 0.9),
            peak_throughput(run),
            run,
        )
    return found


def bursts(paper: Published, options: Options) -> Iterator[Figure]:
    """Section 6.2: bursts over a quiet time, three models."""
    models = ["Llama-70B"] if options.quick else list(MODELS)
    over_tp, over_shift, quiet = [], [], []
    for model in models:
        found = bursts_of(model)
        flying, ours = found["flying"], found["ours"]
        note = f"{OURS} {NO_MXFP4}" if model.startswith("GPT") else OURS
        over_tp.append(found["tp"].burst_ttft / flying.burst_ttft)
        over_shift.append(found["shift"].burst_ttft / flying.burst_ttft)
        quiet.append(found["dp"].quiet_ttft / flying.quiet_ttft)
        if model == "Llama-70B":
            for other in ("dp", "shift"):
                ratio = flying.peak / found[other].peak
                yield paper.beside(f"peak-{other}", ratio, OURS)
        for name, each in found.items():
            place = f"{model}, bursts: {{}} of {name}"
            yield paper.alone("ours", place.format("P90 TTFT"), each.burst_ttft, "ms", note)
        ratio = found["tp"].burst_ttft / ours.burst_ttft
        what = f"{model}, bursts: P90 TTFT of TP over that of the cost policy"
        yield paper.alone("ours", what, ratio, "ratio", note)
        what = f"{model}, bursts: changes of groups by load"
        yield paper.alone("ours", what, len(changes_of(flying.run)), "times", note)
    yield paper.beside("ttft-tp-most", max(over_tp), f"{OURS} {NO_MXFP4}")
    yield paper.beside("ttft-tp-least", min(over_tp), f"{OURS} {NO_MXFP4}")
    yield paper.beside("ttft-shift", max(over_shift), f"{OURS} {NO_MXFP4}")
    yield paper.beside("quiet-dp", max(quiet), f"{OURS} {NO_MXFP4}")


def priorities(paper: Published, options: Options) -> Iterator[Figure]:
    """Table 1: a few urgent requests among many; they bind all units and others wait."""
    ratios, throughput = [], []
    for model in ["Llama-70B"] if options.quick else MODELS:
        preset, dtype, tp = MODELS[model]
        of, most = target(preset, dtype), limit(model)
        requests = [
            replace(each, priority=-1 if place % URGENT_EVERY == URGENT_EVERY // 2 else 0)
            for place, each in enumerate(poisson(0.5 * most, 20.0, PROMPT, OUTPUT))
        ]
        urgent = {}
        names = {name: static(tp)[name] for name in ("dp", "tp")}
        names["fleet"] = f"fleet:priority:hard:shift:tp{tp}"
        runs = {name: served(of, spelled, requests) for name, spelled in names.items()}
        for name, run in runs.items():
            urgent[name] = median_tpot([each for each in run.requests if each.priority < 0])
        alone = median_tpot(served(of, "tp8", [TraceRequest(0.0, PROMPT, OUTPUT)]).requests)
        ratios.append(urgent["fleet"] / urgent["tp"])
        what = f"{model}, urgent requests: TPOT over that of TP without other requests"
        note = "Who comes after the bind joins the wide group, so the urgent ones are not alone."
        yield paper.alone("table 1", what, urgent["fleet"] / alone, "ratio", note)
        throughput.append(tokens_per_second(runs["fleet"]) / tokens_per_second(runs["dp"]))
        note = f"One request of {URGENT_EVERY} is urgent, at half of DP's limit."
        what = f"{model}, urgent requests: TPOT of DP over that of the fleet"
        yield paper.alone("table 1", what, urgent["dp"] / urgent["fleet"], "ratio", note)
    note = f"{NO_MXFP4} Poisson at half of DP's limit, one request of {URGENT_EVERY} urgent."
    yield paper.beside("priority-least", min(ratios), note)
    yield paper.beside("priority-most", max(ratios), note)
    yield paper.beside("priority-throughput", min(throughput), note)


PARTS = {each.__name__: each for each in (rates, widths, switches, contexts, bursts, priorities)}

"""Pipeline stages, and other stages for prompts than for decodes, in closed form. No JAX.

`Stages` spread a model over dp replicas of pp stages of tp devices. Offline, a machine computes
prompts for a while and decodes for a while, so a request takes its prompt's share of the one and
its output's share of the other: 1 / X = prompt / X_prefill + output / X_decode. Seesaw (arXiv
2503.06433) gives each phase the stages that suit it and moves weights and KV in between, through
the host's memory and behind the computation; what it cannot hide is not modelled.
"""

from dataclasses import dataclass, replace

from shiftjax.arch.config import stages_of
from shiftjax.costs.stages import PipelineCosts
from shiftjax.costs.step import CostModel, Work
from shiftjax.options import ConfigError
from shiftjax.parallel.grid import Mode
from shiftjax.sim.deployment import Target, deploy, memory_of
from shiftjax.sim.planning import Workload


@dataclass(frozen=True)
class Stages:
    """dp replicas, each a pipeline of pp stages of tp devices."""

    dp: int
    tp: int
    pp: int


def all_stages(target: Target) -> list[Stages]:
    """Every (dp, tp, pp) of the machine with powers of two whose layers divide into stages.

    Late layers of SwiftKV need what the last early one gives: such a model is one stage.
    """
    devices, layers = target.machine.num_devices, target.model.num_layers
    sizes = [size for size in (2**k for k in range(devices.bit_length())) if devices % size == 0]
    return [
        Stages(devices // (tp * pp), tp, pp)
        for tp in sizes
        for pp in sizes
        if devices % (tp * pp) == 0 and layers % pp == 0
        if pp == 1 or not target.model.num_late_layers
    ]


def prefill_rate(target: Target, stages: Stages, workload: Workload, budget: int = 8192) -> float:
    """Prompt tokens per second of all replicas, in micro-batches of `budget` tokens."""
    work = Work(budget, 1, 1, 0, budget, budget * min(budget, workload.num_prompt_tokens) // 2)
    return stages.dp * budget / _interval(target, stages, work)


def decode_rate(
    target: Target, stages: Stages, workload: Workload, max_num_seqs: int = 256
) -> float:
    """Output tokens per second of all replicas; 0 where the weights leave no room for a sequence.

    The resident sequences are as many as the KV cache holds on average; each micro-batch is 1/PP
    of them.
    """
    one = _one_stage(target, stages)
    deployment = deploy(one, "", (1, 1, stages.tp), "base", max_num_seqs=max_num_seqs)
    length = workload.num_prompt_tokens + workload.num_output_tokens / 2
    tokens = memory_of(one, deployment).num_kv_tokens
    each = int(min(tokens / length, max_num_seqs) / stages.pp)
    if each < 1:
        return 0.0
    work = Work.decode(each, round(length))
    return stages.dp * each / _interval(target, stages, work)


def offline_requests_per_second(
    target: Target, prefill: Stages, decode: Stages, workload: Workload
) -> float:
    """Throughput with these stages for each phase; the same twice is a static deployment."""
    decoded = decode_rate(target, decode, workload)
    if decoded == 0.0:
        return 0.0
    seconds = workload.num_prompt_tokens / prefill_rate(target, prefill, workload)
    return 1 / (seconds + workload.num_output_tokens / decoded)


def best_offline(target: Target, workload: Workload, *, resharding: bool) -> float:
    """Requests per second of the best stages; with `resharding`, the best pair of equal DP."""
    stages = all_stages(target)
    pairs = [(a, b) for a in stages for b in stages if a == b or (resharding and a.dp == b.dp)]
    best = max(offline_requests_per_second(target, a, b, workload) for a, b in pairs)
    if best == 0.0:
        name, machine = target.model.name, target.machine.name
        raise ConfigError([f"{name} does not fit {machine} in any number of stages"])
    return best


def _one_stage(target: Target, stages: Stages) -> Target:
    """The fullest stage: its layers, with the embedding or the LM head."""
    config = target.model
    config = replace(
        config,
        num_layers=config.num_layers // stages.pp,
        tie_word_embeddings=config.tie_word_embeddings or stages.pp > 1,
    )
    return replace(target, model=config)


def _interval(target: Target, stages: Stages, work: Work) -> float:
    """Seconds between micro-batches: those of the slowest stage."""
    sizes = 1, stages.tp, target.machine, target.engine, target.formats
    models = stages_of(target.model, stages.pp)
    costs = PipelineCosts([CostModel(model, *sizes) for model in models])
    return costs.interval_seconds(Mode(1, 1), work)

"""Pipelines of stages, and phases of prompts and of decodes, in closed form. No JAX.

Offline, a machine computes prompts for a while and decodes for a while, so a request takes its
prompt's share of the one and its output's share of the other: 1 / X = prompt / X_prefill +
output / X_decode. Seesaw (arXiv 2503.06433) gives each phase the degrees that suit it and moves
weights and KV in between, through the host's memory; KV crosses behind the computation, as far as
it is slower than that, and weights do not. A *cycle* is as many prompts as the host holds.

A static pipeline pays for its mixed steps. With S steps in flight, one for each stage, the next
begins when the first of them has left, so S steps take S times the longest: the prompts of few
make the decodes of all others wait (`mixed_rate`). A phase has steps that are alike.
"""

import math
from collections.abc import Iterator, Sequence
from itertools import count
from typing import NamedTuple

from shiftjax.arch.config import ModelConfig
from shiftjax.costs.group_costs import GroupCosts
from shiftjax.costs.levels import send_seconds
from shiftjax.costs.machine import Machine
from shiftjax.costs.work import Work
from shiftjax.deploy.deployment import Deployment
from shiftjax.parallel.degrees import Degrees
from shiftjax.sim.modelled import Target, cost_model, memory_of, modes_of, reload_of

NEGLIGIBLE = 1e-4  # probability
MANY_TOKENS = 1 << 16  # of KV, that cross a link as one
NOTHING = Work(0, 0, 0, 0, 0, 0)


class Batch(NamedTuple):
    """Requests that are all there at once, by the means that closed forms need."""

    num_requests: int
    prompt: float  # tokens of a request
    output: float  # after the first, which comes with the prompt
    attended: float  # tokens that a prompt's token attends to
    resident: float  # tokens of a sequence while it decodes

    @classmethod
    def of(cls, lengths: Sequence[tuple[int, int]]) -> "Batch":
        """Of requests with these tokens in and out."""
        num, prompts = len(lengths), sum(prompt for prompt, _ in lengths)
        outputs = sum(output - 1 for _, output in lengths)
        pairs = sum(prompt * prompt for prompt, _ in lengths) / 2
        held = sum((output - 1) * (prompt + output / 2) for prompt, output in lengths)
        resident = held / outputs if outputs else prompts / num
        return cls(num, prompts / num, outputs / num, pairs / prompts, resident)


class Rates(NamedTuple):
    """What one configuration does with a batch; tokens per second are of all its replicas."""

    deployment: Deployment
    prefill: float  # prompt tokens per second, in full steps of prompts alone
    fill_seconds: float  # in which the stages fill with prompts, and empty
    running: int  # sequences of a replica that decode at once
    round_seconds: float  # in which each of these gets one token, in steps of decodes alone
    mixed: float  # requests per second with prompts and decodes in one step
    link: float  # tokens of KV per second that cross to the host, or back
    load_seconds: float  # of its weights, from the host; inf: its links are not known


def all_degrees(target: Target) -> list[Degrees]:
    """Every way to cut the machine by powers of two into groups that the model can be cut for."""
    devices, model = target.machine.num_devices, target.model
    sizes = [size for size in (2**k for k in range(devices.bit_length())) if devices % size == 0]
    most = model.num_layers if model.num_kv_layers is None else 1  # SwiftKV is one stage
    return [
        Degrees(devices // (pp * sp * tp), pp, sp, tp)
        for pp in sizes
        for sp in sizes
        for tp in sizes
        if devices % (pp * sp * tp) == 0 and pp <= most and sp * tp <= most_parts(model)
    ]


def most_parts(model: ModelConfig) -> int:
    """Devices that a group can have, so that each has a query head, and an expert."""
    return min(model.num_heads, model.experts.num if model.experts else model.num_heads)


def rates_of(target: Target, deployment: Deployment, batch: Batch) -> Rates | None:
    """What a configuration does with prompts alone, decodes alone, and both in one step.

    None where it has no room for a sequence, or for the prompts in flight.
    """
    costs, memory = cost_model(target, deployment), memory_of(target, deployment)
    dp, stages = deployment.dp, deployment.pp
    knows_link = bool(target.machine.to_host and target.machine.from_host)
    tokens = deployment.max_num_batched_tokens
    fits = min(memory.num_kv_tokens / batch.resident, deployment.max_num_seqs)
    if memory.num_kv_tokens < tokens * stages or fits < 1:
        return None
    running = max(1, min(int(fits), math.ceil(batch.num_requests / dp)))
    step = _prompts(batch, min(tokens, math.ceil(batch.num_requests * batch.prompt / dp)))
    seconds, alone = _seconds(costs, deployment, step), _serial_seconds(costs, deployment, step)
    batches = min(stages, running)
    decodes = Work.decode(math.ceil(running / batches), round(batch.resident))
    return Rates(
        deployment,
        prefill=dp * step.num_tokens / seconds,
        fill_seconds=alone - seconds,
        running=running,
        round_seconds=_round_seconds(costs, deployment, decodes, batches),
        mixed=mixed_rate(costs, deployment, batch, running / stages),
        link=_link_rate(target.machine, deployment) if knows_link else math.inf,
        load_seconds=reload_of(target, deployment).seconds if knows_link else math.inf,
    )


def _link_rate(machine: Machine, deployment: Deployment) -> float:
    token_bytes = deployment.block_bytes / deployment.block_size
    return deployment.dp * MANY_TOKENS / send_seconds(machine.to_host, MANY_TOKENS * token_bytes)


def mixed_rate(costs: GroupCosts, deployment: Deployment, batch: Batch, running: float) -> float:
    """Requests per second of all replicas with `running` decodes in each step, and prompts.

    Of one stage, a request's share of either kind of step. Of several, in the time in which all
    micro-batches step once, `n` requests end, and as many prompts come, at random to any of the
    steps. A step takes a prompt, or the budget's share of one; the longest of S says how long all
    take. Where more come than steps hold, every step is full.
    """
    stages = deployment.pp
    room = deployment.max_num_batched_tokens - running
    full = _seconds(costs, deployment, _with_decodes(_prompts(batch, round(room)), running, batch))
    decodes = _with_decodes(NOTHING, running, batch)
    if stages == 1:
        with_prompts = batch.prompt / room  # steps that a request's prompt takes
        alone = max(0.0, batch.output / running - with_prompts)  # all decode in the former, too
        return deployment.dp / (with_prompts * full + alone * _seconds(costs, deployment, decodes))
    part = min(batch.prompt, room)
    ending = running * stages / max(1.0, batch.output)
    mean = ending * batch.prompt / (stages * part)  # parts that come to a step
    if mean * part >= room:
        return deployment.dp * room / (batch.prompt * full)
    interval = 0.0
    for number, probability in enumerate(_most_of(stages, mean)):
        tokens = min(number * part, room)
        work = _prompts(batch, round(tokens)) if tokens else NOTHING
        seconds = _seconds(costs, deployment, _with_decodes(work, running, batch))
        interval += probability * seconds
    rate = deployment.dp * ending / (stages * interval)
    return min(rate, deployment.dp * room / (batch.prompt * full))


def _most_of(num: int, mean: float) -> Iterator[float]:
    """Probabilities that the largest of `num` Poisson numbers is 0, 1, 2 ..."""
    term, below, before = math.exp(-mean), 0.0, 0.0
    for number in count(1):
        below += term
        yield below**num - before
        before, term = below**num, term * mean / number
        if before > 1 - NEGLIGIBLE:
            return


def _prompts(batch: Batch, num_tokens: int) -> Work:
    """A step of prompts alone, some of them cut."""
    rows = max(1, round(num_tokens / batch.prompt))
    pairs = round(num_tokens * batch.attended)
    return Work(num_tokens, rows, rows, 0, num_tokens, pairs)


def _with_decodes(work: Work, num: float, batch: Batch) -> Work:
    return work._replace(
        num_tokens=round(work.num_tokens + num),
        num_rows=round(work.num_rows + num),
        num_sequences=round(work.num_sequences + num),
        context_tokens=round(num * batch.resident),
        num_decodes=round(num),
    )


def _seconds(costs: GroupCosts, deployment: Deployment, work: Work) -> float:
    """Of a step in a stream of them, in the mode that suits it best."""
    return min(costs.seconds(mode, work) for mode in modes_of(costs, deployment))


def _serial_seconds(costs: GroupCosts, deployment: Deployment, work: Work) -> float:
    return min(costs.serial_seconds(mode, work) for mode in modes_of(costs, deployment))


def _round_seconds(costs: GroupCosts, deployment: Deployment, decodes: Work, batches: int) -> float:
    """In which each of so many micro-batches steps once.

    They follow each other at the interval; and one waits for its tokens, but not for a host that
    prepares its next step meanwhile.
    """
    alone = _serial_seconds(costs, deployment, decodes)
    if costs.engine.overlaps:
        alone -= costs.host_seconds(decodes)
    return max(batches * _seconds(costs, deployment, decodes), alone)


def static_seconds(rates: Rates, batch: Batch) -> float:
    """Seconds of a batch in one configuration.

    As many as run at once begin with their prompts; then one comes when one ends; the last ones
    decode to their end.
    """
    first = min(batch.num_requests, rates.running * rates.deployment.dp)
    seconds = _prefill_seconds(rates, batch, first) + batch.output * rates.round_seconds
    return seconds + (batch.num_requests - first) / rates.mixed


class Phased(NamedTuple):
    """A batch in two configurations."""

    prefill_seconds: float
    decode_seconds: float
    cycle: int  # requests that the host holds
    num_switches: int
    switch_seconds: float  # of all switches

    @property
    def seconds(self) -> float:
        """All in all."""
        return self.prefill_seconds + self.decode_seconds + self.switch_seconds

    @property
    def one_switch(self) -> float:
        """Seconds of a switch, on average."""
        return self.switch_seconds / self.num_switches


def phased(prefill: Rates, decode: Rates, batch: Batch, host_bytes: float) -> Phased | None:
    """What two configurations do in turns; None where the host holds no prompt.

    The devices begin in that of the prompts. KV crosses while they compute.
    """
    first, dp = prefill.deployment, decode.deployment.dp
    token_bytes = first.host_block_bytes / first.block_size
    cycle = min(int(host_bytes / (batch.prompt * token_bytes)), batch.num_requests)
    if not cycle:
        return None
    num_cycles = math.ceil(batch.num_requests / cycle)
    prompts, each = batch.num_requests * batch.prompt, batch.num_requests / num_cycles
    computing = num_cycles * _prefill_seconds(prefill, batch, each)
    lives = max(1.0, each / (decode.running * dp))  # of sequences, one after the other
    decoding = num_cycles * lives * batch.output * decode.round_seconds
    return Phased(
        max(computing, prompts / prefill.link),
        max(decoding, prompts / decode.link),
        cycle,
        2 * num_cycles - 1,
        num_cycles * decode.load_seconds + (num_cycles - 1) * prefill.load_seconds,
    )


def _prefill_seconds(rates: Rates, batch: Batch, num_requests: float) -> float:
    return num_requests * batch.prompt / rates.prefill + rates.fill_seconds

"""Whether devices shall split positions of KV or hold copies, by what costs predict. No JAX."""

import logging
from dataclasses import replace
from typing import NamedTuple

from shiftjax.arch.contexts import longest_context
from shiftjax.config import EngineConfig
from shiftjax.costs.work import Work
from shiftjax.deploy.deployment import Deployment
from shiftjax.deploy.position_rule import ByRule, split_of, why_by_rule
from shiftjax.deploy.resolve import resolve
from shiftjax.options import ConfigError
from shiftjax.sim.estimate import Estimate, Workload, estimate
from shiftjax.sim.modelled import Target, cost_model

SEQUENCES = 64  # that decode together, if as many may
CONTEXTS = tuple(1 << power for power in range(7, 21))  # of each of them
PROMPT, OUTPUT = 4096, 250  # tokens of the requests for which `auto` decides
LEAST_GAIN = 1.02  # predictions that differ by less are the same
# Latents are split but where decodes of contexts of some length take longer by more than that.
LATENT_CONTEXT, MOST_LOSS = 8192, 1.1
logger = logging.getLogger(__name__)


class SplitChoice(NamedTuple):
    """A deployment under one workload, whose devices split positions, and hold copies."""

    split: Estimate
    whole: Estimate

    @property
    def gain(self) -> float:
        """Tokens per second of many requests, over those with copies."""
        return self.split.tokens_per_second / self.whole.tokens_per_second

    @property
    def loss(self) -> float:
        """Of a request alone: its TTFT and TPOT over those with copies, multiplied."""
        times = self.split.tpot_seconds / self.whole.tpot_seconds
        return times * self.split.ttft_seconds / self.whole.ttft_seconds

    @property
    def pays(self) -> bool:
        """Whether many requests gain more than one alone loses; or copies hold no request."""
        if not (self.split.fits and self.whole.fits):
            return self.split.fits
        return self.gain > LEAST_GAIN * self.loss

    @property
    def reason(self) -> str:
        """Why it pays, or not."""
        if not self.split.fits:
            return f"parts have {self.split.why_not}"
        if not self.whole.fits:
            return f"copies have {self.whole.why_not}"
        gain, loss = (f"{100 * (ratio - 1):+.0f}%" for ratio in (self.gain, self.loss))
        return f"many requests get {gain} tokens/s, and TTFT x TPOT of one alone is {loss}"


def choice_of(target: Target, deployment: Deployment, workload: Workload) -> SplitChoice | None:
    """Return both ways of a deployment, whichever it has; None where devices have no copies.

    With as many blocks as fit.
    """
    whole = replace(deployment, num_blocks=0)
    if deployment.layout.by_position:
        size = deployment.block_size // deployment.layout.position_ways
        hashed = size if deployment.hash_size else 0
        layout = replace(deployment.layout, by_position=False)
        whole = replace(whole, layout=layout, block_size=size, hash_size=hashed)
    split = split_of(whole)
    if split is None:
        return None
    return SplitChoice(*(estimate(target, each, workload) for each in (split, whole)))


def with_chosen_split(config: EngineConfig, target: Target) -> EngineConfig:
    """The settings with `kv_split` of `auto` by costs, where the rule leaves it open.

    As they are where something else does not fit: whoever resolves them says why.
    """
    is_open = config.cache.kv_split == "auto" and not config.fleet.fleet
    is_open = is_open and config.parallel.phases is None
    rule = why_by_rule(target.model, config.cache.num_blocks)
    if not is_open or not (rule is None or rule.splits):
        return config
    try:
        copies = replace(config, cache=replace(config.cache, kv_split="replicate"))
        whole = resolve(copies, target.model, target.devices)
    except ConfigError:
        return config
    if split_of(whole) is None:
        return config
    most = longest_context(target.model, config.model.max_model_len)
    prompt = max(1, min(PROMPT, most - OUTPUT))
    choice = choice_of(target, whole, Workload(prompt, min(OUTPUT, max(1, most - prompt))))
    assert choice is not None
    found = auto_of(target, choice)
    does = "split positions" if found.splits else "hold copies"
    logger.info("kv_split = auto: devices %s by predicted costs: %s", does, found.words)
    if rule is None and not found.splits:
        return config  # the rule may still split, for the longest sequence
    kv_split = "position" if found.splits else "replicate"
    return replace(config, cache=replace(config.cache, kv_split=kv_split))


def auto_of(target: Target, choice: SplitChoice) -> ByRule:
    """What `auto` does with a deployment, where costs are known, and why.

    Copies of latents must hold the longest sequence.
    """
    whole, split = choice.whole.deployment, choice.split.deployment
    rule = why_by_rule(target.model, None)
    if rule is None:
        return ByRule(choice.pays, choice.reason)
    if not rule.splits or whole.longest_in(choice.whole.memory) < whole.max_model_len:
        return rule
    num = min(SEQUENCES, whole.max_num_seqs)
    both = (_decode(target, each, num, LATENT_CONTEXT) for each in (split, whole))
    loss = next(both) / next(both)
    if loss <= MOST_LOSS:
        return rule
    words = f"decodes of {num} sequences of {LATENT_CONTEXT:,} tokens would take"
    return ByRule(False, f"{words} {100 * (loss - 1):.0f}% longer")


def positions_in_words(target: Target, best: Deployment, workload: Workload) -> str:
    """KV tokens and a decode step of a group, both ways, and what `auto` does.

    "" where devices have no copies.
    """
    choice = choice_of(target, best, workload)
    if choice is None:
        return ""
    context, num = workload.num_tokens, min(SEQUENCES, best.max_num_seqs)
    split = choice.split.deployment
    tokens = [max(0, each.memory.num_kv_tokens) for each in choice]
    ms = [1e3 * _decode(target, each.deployment, num, context) for each in choice]
    alone = [1e3 * each.tpot_seconds for each in choice]
    crossing = _crossing(target, choice, num)
    quicker = f"quicker from {crossing:,} tokens of each" if crossing else "never quicker"
    does = auto_of(target, choice)
    more = "" if does.words == choice.reason else f"; {choice.reason}"
    return (
        f"--kv-split position: {tokens[0]:,} tokens of KV a group, with copies {tokens[1]:,}; "
        f"decodes of {num} sequences of {context:,} tokens take {ms[0]:.1f} ms, with copies "
        f"{ms[1]:.1f}, and are {quicker}; alone {alone[0]:.1f} ms a token, with copies "
        f"{alone[1]:.1f}{_caveat(target)}. {_exchanged(target, split, num, context)}"
        f"--kv-split auto "
        f"{'splits' if does.splits else 'holds copies'}: {does.words}{more}"
    )


def _exchanged(target: Target, split: Deployment, num: int, context: int) -> str:
    """Which steps exchange normalisers alone, and what decodes gain by it; "" if none does."""
    costs, shift = cost_model(target, split).stages[0], split.layout.shift
    sizes = [b.tokens for b in split.buckets if costs.query_modes(shift, b[:2]) != shift]
    if not sizes:
        return ""
    never = replace(split, layout=replace(split.layout, normalisers=False))
    gains = [
        1e3 * (_decode(target, never, n, context) - _decode(target, split, n, context))
        for n in (1, num)
    ]
    return (
        f"In SHIFT decodes exchange normalisers alone in steps of up to {max(sizes):,} tokens: "
        f"of 1 sequence these take {gains[0]:.2f} ms less, of {num} {gains[1]:.2f} ms. "
    )


def _caveat(target: Target) -> str:
    if not target.devices.has_kernels or target.model.latent is None:
        return ""
    return ", if latents had a kernel for prompts: they run as XLA loops, several times slower"


def _decode(target: Target, deployment: Deployment, num: int, context: int) -> float:
    """Seconds of a decode step in its better mode."""
    costs, work = cost_model(target, deployment), Work.decode(num, context)
    return min(costs.seconds(mode, work) for mode in deployment.layout.modes)


def _crossing(target: Target, choice: SplitChoice, num: int) -> int:
    """The least of `CONTEXTS` with which decodes are quicker by split positions; 0: none is."""
    both = choice.split.deployment, choice.whole.deployment
    for context in CONTEXTS:
        split, whole = (_decode(target, each, num, context) for each in both)
        if split < whole:
            return context
    return 0

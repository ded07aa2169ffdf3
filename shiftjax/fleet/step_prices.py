"""Seconds of the steps that groups would take, by their width, in the sizes they would have.

No JAX.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from shiftjax.core.policy import Policy
from shiftjax.core.step_sizes import Demand, StepSizes, Turn
from shiftjax.costs.group_costs import GroupCosts
from shiftjax.costs.work import Work
from shiftjax.parallel.grid import Mode

ROUNDS = 12  # of the search for the seconds between looks, at most
FURTHER = 1.4  # times what was looked at before
CLOSE = 0.01  # it ends with differences of less than this part
ROUNDED_TOKENS = 64  # of prompts, for which predictions are kept
ROUNDED_DECODES = 4  # sequences
MOST_PROMPTS = 8  # that a queue is thought to have, for its size
TOLD_APART = 3  # numbers of prompts that are found: more count as their mean
LENGTHS = 0.5, 0.9, 1.6  # of prompts, of their mean: padding would see no other than that
NO_CHANCE = 1e-3  # that more are found


class Coming(NamedTuple):
    """What a group is thought to be given while it decodes."""

    rate: float  # requests per second
    prompt: float  # tokens of one
    part: float  # of all requests, which this is
    slots: float  # requests that a step has room for


class Steps(NamedTuple):
    """Steps in a row that compute prompts beside decodes; may be means."""

    num: float
    seconds: float  # of all


class StepPrices:
    """What steps of groups take; widths are keys.

    `sizes` says how large those with prompts are; a group has `most_tokens` in one.
    """

    def __init__(
        self,
        costs: Mapping[int, GroupCosts],
        modes: Mapping[int, Sequence[Mode]],
        policies: Mapping[int, Policy],
        sizes: Mapping[int, StepSizes],
        most_tokens: int,
    ):
        self.costs, self.sizes, self.most_tokens = costs, sizes, most_tokens
        self._modes, self._policies = modes, policies
        self._rates: dict[int, float] = {}
        self._seconds: dict[tuple[int, int, int], float] = {}
        self._chosen: dict[tuple[int, int, int, int, int], Steps] = {}

    def forget(self) -> None:
        """Ask the costs again."""
        for kept in (self._rates, self._seconds, self._chosen):
            kept.clear()

    def prefill_rate(self, width: int) -> float:
        """Tokens per second of prompts in full steps."""
        if width not in self._rates:
            taken = self._step_seconds(width, Work.prefill(self.most_tokens))
            self._rates[width] = self.most_tokens / taken
        return self._rates[width]

    def decode_seconds(self, width: int, num_sequences: int, context: int) -> float:
        """Seconds of a step that decodes so many sequences."""
        return self._step_seconds(width, Work.decode(max(1, num_sequences), max(1, context)))

    def prompt_seconds(self, width: int, num: float, tokens: float, each: float) -> float:
        """Seconds until prompts of so many tokens, `each` of one, are done beside `num` decodes.

        Less than one prompt is a share of the time in which there is one.
        """
        if tokens <= 0:
            return 0.0
        if not self.sizes[width].chooses:
            return tokens / self.prefill_rate(width)
        share = min(1.0, tokens / each)
        return share * self._steps(width, num, tokens / share, round(tokens / each)).seconds

    def token_seconds(self, width: int, num: float, context: float, coming: Coming) -> float:
        """Seconds between two tokens of `num` sequences in a group, while prompts keep coming.

        Its part of them comes at random, and no faster than `slots` per look are left by others:
        in d seconds c = d * rate, so that a share 1 - exp(-c) of looks finds prompts. These take k
        steps until the next look, and longer ones, and so more come meanwhile: d is looked for
        from below. Where there is none, because more come than can be computed, d grows far enough
        that all steps have prompts.
        """
        look = self.decode_seconds(width, round(num), round(context))
        reading = look - self.decode_seconds(width, round(num), 1)  # beside prompts, too
        step, before, lacking = look, look, 0.0
        taken = Steps(1.0, look)
        for _ in range(ROUNDS):
            taken = self._look(width, num, step, reading, look, taken.num, coming)
            excess = taken.seconds - look
            if excess <= CLOSE * look:
                if excess < 0 < lacking:  # between this one and the one before
                    look -= (look - before) * excess / (excess - lacking)
                    taken = self._look(width, num, step, reading, look, taken.num, coming)
                break
            before, lacking = look, excess
            look = max(taken.seconds, FURTHER * look)
        return taken.seconds / taken.num

    def _look(
        self,
        width: int,
        num: float,
        step: float,
        reading: float,
        look: float,
        steps: float,
        coming: Coming,
    ) -> Steps:
        """Steps until the next look, if it was so long until this one; `step`: decodes alone."""
        come = min(coming.rate * coming.part * look, coming.slots * steps)
        if come <= 0:
            return Steps(1.0, step)
        in_step = self.costs[width].engine.replicas_in_step  # everybody waits for anyone's prompts
        share = -math.expm1(-come / coming.part if in_step else -come)
        found = self._found(width, num, come, coming.prompt)
        took = found.seconds + found.num * reading
        seconds = share * max(found.num * step, took) + (1 - share) * step
        return Steps(share * found.num + 1 - share, seconds)

    def _found(self, width: int, num: float, come: float, each: float) -> Steps:
        """What the prompts take that a look finds, where so many come in one, and it finds some."""
        share = -math.expm1(-come)
        if not self.sizes[width].chooses:
            return Steps(1, self._prompt_seconds(width, num + each * come / share, each))
        steps, seconds, left, more = 0.0, 0.0, 1.0, come / share
        chance = math.exp(-come) / share
        for count in range(1, TOLD_APART + 1):
            chance *= come / count
            took = self._spread(width, num, each, count)
            steps, seconds = steps + chance * took.num, seconds + chance * took.seconds
            left, more = left - chance, more - chance * count
        if left > NO_CHANCE:
            took = self._spread(width, num, each, more / left)
            steps, seconds = steps + left * took.num, seconds + left * took.seconds
        return Steps(steps, seconds)

    def _spread(self, width: int, num: float, each: float, count: float) -> Steps:
        """What `count` prompts take that are longer and shorter than `each`: a mean."""
        took = [self._steps(width, num, part * count * each, round(count)) for part in LENGTHS]
        num_steps, seconds = map(sum, zip(*took, strict=True))
        return Steps(num_steps / len(took), seconds / len(took))

    def _steps(self, width: int, num: float, tokens: float, count: int) -> Steps:
        """What `count` prompts of so many tokens take beside `num` decodes."""
        decodes = -(-int(num) // ROUNDED_DECODES) * ROUNDED_DECODES
        rounded = max(1, round(tokens / ROUNDED_TOKENS)) * ROUNDED_TOKENS
        length = tokens / max(1, count)  # of one
        each = max(1, round(length / ROUNDED_TOKENS)) * ROUNDED_TOKENS
        key = width, decodes, rounded, min(MOST_PROMPTS, max(1, count)), each
        if key not in self._chosen:
            self._chosen[key] = self._choose(*key)
        return self._chosen[key]

    def _choose(self, width: int, decodes: int, tokens: int, count: int, each: int) -> Steps:
        prompts = [(tokens // count, 0)] * count
        most = min(self.most_tokens, decodes + tokens)
        demand = Demand(Turn(math.inf), decodes, 0, prompts, 0, 0, count, max(most, decodes + 1))
        size = self.sizes[width].foresee(demand)
        num = max(1, -(-tokens // max(1, size - decodes)))
        rest = tokens - (num - 1) * (size - decodes)
        last = self._prompt_seconds(width, decodes + rest, each)
        return Steps(num, (num - 1) * self._prompt_seconds(width, size, each) + last)

    def _prompt_seconds(self, width: int, num_tokens: float, each: float) -> float:
        """Seconds of a step of prompts, of at most as many tokens as steps may have.

        They are chunks of prompts of `each` tokens, from anywhere in them.
        """
        size = min(self.most_tokens, -(-max(1, int(num_tokens)) // ROUNDED_TOKENS) * ROUNDED_TOKENS)
        length = max(1, round(each / ROUNDED_TOKENS)) * ROUNDED_TOKENS
        key = width, size, length
        if key not in self._seconds:
            chunk = min(size, length)
            read, pairs = size / chunk * (length + chunk) / 2, size * length / 2
            num = -(-size // length)
            work = Work(size, num, num, 0, round(read), round(pairs))
            self._seconds[key] = self._step_seconds(width, work)
        return self._seconds[key]

    def _step_seconds(self, width: int, work: Work) -> float:
        """Of a step of one of several equal groups, whose steps one host prepares in turn."""
        costs = self.costs[width]
        mode = self._policies[width].mode_of(work, self._modes[width], 0, None)
        if costs.engine.replicas_in_step:
            return costs.seconds(mode, work)
        host = costs.host_seconds(work) * (max(self.costs) // width)
        device = costs.device_seconds(mode, work)
        return max(device, host) if costs.engine.overlaps else device + host

"""Several hosts: one engine over all of them, or a server on each behind a router. No JAX.

A replica on each host moves nothing between hosts, so it is better wherever it can be had: one
engine is for a model that no host holds, and for a request whose KV none does.
"""

from dataclasses import replace
from typing import Any

from shiftjax.options import ConfigError
from shiftjax.sim.deployment import Target
from shiftjax.sim.planning import Estimate, Workload, estimate, recommend


def hosts_in_words(target: Target, workload: Workload, **budgets: Any) -> str:
    """Which of the two for these requests, with what both are predicted to do; "" of one host."""
    hosts = target.machine.num_hosts
    if hosts == 1:
        return ""
    over_all = recommended(target, workload, **budgets)
    alone = recommended(replace(target, machine=target.machine.one_host), workload, **budgets)
    if over_all is None:
        return ""
    if alone is None:
        needed = workload.num_prompt_tokens + workload.num_output_tokens
        words = f"no host alone has room for the model and a request of {needed:,} tokens"
        return f"one engine over {hosts} hosts: {words}"
    own, room = alone.deployment, over_all.memory.num_kv_tokens
    longest = alone.memory.num_kv_tokens
    limit = f"is for requests of more than {longest:,} tokens: it holds {room:,}"
    if min(room, target.model.max_position_embeddings) <= longest:
        limit = "has room for no longer requests"
    return (
        f"replicas: a server on each of {hosts} hosts (--sp {own.sp} --tp {own.tp}) behind a "
        f"router has {_figures(alone, hosts)}; one engine over all of them has "
        f"{_figures(over_all)}, and {limit}"
    )


def _figures(one: Estimate, times: int = 1) -> str:
    return (
        f"{times * one.tokens_per_second:,.0f} tokens/s when full, and for a request alone "
        f"{1e3 * one.ttft_seconds:.0f} ms to the first token, {1e3 * one.tpot_seconds:.1f} ms "
        "for each after it"
    )


def recommended(target: Target, workload: Workload, **budgets: Any) -> Estimate | None:
    """What a plan recommends, with all modes to choose from; None: there is no room."""
    try:
        found = recommend(target, workload, **budgets)
    except ConfigError:  # not even the weights fit
        return None
    return found and estimate(target, replace(found[0], policy="cost"), workload)

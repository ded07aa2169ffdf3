"""What it would change if devices split positions of KV instead of holding copies. No JAX."""

from dataclasses import replace

from shiftjax.costs.work import Work
from shiftjax.deploy.deployment import Deployment
from shiftjax.deploy.position_rule import split_of
from shiftjax.sim.estimate import Workload
from shiftjax.sim.modelled import Target, cost_model, memory_of

SEQUENCES = 64  # that decode together, if as many may


def positions_in_words(target: Target, best: Deployment, workload: Workload) -> str:
    """KV tokens and a decode step of a group, both ways; "" where devices have no copies."""
    whole = best
    if best.layout.by_position:
        size = best.block_size // best.layout.position_ways
        hashed = size if best.hash_size else 0
        layout = replace(best.layout, by_position=False)
        whole = replace(best, layout=layout, block_size=size, hash_size=hashed)
    split = split_of(whole)
    if split is None:
        return ""
    context = workload.num_tokens
    tokens, seconds = zip(*(_figures(target, it, context) for it in (split, whole)), strict=True)
    text = (
        f"--kv-split position: {tokens[0]:,} tokens of KV a group, with copies {tokens[1]:,}; "
        f"decodes of {_sequences(best)} sequences of {context:,} tokens take {seconds[0] * 1e3:.1f}"
        f" ms, with copies {seconds[1] * 1e3:.1f}"
    )
    if target.devices.has_kernels:
        if whole.layout.model.latent is not None:
            text += ", if latents had kernels: there are none yet, and XLA loops are slower"
        else:
            text += "; prompts then run as XLA loops, several times slower"
    return text


def _sequences(deployment: Deployment) -> int:
    return min(SEQUENCES, deployment.max_num_seqs)


def _figures(target: Target, deployment: Deployment, context: int) -> tuple[int, float]:
    """KV tokens, and seconds of a decode step in its better mode."""
    costs, work = cost_model(target, deployment), Work.decode(_sequences(deployment), context)
    seconds = min(costs.seconds(mode, work) for mode in deployment.layout.modes)
    return max(0, memory_of(target, deployment).num_kv_tokens), seconds

"""How much goes into a step where the settings leave it open. No JAX."""

from typing import NamedTuple

from shiftjax.config import SERVER_BUDGETS, EngineConfig

# Of a device's memory, as JAX has it, which takes 0.75 to 0.95 of a card's: those of 80 GB.
LARGE_BYTES = 50 * 2**30


class Budgets(NamedTuple):
    """The most sequences and tokens of a step of one group."""

    max_num_seqs: int
    max_num_batched_tokens: int


OF_CPUS = Budgets(64, 1024)
OF_GPUS = Budgets(256, 2048)
OF_LARGE_GPUS = Budgets(**SERVER_BUDGETS)


def budgets_for(is_cpu: bool, total_bytes: int) -> Budgets:
    """What suits a device with so many bytes of memory.

    Tokens on GPUs are those of vLLM 0.29's server, where 70 GiB divide large from small.
    """
    if is_cpu:
        return OF_CPUS
    return OF_LARGE_GPUS if total_bytes >= LARGE_BYTES else OF_GPUS


def chosen_budgets(config: EngineConfig, suited: Budgets) -> Budgets:
    """What is set. What is not suits the device, and leaves a token for every sequence.

    `token_buckets` without a number of tokens say it: their last.
    """
    seqs = config.scheduler.max_num_seqs
    tokens = config.step_tokens or max(suited.max_num_batched_tokens, seqs or 0)
    return Budgets(seqs or min(suited.max_num_seqs, tokens), tokens)

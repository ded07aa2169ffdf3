"""`phases = auto`: the degrees that are predicted to suit the requests of a file."""

import asyncio
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from serving.cli.batch_formats import Line
from serving.cli.batch_lines import read_wish
from serving.run.start import chat_template, look
from serving.server.dialogue import Dialogue
from serving.server.errors import ServeError
from serving.server.options import ServerOptions
from serving.server.prompts import Prompts
from serving.server.service import TEXT_THREADS
from serving.server.texts import Texts
from shiftjax.arch.contexts import longest_context
from shiftjax.config import EngineConfig
from shiftjax.core.policies import POLICIES
from shiftjax.costs.machine_files import MACHINE_OF_DEVICE, load_engine, load_machine
from shiftjax.deploy.resolve import formats_in
from shiftjax.device.sizing import host_memory
from shiftjax.model_files import ModelFiles
from shiftjax.parallel.degrees import AUTO_PHASES
from shiftjax.phases.configurations import HOST_SHARE
from shiftjax.settings import make_virtual_devices
from shiftjax.sim.modelled import Target
from shiftjax.sim.phase_choice import Candidate, choose_phases

PREDICTED = {kind: name for kind, name in MACHINE_OF_DEVICE.items() if kind != "cpu"}
BUDGETS = ("max_num_seqs", "max_num_batched_tokens", "block_size", "memory_fraction")


def settle_phases(
    config: EngineConfig, lines: Sequence[Line], server: ServerOptions
) -> EngineConfig:
    """The settings with degrees in the place of `phases = auto`; says on stderr why these.

    Where nothing can be predicted, or there is nothing to compute, no phases at all. Raises what
    `look` raises, and ConfigError for a machine file without links to the host.
    """
    if config.parallel.phases != AUTO_PHASES:
        return config
    files = look(config, server, "generate")
    make_virtual_devices(config)
    import jax

    from shiftjax.local_deployment import host_copy_bytes

    devices = jax.devices()[: config.parallel.devices]
    kind = devices[0].device_kind
    machine = config.scheduler.machine or PREDICTED.get(kind)
    if machine is None:
        _say(
            f"nothing is predicted for {kind}, so prompts and decodes share degrees: "
            "name a pair (--phases pp4tp2:tp8), or a machine file (--machine)"
        )
        return _with_degrees(config, None)
    longest = longest_context(files.source.config, config.model.max_model_len)
    lengths = asyncio.run(_lengths(lines, files, server, longest))
    if not lengths:
        return _with_degrees(config, None)
    options = config.flat()
    budgets = {name: options[name] for name in BUDGETS} | {"max_model_len": longest}
    target = Target(
        files.source.config,
        replace(load_machine(machine), num_devices=len(devices)),
        load_engine("shiftjax"),
        formats_in(config, files.source.config),
    )
    free = host_memory()[1] - host_copy_bytes(target.model, target.formats)
    host_bytes = config.cache.host_bytes or int(HOST_SHARE * max(0, free))
    choice = choose_phases(target, lengths, host_bytes, **budgets)
    _say(f"predicted on {len(devices)} devices of {target.machine.name}:", *choice.lines())
    return _with_degrees(config, choice.chosen)


def _say(*lines: str) -> None:
    for line in lines:
        print(f"phases: {line}", file=sys.stderr)


async def _lengths(
    lines: Sequence[Line], files: ModelFiles, server: ServerOptions, longest: int
) -> list[tuple[int, int]]:
    """(prompt tokens, most output tokens) of the requests of all lines that can be run."""
    template = chat_template(files.tokenizer, server)
    with ThreadPoolExecutor(TEXT_THREADS) as threads:
        texts = Texts(files.tokenizer, template, longest, threads)
        prompts = Prompts(texts, Dialogue(files.tokenizer, template, server))
        found = [await _lengths_of(line, prompts, longest) for line in lines]
    return [each for lengths in found for each in lengths]


async def _lengths_of(line: Line, prompts: Prompts, longest: int) -> list[tuple[int, int]]:
    """Of one line; nothing of a line that will be refused."""
    if line.problem is not None:
        return []
    try:
        wish = read_wish(line)
        sizes = [len(ids) for _, ids in await prompts.of(wish)]
    except ServeError:
        return []
    n, most = wish.sampling.n, wish.sampling.max_tokens or longest
    return [(size, n * min(most, longest - size)) for size in sizes if 0 < size < longest]


def _with_degrees(config: EngineConfig, chosen: Candidate | None) -> EngineConfig:
    """In these degrees; None: in those that suit the devices as ever.

    Settings that only the choice, or only phases, have read are left out.
    """
    parallel, cache, scheduler = config.parallel, config.cache, config.scheduler
    is_pair = chosen is not None and chosen.phases is not None
    degrees = {} if chosen is None or is_pair else chosen.prefill._asdict()
    phases = chosen.name if chosen is not None and is_pair else None
    needs_costs = POLICIES[scheduler.mode_policy].needs_costs(config.threshold_tokens)
    is_read = is_pair or cache.prefix_caching or cache.preemption == "swap"
    return replace(
        config,
        parallel=replace(parallel, phases=phases, **degrees),
        cache=cache if is_read else replace(cache, host_memory="0"),
        scheduler=scheduler if needs_costs else replace(scheduler, machine=None),
    )

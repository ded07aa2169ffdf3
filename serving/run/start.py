"""Starting an engine with something to look at meanwhile."""

import resource
from typing import TYPE_CHECKING, Any

from serving.server.options import ServerOptions, check_server
from shiftjax.config import EngineConfig
from shiftjax.control.tasks import Task, task_of
from shiftjax.options import ConfigError

if TYPE_CHECKING:
    from shiftjax.embedder import Embedder
    from shiftjax.llm import LLM

LEAST_ADDRESS_SPACE = 2 << 30  # bytes that JAX's libraries, threads and a tiny model take


class StartError(Exception):
    """The engine cannot be started, though settings and model are as they should be."""


def open_llm(config: EngineConfig, server: ServerOptions | None = None) -> "LLM":
    """Load and compile, with bars on a terminal; `server` are settings that came with `config`.

    Raises StartError for want of memory, and ConfigError for settings of no use for the model.
    """
    if server is not None:
        _check_server(config, server, "generate")
    return _opened(config, "LLM")


def open_embedder(config: EngineConfig, server: ServerOptions | None = None) -> "Embedder":
    """The same for embeddings."""
    if server is not None:
        _check_server(config, server, "embed")
    return _opened(config, "Embedder")


def open_model(config: EngineConfig, server: ServerOptions) -> "LLM | Embedder":
    """Open what generates as a language model and what embeds as an embedder."""
    return _opened(config, "LLM" if _check_server(config, server) == "generate" else "Embedder")


def _check_server(config: EngineConfig, server: ServerOptions, task: Task | None = None) -> Task:
    """The task, by default the model's own. Raises ConfigError for settings of another one."""
    from shiftjax.weights.resolve import open_source, resolve_model

    model = open_source(resolve_model(config.model.model)).config
    task = task or task_of(config, model)
    check_server(server, model, task)
    return task


def _opened(config: EngineConfig, name: str) -> Any:
    from serving.run.progress import progress_bars
    from shiftjax.control.engine import is_out_of_memory
    from shiftjax.settings import make_virtual_devices

    _check_address_space()
    make_virtual_devices(config)
    try:
        import shiftjax

        with progress_bars() as progress:
            return getattr(shiftjax, name).from_config(config, progress=progress)
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raise StartError(_no_memory(error)) from None


def _check_address_space() -> None:
    """Refuse a limit under which libraries abort the process, each in its own way."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY and limit < LEAST_ADDRESS_SPACE:
        raise ConfigError(
            [
                f"the address space is limited to {limit >> 20} MiB (ulimit -v): the libraries "
                f"alone need {LEAST_ADDRESS_SPACE >> 20} MiB, the model comes on top"
            ]
        )


def _no_memory(error: Exception) -> str:
    detail = str(error).partition("\n")[0].removeprefix("RESOURCE_EXHAUSTED: ")
    return (
        f"there is not enough memory to load the model ({detail or 'of the process'}): use more "
        "devices, a smaller model, a smaller num_blocks or memory_fraction, or a higher limit"
    )

"""Starting an engine with something to look at meanwhile."""

import resource
from pathlib import Path
from typing import TYPE_CHECKING, Any

from serving.run.jax_log import shorten_jax_log
from serving.server.options import ServerOptions, check_server, names_of
from serving.server.start_phases import Phases
from shiftjax.config import EngineConfig
from shiftjax.deploy.tasks import Task
from shiftjax.lora_options import CONFIG
from shiftjax.options import ConfigError, shown

if TYPE_CHECKING:
    from shiftjax.embedder import Embedder
    from shiftjax.hosts.calls import Leader
    from shiftjax.llm import LLM
    from shiftjax.model_files import ModelFiles
    from shiftjax.text.chat import ChatTemplate
    from shiftjax.text.tokenizer import Tokenizer

MAX_TEMPLATE = 1 << 20  # characters of a chat template in a file
LEAST_ADDRESS_SPACE = 2 << 30  # bytes that JAX's libraries, threads and a tiny model take


class StartError(Exception):
    """The engine cannot be started, though settings and model are as they should be."""


def open_llm(
    config: EngineConfig, server: ServerOptions | None = None, files: "ModelFiles | None" = None
) -> "LLM":
    """Load and compile, with bars on a terminal; `server` are settings that came with `config`.

    `files` are what `look` has found, if it was called before. Raises StartError for want of
    memory, and ConfigError for settings of no use for the model.
    """
    return _opened(config, server, "generate", files)


def open_embedder(config: EngineConfig, server: ServerOptions | None = None) -> "Embedder":
    """The same for embeddings."""
    return _opened(config, server, "embed")


def open_model(config: EngineConfig, server: ServerOptions, phases: Phases) -> "LLM | Embedder":
    """Open what generates as a language model and what embeds as an embedder, for a server."""
    return loaded(config, look_for_server(config, server, phases), phases)


def look(
    config: EngineConfig,
    server: ServerOptions | None,
    task: Task | None = None,
    phases: Phases | None = None,
) -> "ModelFiles":
    """Find what can be refused before JAX is imported, and the files of the model.

    `task` is by default the model's own. Raises ConfigError, CheckpointError, TokenizerError.
    """
    from shiftjax.model_files import open_files

    _check_address_space()
    if phases is not None:
        phases("open", 0, 1)
    files = open_files(config, task)
    check_adapters(config)
    if server is not None:
        check_names(config, server)
        check_server(server, files.source.config, files.task)
    return files


def check_adapters(config: EngineConfig) -> None:
    """Raise ConfigError for an adapter that is not there; all else is known when it is read."""
    for name, path in config.lora.modules.items():
        if not Path(path, CONFIG).is_file():
            words = f"{shown(path)} is no directory with an {CONFIG}"
            raise ConfigError([f"lora_modules: {shown(name)}: {words}"])


def check_names(config: EngineConfig, server: ServerOptions) -> None:
    """Raise ConfigError where an adapter has a name of the model."""
    names = names_of(server.served_model_name or config.model.model)
    if taken := [name for name in config.lora.modules if name in names]:
        raise ConfigError([f"lora_modules: {shown(taken[0])} is a name of the model itself"])


def look_for_server(
    config: EngineConfig, server: ServerOptions, phases: Phases | None = None
) -> "ModelFiles":
    """The same for a server, which needs the chat template, too. Raises ChatTemplateError."""
    files = look(config, server, phases=phases)
    chat_template(files.tokenizer, server)
    return files


def chat_template(tokenizer: "Tokenizer | None", server: ServerOptions) -> "ChatTemplate | None":
    """The template that the settings give, as text or as a file, or else the model's own.

    Raises ConfigError for one that is given and wrong, ChatTemplateError for the model's.
    """
    from shiftjax.text.chat import ChatTemplate, ChatTemplateError

    given = server.chat_template
    if given is None:
        source = tokenizer.chat_template if tokenizer is not None else None
        return ChatTemplate(source) if source is not None else None
    try:
        return ChatTemplate(given if "{" in given or "\n" in given else _template_file(given))
    except ChatTemplateError as error:
        raise ConfigError([f"chat_template: {error}"]) from None


def _template_file(path: str) -> str:
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read(MAX_TEMPLATE + 1)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no UTF-8 text"
        raise ConfigError([f"chat_template = {path} cannot be read: {reason}"]) from None
    if not 0 < len(text) <= MAX_TEMPLATE:
        raise ConfigError([f"chat_template = {path} must have 1 to {MAX_TEMPLATE} characters"])
    return text


def _opened(
    config: EngineConfig,
    server: ServerOptions | None,
    task: Task,
    files: "ModelFiles | None" = None,
) -> Any:
    from serving.run.progress import shown_phases

    phases = Phases()
    with shown_phases(phases):
        model = loaded(config, files or look(config, server, task, phases), phases)
        phases.end()
    return model


def loaded(
    config: EngineConfig, files: "ModelFiles", phases: Phases, leader: "Leader | None" = None
) -> Any:
    """Load what the files hold; `leader`: on several hosts. Raises StartError, ConfigError."""
    from shiftjax.adapters.adapter import AdapterError
    from shiftjax.core.errors import is_out_of_memory
    from shiftjax.settings import make_virtual_devices

    make_virtual_devices(config)
    shorten_jax_log()
    phases("import JAX", 0, 1)
    try:
        import shiftjax

        if leader is not None:
            return shiftjax.LLM.from_config(config, phases, files, leader)
        kind = shiftjax.LLM if files.task == "generate" else shiftjax.Embedder
        return kind.from_config(config, phases, files)
    except AdapterError as error:
        raise ConfigError([f"lora_modules: {error}"]) from None
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

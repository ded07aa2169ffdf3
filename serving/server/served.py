"""What is served: a model that is loaded, and the requests of one call. No JAX."""

import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from serving.server.formats.pieces import Parser, PlainParser
from serving.server.handle import RequestHandle
from serving.server.schema import Wish
from shiftjax.adapters.pool import AdapterPool
from shiftjax.targets import NO_TARGETS, Targets
from shiftjax.text.chat import ChatTemplate
from shiftjax.text.embedding_inputs import InputReader
from shiftjax.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class ServedModel:
    """A model that is loaded and compiled."""

    names: tuple[str, ...]  # as requests may call it; the first is what responses say
    tokenizer: Tokenizer | None
    template: ChatTemplate | None
    info: Mapping[str, str] = field(default_factory=dict)  # labels of the metric config_info
    num_programs: int = 0  # compiled before the first request
    num_compiles: Callable[[], int] = lambda: 0  # since then
    reader: InputReader | None = None  # of an encoder's inputs
    attention: Mapping[str, str] = field(default_factory=dict)  # implementation -> why it is used
    defaults: Mapping[str, Any] = field(default_factory=dict)  # of sampling, by field
    targets: Targets = NO_TARGETS  # of latency
    simulated: str = ""  # the machine that its devices are simulated of; "": they are real
    adapters: AdapterPool | None = None  # each is a model, too; None: there are none
    adapter_folder: Path | None = None  # from which others may be loaded
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def task(self) -> str:
        """What it does: generate or embed."""
        return "generate" if self.reader is None else "embed"

    @property
    def name(self) -> str:
        """The name in responses."""
        return self.names[0]

    def adapter_of(self, name: str | None) -> str | None:
        """The key of the adapter that a request means by a name; None: the model without one."""
        if self.adapters is None or name is None or name in self.names:
            return None
        return self.adapters.key_of(name)

    def is_called(self, name: str) -> bool:
        """Whether requests may call it so, or one of its adapters."""
        return name in self.names or self.adapter_of(name) is not None

    def answers_as(self, name: str | None) -> str:
        """The name in responses to those that call it so."""
        return name if name is not None and name not in self.names else self.name

    def called(self) -> tuple[str, ...]:
        """All names as which requests may call it now; the last are those of adapters."""
        return self.names if self.adapters is None else (*self.names, *self.adapters.names)


@dataclass
class Generation:
    """The requests of one call, a handle per prompt; use it as a context manager."""

    id: str
    wish: Wish
    model: str
    handles: list[RequestHandle]
    parser: Callable[[], Parser] = PlainParser  # makes one for each continuation
    created: int = field(default_factory=lambda: int(time.time()))
    lent: ExitStack = field(default_factory=ExitStack)  # what is given back when it is closed

    def cancel(self) -> None:
        """Cancel every handle of the generation: the client has disconnected."""
        for handle in self.handles:
            handle.cancel()

    def __enter__(self) -> "Generation":
        return self

    def __exit__(self, *exception: object) -> None:
        with self.lent:
            for handle in self.handles:
                handle.close()

    @property
    def holds_sequences(self) -> bool:
        """Whether the engine has work to do for it."""
        return not all(handle.is_ended for handle in self.handles)

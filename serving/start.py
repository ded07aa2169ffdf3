"""Starting an engine with something to look at meanwhile."""

from typing import TYPE_CHECKING

from serving.progress import progress_bars
from shiftjax.config import EngineConfig
from shiftjax.settings import make_virtual_devices

if TYPE_CHECKING:
    from shiftjax.llm import LLM


def open_llm(config: EngineConfig) -> "LLM":
    """Load and compile, with bars on a terminal."""
    make_virtual_devices(config)
    from shiftjax.llm import LLM

    with progress_bars() as progress:
        return LLM.from_config(config, progress=progress)

"""What the hosts of an engine must agree on, and how long they wait for each other. No JAX."""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version

from shiftjax.config import EngineConfig
from shiftjax.options import shown
from shiftjax.weights.source import TensorSource, identify

HEARTBEAT_SECONDS = 1.0
SILENT_SECONDS = 10.0  # without a word: a host that is stopped, or a network that is split
START_SILENT_SECONDS = 120.0  # the same while it starts: tracing leaves other threads little time
JOIN_SECONDS = 600.0  # until all hosts have come
AGREE_SECONDS = 1800.0  # between the first and the last host at a point of the start
MAX_MESSAGE_BYTES = 256 << 20
CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.so_reuseport", 0),  # a port in use is an error
)
AUTHORIZATION = "authorization"
_OWN = (  # may differ
    *("host_rank", "host_secret_file", "model", "tokenizer", "cache_dir"),
    *("lora_modules", "lora_folder"),  # the first host reads adapters, and tells the others
)


@dataclass(frozen=True)
class Terms:
    """What a host brings: who it is, the secret, and what must be the same on all."""

    rank: int
    num: int
    address: str  # where the leader listens
    secret: str
    facts: Mapping[str, str]
    limit: float = SILENT_SECONDS  # seconds that a host may be silent
    stuck_limit: float = 300.0  # seconds that a host may have calls before it and do none


def facts_of(config: EngineConfig, source: TensorSource) -> dict[str, str]:
    """Versions, settings and weights."""
    versions = {name: version(name) for name in ("shiftjax", "jax", "jaxlib")}
    settings = {name: str(v) for name, v in config.flat().items() if name not in _OWN}
    return {**versions, "checkpoint": identify(source), **settings}


def differences(rank: int, theirs: Mapping[str, str], mine: Mapping[str, str]) -> str | None:
    """How a host differs from the first one, in a sentence; None: not at all."""
    wrong = [
        f"{name} is {shown(theirs.get(name))} on host {rank} and {shown(mine.get(name))} on host 0"
        for name in sorted({*theirs, *mine})
        if theirs.get(name) != mine.get(name)
    ]
    return f"the hosts differ: {'; '.join(wrong[:4])}" if wrong else None

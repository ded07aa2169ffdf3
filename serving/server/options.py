"""Every setting of the server, declared once, as those of the engine are. No JAX."""

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal

from shiftjax.deploy.tasks import Task, idle_settings
from shiftjax.options import ConfigError, num_bytes_of, option, settings_of, shown

if TYPE_CHECKING:
    from shiftjax.arch.config import ModelConfig

MEBIBYTE = 1 << 20
MAX_LOGPROBS = 20  # of a token, beside its own
MOST_TOPIC = 256


_JsonCalls = Literal["hermes", "llama3_json", "llama4_json", "mistral", "smollm2"]
_NamedCalls = Literal["openai", "deepseek_v3", "deepseek_v31", "kimi_k2"]
_TaggedCalls = Literal["qwen3_coder", "seed_oss", "glm45", "glm47", "minimax_m2"]
_Thoughts = Literal[
    "think", "openai_gptoss", "deepseek_r1", "seed_oss", "gemma4", "mistral", "kimi"
]
_LiteralCalls = Literal["functiongemma", "gemma4", "llama4_pythonic", "pythonic"]


def _size(text: str) -> str | None:
    try:
        num_bytes = num_bytes_of(text)
    except ValueError as error:
        return str(error)
    is_of_use = num_bytes == 0 or MEBIBYTE <= num_bytes <= 1 << 50
    return None if is_of_use else f"must be 0, or 1MiB to 1024TiB, got {shown(text)}"


@dataclass(frozen=True)
class ServerOptions:
    """Where the server listens, who may ask, and how much it takes."""

    host: str = option("127.0.0.1", "address to listen on; others can reach 0.0.0.0 or ::")
    port: int = option(8000, "HTTP port; 0: any free one", low=0, high=65535)
    grpc: bool = option(True, "serve gRPC")
    grpc_port: int = option(50051, "gRPC port; 0: any free one", low=0, high=65535)
    admin_port: int | None = option(
        None, "gRPC port of the Admin service, on loopback; default: none", low=0, high=65535
    )
    admin_token_file: str | None = option(None, "file with the token of the Admin service")
    control_key_file: str | None = option(
        None,
        "file with the keys of the paths that pause the engine, put it to sleep, and change its "
        "weights; default: there are no such paths",
    )
    simulate: str | None = option(
        None,
        "machine, as h200x8 or a .yaml file, that devices are simulated of: answers are made up, "
        "and take as long as predicted; default: none, devices are real",
    )
    served_model_name: str | None = option(
        None, "names that requests may call the model, with commas; default: that of --model"
    )
    api_key: str | None = option(
        None, "key that requests must bring; better in a file, where `ps` does not show it"
    )
    api_key_file: str | None = option(None, "file with one API key per line")
    ssl_certfile: str | None = option(None, "certificate chain (PEM): serve TLS")
    ssl_keyfile: str | None = option(None, "private key (PEM) of the certificate")
    ssl_ca_certs: str | None = option(None, "authorities (PEM) of client certificates: mutual TLS")
    max_num_queued_reqs: int = option(
        256, "sequences that may wait; more are refused with 429", low=1, high=1 << 20
    )
    max_num_queued_tokens: int = option(1 << 20, "prompt tokens that may wait", low=1, high=1 << 40)
    max_seqs_per_key: int | None = option(
        None,
        "sequences that one API key may have open, waiting ones included; more are refused with "
        "429; default: no limit",
        low=1,
        high=1 << 20,
    )
    max_seqs_per_address: int | None = option(
        None, "the same of one client's address; a proxy is one client", low=1, high=1 << 20
    )
    max_request_bytes: int = option(
        8 * MEBIBYTE, "largest body of a request", low=1024, high=64 * MEBIBYTE
    )
    max_logprobs: int = option(
        MAX_LOGPROBS, "most log-probabilities per token", low=0, high=MAX_LOGPROBS
    )
    stall_timeout: float = option(
        10.0, "seconds without a step, with work, until progress is denied", low=0.01, high=3600.0
    )
    watchdog_timeout: float = option(
        300.0, "seconds without a step, with work, until the process ends", low=0.1, high=86400.0
    )
    shutdown_timeout: float = option(
        30.0, "seconds that requests have to finish after SIGTERM", low=0.0, high=3600.0
    )
    drain_delay: float = option(
        0.0,
        "seconds after SIGTERM for which `ready` is denied and requests are still taken, for "
        "routers to look elsewhere",
        low=0.0,
        high=3600.0,
    )
    stream_interval: int = option(
        1,
        "tokens that a stream delivers together, at least; the first comes at once",
        low=1,
        high=4096,
    )
    tool_parser: Literal["auto", "none", _JsonCalls, _NamedCalls, _TaggedCalls, _LiteralCalls] = (
        option(
            "auto",
            "how the model writes tool calls; auto: as its chat template says; none: no tools",
            flags=("--tool-parser", "--tool-call-parser"),
        )
    )
    reasoning_parser: Literal["auto", "none", _Thoughts] = option(
        "auto", "how the model marks its reasoning; auto: as its chat template says"
    )
    strict: bool = option(False, "refuse unknown fields instead of ignoring them with a warning")
    metrics_prefix: str = option("shiftjax", "prefix of metric names, as `vllm` for its dashboards")
    kv_events: Literal["none", "zmq"] = option(
        "none",
        "tell routers which prefixes are cached: token ids, so users' texts, for all who ask",
    )
    kv_events_endpoint: str | None = option(
        None, "address of KV events, as tcp://*:5557; default: tcp://127.0.0.1:5557, loopback alone"
    )
    kv_events_topic: str | None = option(None, "their topic; default: kv@HOSTNAME@MODEL")
    kv_events_replay: str | None = option(
        None,
        "address where subscribers get KV events again, as tcp://127.0.0.1:5558; default: none",
    )
    otlp_traces_endpoint: str | None = option(
        None,
        "where spans of requests go, over OTLP: http://collector:4317 (gRPC), or "
        "http://collector:4318/v1/traces; default: nowhere",
    )
    profile_dir: str | None = option(
        None, "folder for the profiles that the Admin service makes; default: none are made"
    )
    ui: bool = option(True, "serve the page /ui")
    chat_template: str | None = option(
        None, "Jinja template of chats: a file, or the text itself; default: the model's own"
    )
    force_include_usage: bool = option(
        False,
        "tell the usage in every object of every stream, as both stream_options do",
        flags=("--enable-force-include-usage",),
    )
    default_chat_template_kwargs: str | None = option(
        None, 'variables of the chat template, as {"enable_thinking": false}; requests go before'
    )
    allowed_origins: str | None = option(
        None,
        "origins, with commas, whose pages may ask (CORS): https://a.example, or *; default: none",
    )
    store_responses: str = option(
        "0",
        "bytes of responses and conversations to keep for later requests, like 1GiB; 0: none",
        check=_size,
    )
    store_dir: str | None = option(
        None, "folder in which they are kept over restarts; default: in memory"
    )
    files_dir: str | None = option(
        None, "folder of files and batches that clients upload and start; default: none are taken"
    )
    files_bytes: str = option("10GiB", "bytes of files that an API key may keep", check=_size)
    max_file_bytes: str = option("200MiB", "largest file that is taken", check=_size)
    batch_requests: int | None = option(
        None,
        "requests of batches that run at once; default: half of max_num_seqs",
        low=1,
        high=1 << 20,
    )
    root_path: str | None = option(
        None, "prefix of all paths, as /llm, behind a proxy that keeps it; default: none"
    )


SERVER_SETTINGS = settings_of(ServerOptions)
# Settings that an encoder has no use for; all others are of both tasks.
SERVER_TASKS: Mapping[str, Task] = MappingProxyType(
    dict.fromkeys(
        (
            *("max_logprobs", "stream_interval", "tool_parser", "reasoning_parser"),
            *("chat_template", "default_chat_template_kwargs", "force_include_usage"),
            *("kv_events", "kv_events_endpoint", "kv_events_topic"),
            *("kv_events_replay", "max_seqs_per_key", "max_seqs_per_address"),
            *("store_responses", "store_dir", "otlp_traces_endpoint", "control_key_file"),
        ),
        "generate",
    )
)


_ORIGIN = re.compile(r"\*|[a-z][a-z0-9+.-]*://[A-Za-z0-9._-]+(:\d{1,5})?|null")
_ZMQ = re.compile(r"tcp://(\*|[A-Za-z0-9._-]+|\[[0-9A-Fa-f:]+\]):(\d{1,5}|\*)|ipc://[^\0]{1,100}")
_ROOT = re.compile(r"(/[A-Za-z0-9._~-]+){1,16}")


def names_of(given: str | None) -> tuple[str, ...]:
    """The entries of a setting that has them with commas."""
    return tuple(name.strip() for name in (given or "").split(",") if name.strip())


def check_server(options: ServerOptions, model: "ModelConfig", task: Task) -> None:
    """Raise ConfigError for settings that are of no use for this model and task."""
    problems = idle_settings(asdict(options), SERVER_SETTINGS, SERVER_TASKS, model, task)
    if problems:
        raise ConfigError(problems)


def server_problems(options: ServerOptions) -> list[str]:
    """What is wrong between settings."""
    problems = []
    if (options.ssl_certfile is None) != (options.ssl_keyfile is None):
        problems.append("ssl_certfile and ssl_keyfile go together: give both or neither")
    if options.ssl_ca_certs is not None and options.ssl_certfile is None:
        problems.append("ssl_ca_certs (mutual TLS) needs ssl_certfile and ssl_keyfile")
    if (options.admin_port is None) != (options.admin_token_file is None):
        problems.append("admin_port and admin_token_file go together: give both or neither")
    if options.port == options.grpc_port != 0 and options.grpc:
        problems.append(f"port and grpc_port are both {options.port}: HTTP and gRPC need their own")
    if options.max_seqs_per_key and not (options.api_key or options.api_key_file):
        problems.append("max_seqs_per_key needs api_key or api_key_file: nobody has a key")
    if options.served_model_name is not None and not options.served_model_name.strip(" ,"):
        problems.append("served_model_name holds no name")
    if not all(map(_ORIGIN.fullmatch, names_of(options.allowed_origins))):
        problems.append("allowed_origins must be as https://app.example:8443, without a path, or *")
    if options.root_path is not None and _ROOT.fullmatch(options.root_path) is None:
        problems.append("root_path must be as /llm, without a slash at its end")
    if options.store_dir is not None and not num_bytes_of(options.store_responses):
        problems.append("store_dir needs store_responses, say 1GiB: how much to keep there")
    if options.batch_requests is not None and options.files_dir is None:
        problems.append("batch_requests needs files_dir: the folder of batches and their files")
    problems += _kv_event_problems(options)
    if not isinstance(_json(options.default_chat_template_kwargs or "{}"), dict):
        problems.append("default_chat_template_kwargs must be a JSON object")
    if re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", options.metrics_prefix) is None:
        problems.append("metrics_prefix must be letters, digits and _: it begins names of metrics")
    return problems


def _json(text: str) -> object:
    """The value that a text spells; None if it is not JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _kv_event_problems(options: ServerOptions) -> list[str]:
    given = {
        "kv_events_endpoint": options.kv_events_endpoint,
        "kv_events_replay": options.kv_events_replay,
    }
    problems = [
        f"{name} must be as tcp://127.0.0.1:5557 or ipc:///run/kv"
        for name, address in given.items()
        if address is not None and _ZMQ.fullmatch(address) is None
    ]
    given["kv_events_topic"] = topic = options.kv_events_topic
    if topic is not None and not (topic.isprintable() and 1 <= len(topic) <= MOST_TOPIC):
        problems.append(f"kv_events_topic must have 1 to {MOST_TOPIC} characters that can be seen")
    if options.kv_events == "none":
        idle = [name for name, value in given.items() if value is not None]
        problems += [f"{name} has no meaning with kv_events = none: drop it" for name in idle]
    return problems

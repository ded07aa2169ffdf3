"""Flags of vLLM, SGLang and Arctic Inference: what each becomes here. No JAX.

A flag that this project has under another name is translated. One that has nothing to do here is
taken, and a line says why. Any other is refused by its own name, with what to use instead.
"""

import argparse
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Literal, NamedTuple


class Foreign(NamedTuple):
    """What a flag of another engine comes to; a switch takes no value."""

    kind: Literal["alias", "ignored", "refused"]
    words: str  # of an alias our flags; else why, or what to use
    is_switch: bool = False


class Translated(NamedTuple):
    """A command line in this project's flags."""

    argv: list[str]
    notes: list[str]  # of flags without effect
    problems: list[str]  # of flags that are refused


_ALIASES = {
    "-tp": "--tp",
    "-pp": "--pp",
    "-dp": "--dp",
    "-q": "--quantization",
    "--preferred-sampling-params": "--override-generation-config",
    "--gpu-memory-utilization": "--memory-fraction",
    "--mem-fraction-static": "--memory-fraction",
    "--num-gpu-blocks-override": "--num-blocks",
    "--ulysses-sequence-parallel-size": "--sp",
    "--tp-size": "--tp",
    "--dp-size": "--dp",
    "--pp-size": "--pp",
    "--context-length": "--max-model-len",
    "--model-path": "--model",
    "--tokenizer-path": "--tokenizer",
    "--random-seed": "--seed",
    "--max-running-requests": "--max-num-seqs",
    "--chunked-prefill-size": "--max-num-batched-tokens",
    "--page-size": "--block-size",
    "--nnodes": "--hosts",
    "--node-rank": "--host-rank",
    "--dist-init-addr": "--coordinator",
}
_SWITCH_ALIASES = {
    "--disable-radix-cache": "--no-enable-prefix-caching",
    "--disable-overlap-schedule": "--no-overlap",
    "--async-scheduling": "--overlap",
    "--no-async-scheduling": "--no-overlap",
}
# Values of other engines for settings that exist here under the same name.
_VALUES = {
    "--dtype": {"half": "float16", "float": "float32"},
    "--runner": {"pooling": "--task embed", "generate": "--task generate", "auto": "--task auto"},
    "--reasoning-parser": dict.fromkeys(
        ("qwen3", "deepseek_r1", "deepseek-r1", "deepseek_v3", "glm45", "kimi_k2", "ernie45"),
        "think",
    )
    | {"gpt-oss": "openai_gptoss"},
    "--generation-config": {"vllm": "none"},
    "--sampling-defaults": {
        "model": "--generation-config auto",
        "openai": "--generation-config none",
    },
    "--tool-call-parser": {"llama3": "llama3_json", "qwen25": "hermes", "gpt-oss": "openai"},
}
_SIZES = {"--kv-offloading-size": "--host-memory"}  # GiB

_COMPILED = "steps are compiled ahead of traffic"
_SAFETENSORS = "weights are read from safetensors, GGUF or Orbax, whichever is there"
_IGNORED = {
    "--load-format": _SAFETENSORS,
    "--config-format": "the configuration is found by its file's name",
    "--tokenizer-mode": "there is one tokenizer backend",
    "--model-impl": "there is one implementation of each model",
    "--swap-space": "preempted requests are recomputed; --preemption swap keeps them",
    "--scheduling-policy": "requests run by priority, then by arrival",
    "--schedule-policy": "requests run by priority, then by arrival",
    "--uvicorn-log-level": "the server logs one line per event",
    "--log-level": "the server logs one line per event",
    "--log-level-http": "the server logs one line per event",
    "--limit-mm-per-prompt": "there are no images, audio or video",
    "--mm-processor-kwargs": "there are no images, audio or video",
    "--mm-processor-cache-gb": "there are no images, audio or video",
    "--allowed-local-media-path": "there are no images, audio or video",
    "--compilation-config": _COMPILED,
    "-cc": _COMPILED,
    "--optimization-level": _COMPILED,
    "--cuda-graph-max-bs": _COMPILED,
    "--max-seq-len-to-capture": _COMPILED,
    "--structured-outputs-config": "there is one grammar backend, llguidance",
    "--guided-decoding-backend": "there is one grammar backend, llguidance",
    "--grammar-backend": "there is one grammar backend, llguidance",
    "--api-server-count": "one process serves all connections",
    "--distributed-executor-backend": "one process drives all devices of a host",
    "--device": "JAX uses the devices that it finds (JAX_PLATFORMS)",
    "--sampling-backend": "there is one sampler",
    "--max-log-len": "prompts are not logged",
    "--max-parallel-loading-workers": "weights are read in ranges, for each device its own",
    "--max-num-partial-prefills": "a step computes parts of as many prompts as fit",
    "--max-long-partial-prefills": "a step computes parts of as many prompts as fit",
    "--long-prefill-token-threshold": "a step computes parts of as many prompts as fit",
    "--response-role": "the role of an answer is assistant",
    "--prefix-caching-hash-algo": "blocks are found by BLAKE2b",
    "--chat-template-content-format": "the template's own format is found",
}
_IGNORED_SWITCHES = {
    "--trust-remote-code": "no code of a checkpoint is ever run",
    "--enforce-eager": _COMPILED,
    "--disable-cuda-graph": _COMPILED,
    "--enable-torch-compile": _COMPILED,
    "--enable-auto-tool-choice": "tools are called where requests bring some",
    "--enable-chunked-prefill": "prompts are always computed in chunks",
    "--enable-mixed-chunk": "prompts are always computed in chunks",
    "--enable-log-requests": "requests are logged by their id and times alone",
    "--disable-log-requests": "requests are logged by their id and times alone",
    "--disable-log-stats": "statistics are at /metrics",
    "--enable-metrics": "statistics are at /metrics",
    "--disable-uvicorn-access-log": "there is no log of accesses",
    "--enable-prompt-tokens-details": "usage always has prompt_tokens_details",
    "--enable-request-id-headers": "answers always have X-Request-Id",
    "--enable-shift-parallel": "the engine always shifts between --sp and tensor parallelism",
    "--enable-expert-parallel": "experts are divided as the layers around them",
    "--enable-cache-report": "usage always has prompt_tokens_details",
    "--use-v2-block-manager": "there is one block manager",
    "--disable-custom-all-reduce": "XLA chooses how devices exchange",
    "--skip-server-warmup": "the first step is run before requests are taken",
    "--exclude-tools-when-tool-choice-none": "tools are left out of the prompt then",
    "--enable-server-load-tracking": "/load is always there",
}
_ADAPTERS = "adapters are not served: merge them into the checkpoint"
_IMAGES = "models with images, audio or video are not served"
_DISAGGREGATED = "prefill and decode share devices here; --phases divides batches"
_EVENTS = "use --kv-events-endpoint tcp://*:5557 and --kv-events-topic"
_REFUSED = {
    "--lora-modules": _ADAPTERS,
    "--lora-paths": _ADAPTERS,
    "--max-loras": _ADAPTERS,
    "--max-lora-rank": _ADAPTERS,
    "--max-cpu-loras": _ADAPTERS,
    "--lora-dtype": _ADAPTERS,
    "--code-revision": "no code of a checkpoint is ever run",
    "--tokenizer-revision": "download the revision and name its file with --tokenizer",
    "--load-format dummy": "name the model random:MODEL, whose weights are made up",
    "--cuda-graph-sizes": "use --token-buckets 8,64,256",
    "--cudagraph-capture-sizes": "use --token-buckets 8,64,256",
    "--cpu-offload-gb": "weights stay on devices: use more TP, or --quantization fp8",
    "--hf-overrides": "change config.json in a copy of the checkpoint's directory",
    "--rope-scaling": "change config.json in a copy of the checkpoint's directory",
    "--rope-theta": "change config.json in a copy of the checkpoint's directory",
    "--kv-transfer-config": _DISAGGREGATED,
    "--disaggregation-mode": _DISAGGREGATED,
    "--kv-events-config": _EVENTS,
    "--decode-context-parallel-size": "KV is split by heads over sp * tp devices",
    "-dcp": "KV is split by heads over sp * tp devices",
    "--prefill-context-parallel-size": "use --sp, which splits the tokens of a prompt",
    "--otlp-traces-endpoint": "there are no traces: /metrics and the page show requests",
    "--attention-backend": "use --attention auto, pallas or xla",
    "--mm-attention-backend": _IMAGES,
    "--middleware": "put a proxy in front of the server",
    "--tool-parser-plugin": "use one of the parsers of --tool-parser",
    "--reasoning-parser-plugin": "use one of the parsers of --reasoning-parser",
    "--tool-server": "clients run the tools",
    "--uds": "use --host and --port behind a proxy that listens on the socket",
    "--logits-processors": "use logit_bias, allowed_token_ids or structured outputs",
    "--speculative-algorithm": "use --speculation or --speculative-config",
    "--speculative-draft-model-path": "use --draft-model",
    "--speculative-num-steps": "use --max-draft-tokens",
    "--data-parallel-address": "use --hosts, --host-rank and --coordinator",
    "--data-parallel-rpc-port": "use --hosts, --host-rank and --coordinator",
    "--data-parallel-size-local": "use --hosts, --host-rank and --coordinator",
    "--master-addr": "use --hosts, --host-rank and --coordinator",
    "--master-port": "use --hosts, --host-rank and --coordinator",
    "--ssl-cert-reqs": "the server asks clients for no certificates: use --api-key",
    "--log-config-file": "the server logs to stderr",
}
_REFUSED_SWITCHES = {
    "--enable-lora": _ADAPTERS,
    "--enable-sleep-mode": "the engine does not sleep: stop the server, compiled steps are kept",
    "--enable-eplb": "experts are divided evenly",
    "--disable-sliding-window": "change config.json in a copy of the checkpoint's directory",
    "--skip-tokenizer-init": "send token ids as prompts",
    "--headless": "use --hosts, --host-rank and --coordinator",
    "--enable-multimodal": _IMAGES,
}
OFF = "it is off anyway"


def _negated(switch: str) -> str:
    return switch.replace("--", "--no-", 1)


FOREIGN: Mapping[str, Foreign] = MappingProxyType(
    {name: Foreign("alias", words) for name, words in _ALIASES.items()}
    | {name: Foreign("alias", words, True) for name, words in _SWITCH_ALIASES.items()}
    | {name: Foreign("ignored", words) for name, words in _IGNORED.items()}
    | {name: Foreign("ignored", words, True) for name, words in _IGNORED_SWITCHES.items()}
    | {name: Foreign("refused", words) for name, words in _REFUSED.items()}
    | {name: Foreign("refused", words, True) for name, words in _REFUSED_SWITCHES.items()}
    | {_negated(name): Foreign("ignored", words, True) for name, words in _IGNORED_SWITCHES.items()}
    | {_negated(name): Foreign("ignored", OFF, True) for name in _REFUSED_SWITCHES}
)
"""Flags that other engines have and this one lacks, by name, of some with one value."""


def translated(parser: argparse.ArgumentParser, argv: Sequence[str]) -> Translated:
    """Return a command line in our own flags; those of `parser` are left as they are."""
    words, known = list(argv), _known_flags(parser, argv)
    found = Translated([], [], [])
    while words and words[0] != "--":
        word = words.pop(0)
        name, equals, value = word.partition("=")
        name = _spelled(name, known)
        taken = [value] if equals else []
        if name in _VALUES or name in _SIZES or name in FOREIGN:
            if not taken and not _is_switch(name) and words and not words[0].startswith("--"):
                taken = [words.pop(0)]
            _translate(name, taken, known, found)
        elif name.startswith("-O") and name not in known:
            found.notes.append(f"{word}: {_COMPILED}, so it has no effect")
            if name == "-O" and not taken and words and words[0].isdigit():
                words.pop(0)
        else:
            found.argv.append(name + equals + value)
    found.argv.extend(words)
    return found


def _translate(name: str, taken: list[str], known: Collection[str], found: Translated) -> None:
    """Add what a flag with its value comes to."""
    if name in _SIZES:
        found.argv.extend([_SIZES[name], *(f"{value}GiB" for value in taken)])
    elif name in _VALUES and (name in known or (taken and taken[0] in _VALUES[name])):
        values = [_VALUES[name].get(value, value) for value in taken]
        is_flag = any(value.startswith("--") for value in values)
        found.argv.extend(" ".join(values).split() if is_flag else [name, *values])
    elif name in known or name not in FOREIGN:
        found.argv.extend([name, *taken])
    else:
        given = " ".join([name, *taken])
        given = given if given in FOREIGN else name
        kind, told, _ = FOREIGN[given]
        if kind == "alias":
            found.argv.extend([told, *taken])
        elif kind == "ignored":
            found.notes.append(f"{given} has no effect: {told}")
        else:
            found.problems.append(f"{given} is not a flag here: {told}")


def _is_switch(name: str) -> bool:
    return name in FOREIGN and FOREIGN[name].is_switch


def _spelled(name: str, known: set[str]) -> str:
    """The flag as the table has it: others write underscores, too."""
    plain = name.replace("_", "-") if name.startswith("--") else name
    return (
        plain if name not in known and {plain} & (known | FOREIGN.keys() | _SIZES.keys()) else name
    )


def _known_flags(parser: argparse.ArgumentParser, argv: Sequence[str]) -> set[str]:
    """The flags of the command that a command line names."""
    for word in argv:
        choices = next((a.choices for a in parser._actions if isinstance(a.choices, dict)), {})
        if word in choices:
            parser = choices[word]
    return {flag for action in parser._actions for flag in action.option_strings}

"""The Python API: `LLM` turns prompts into text."""

import threading
import time
from collections.abc import Collection, Generator, Iterator, Mapping
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Any, cast

import jax

from shiftjax.adapters.adapter import AdapterError
from shiftjax.adapters.pool import AdapterPool
from shiftjax.build import build
from shiftjax.config import EngineConfig
from shiftjax.core.kept_blocks import NO_HINTS, CacheHints
from shiftjax.core.limits import validate_request
from shiftjax.core.request import (
    Event,
    Request,
    RequestError,
    SamplingParams,
    TokenConstraint,
)
from shiftjax.deploy.deployment import Deployment
from shiftjax.device.programs import CompileCounter, Progress
from shiftjax.disk_tier.disk_stats import DiskStats
from shiftjax.drafts.speculation import DraftStats
from shiftjax.explain.explanation import explain
from shiftjax.fleet.state import FleetState, plain_counters, plain_state
from shiftjax.host_tier.host_stats import HostStats
from shiftjax.hosts.calls import Leader
from shiftjax.model_files import ModelFiles, open_files
from shiftjax.outputs import OutputAssembler, RequestOutput
from shiftjax.phases.resharding import ReshardingState
from shiftjax.plugins import ALL, load_plugins
from shiftjax.rollouts.control import PauseMode, Rollouts
from shiftjax.routing.chosen import NOT_TOLD
from shiftjax.routing.history import RoutingState, plain_sums
from shiftjax.settings import keep_communicators_apart, make_virtual_devices
from shiftjax.text.chat import ChatTemplate, encode_chat
from shiftjax.text.rules import rules_of
from shiftjax.text.thinking import marks_of
from shiftjax.text.token_rules import ruled

Prompt = str | Seq[int] | Mapping[str, Seq[int]]
Messages = Seq[Mapping[str, Any]]
# (index of the prompt, new text, the output once it is complete)
Deltas = Generator[tuple[int, str, RequestOutput | None], None, None]
DEFAULT_SAMPLING = SamplingParams(max_tokens=16)


class LLM:
    """A model, loaded and compiled, that answers prompts.

    Keyword arguments are the settings of `shiftjax.config` by their flat names. On CPU, as many
    virtual devices are made as `devices` or `dp * sp * tp` ask for, unless JAX already runs.
    Files are compared with a SHA256SUMS beside them, where there is one, before they are loaded.

        llm = LLM("smollm2-135m", sp=4, tp=2)
        print(llm.generate("The capital of France is")[0].outputs[0].text)

    Raises:
        ConfigError: settings that cannot be used, all of them at once.
        CheckpointError, TokenizerError: the model cannot be found or read.
    """

    task = "generate"

    def __init__(
        self, model: str = "smollm2-135m", *, progress: Progress | None = None, **options: Any
    ):
        load_plugins(options.get("plugins", ALL))
        self._start(EngineConfig.from_options(model=model, **options), progress)

    @classmethod
    def from_config(
        cls,
        config: EngineConfig,
        progress: Progress | None = None,
        files: ModelFiles | None = None,
        leader: Leader | None = None,
    ) -> "LLM":
        """Build from a finished config, and from its files where they are open.

        `progress(task, done, total)` is called while it loads; `leader`: of several hosts.
        """
        llm = cls.__new__(cls)
        llm._start(config, progress, files, leader)
        return llm

    def _start(
        self,
        config: EngineConfig,
        progress: Progress | None,
        files: ModelFiles | None = None,
        leader: Leader | None = None,
    ) -> None:
        make_virtual_devices(config)
        keep_communicators_apart(config)
        files = files or open_files(config, "generate")
        files.verify(progress)
        self.name = config.model.model
        self.tokenizer = files.tokenizer
        self.sampling_defaults = files.defaults
        self._template: ChatTemplate | None = None
        self._num_requests = 0
        self._backlog: list[Event] = []
        self._lock = threading.Condition()  # of the engine; told when it may go on
        self._holder: int | None = None  # the thread that has held the engine
        progress = progress or _silent
        self._built = build(config, files.source, progress, files.cache_dir, leader)
        self.engine = self._built.engine
        self.runners = self._built.runners
        self.rollouts = self._built.rollouts
        self._compiles = CompileCounter()
        self._compiles.start()

    def close(self) -> None:
        """Stop counting compilations, and indexing; write what a disk cache shall have.

        The rest is freed with the object.
        """
        self._compiles.stop()
        self.engine.close()
        if self.adapters is not None:
            self.adapters.close()

    # ------------------------------------------------------------------- prompts

    def generate(
        self,
        prompts: Prompt | Seq[Prompt],
        sampling_params: SamplingParams | Seq[SamplingParams] | None = None,
        *,
        adapter: str | Seq[str | None] | None = None,
        return_routed_experts: bool = False,
        cache_hints: CacheHints = NO_HINTS,
    ) -> list[RequestOutput]:
        """Continue every prompt and return the outputs in the order of the prompts.

        A prompt is text, a list of token ids, or `{"prompt_token_ids": ids}`; `sampling_params`
        are one for all or one for each (default: `default_sampling_params`). `adapter` is the name
        of one that is loaded, for all prompts or for each, None: none.
        With `return_routed_experts` outputs have the experts that each token chose
        (`CompletionOutput.routed_experts`), if the setting `routed_experts` is on.
        `cache_hints` say what becomes of the KV of the prompts (`shiftjax.CacheHints`).

        Raises:
            RequestError: a prompt that cannot be served; none of the others has started then.
        """
        many = _as_list(prompts)
        stream = self.stream(
            many,
            sampling_params,
            adapter=adapter,
            return_routed_experts=return_routed_experts,
            cache_hints=cache_hints,
        )
        done = {i: out for i, _, out in stream if out is not None}
        return [done[index] for index in range(len(many))]

    def chat(
        self,
        messages: Messages | Seq[Messages],
        sampling_params: SamplingParams | Seq[SamplingParams] | None = None,
        *,
        adapter: str | Seq[str | None] | None = None,
        **template: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation or several; `template` are variables of the chat template."""
        conversations = _as_conversations(messages)
        ids = [self._encode_chat(each, **template) for each in conversations]
        prompts: list[Prompt] = [{"prompt_token_ids": each} for each in ids]
        return self.generate(prompts, sampling_params, adapter=adapter)

    def stream_chat(
        self,
        messages: Messages,
        sampling_params: SamplingParams | None = None,
        *,
        adapter: str | None = None,
        **template: Any,
    ) -> Deltas:
        """Answer one conversation as `stream` does."""
        prompt = {"prompt_token_ids": self._encode_chat(messages, **template)}
        return self.stream([prompt], sampling_params, adapter=adapter)

    def stream(
        self,
        prompts: Prompt | Seq[Prompt],
        sampling_params: SamplingParams | Seq[SamplingParams] | None = None,
        *,
        adapter: str | Seq[str | None] | None = None,
        return_routed_experts: bool = False,
        cache_hints: CacheHints = NO_HINTS,
    ) -> Deltas:
        """Yield (index of the prompt, new text, the output once it is complete).

        With `n > 1` the text of all continuations passes by; the output tells them apart.
        Closing the generator aborts what is unfinished.
        """
        if return_routed_experts and not self.engine.limits.keeps_notes:
            raise RequestError(NOT_TOLD, "return_routed_experts")
        many = _as_list(prompts)
        requests = self._requests(many, sampling_params, self._keys(adapter, len(many)))
        if return_routed_experts:
            requests = [(replace(request, wants_notes=True), text) for request, text in requests]
        requests = [(replace(request, hints=cache_hints), text) for request, text in requests]
        for request, _ in requests:
            validate_request(request, self.engine.limits)
        return self._stream(requests)

    # ------------------------------------------------------------------ adapters

    @property
    def adapters(self) -> AdapterPool | None:
        """The adapters that are served; None: the setting `enable_lora` is off."""
        return self._built.adapters

    def load_adapter(self, name: str, path: str) -> None:
        """Let requests ask for an adapter in a directory, as PEFT writes them.

        Raises AdapterError: it cannot be served, or there is one of this name.
        """
        self._pool().load(name, path)

    def unload_adapter(self, name: str) -> None:
        """Let no further request ask for an adapter. Raises AdapterError: there is no such."""
        self._pool().unload(name)

    def _pool(self) -> AdapterPool:
        if self.adapters is None:
            raise AdapterError("No adapters are served: start with enable_lora.")
        return self.adapters

    def _keys(self, names: str | Seq[str | None] | None, count: int) -> list[str | None]:
        """The adapter of each prompt, as requests have it."""
        each = [names] * count if names is None or isinstance(names, str) else list(names)
        if self.adapters is None and any(name is not None for name in each):
            raise RequestError("No adapters are served: start with enable_lora.", "adapter")
        if len(each) != count:
            raise RequestError(f"There are {count} prompts but {len(each)} adapters.", "adapter")
        keys = [name if name is None else self._pool().key_of(name) for name in each]
        for name, key in zip(each, keys, strict=True):
            if name is not None and key is None:
                raise RequestError(f"There is no adapter {name!r}: load it first.", "adapter")
        return keys

    # ------------------------------------------------------------------ training

    def update_weights(
        self, given: Any, *, version: int | None = None, recompute: bool = False
    ) -> int:
        """Change weights while it runs, each in place; returns the version of the new ones.

        Args:
            given: a tree of arrays, an iterable of (name, array), or the path of a checkpoint or of
                a safetensors file. Names and shapes are those of Hugging Face's checkpoints, and
                arrays may be anywhere in this process. What is not among them stays.
            version: of the new weights, larger than the last one; None: by 1.
            recompute: requests that have begun lose the KV of the old weights.

        Raises:
            RolloutError: not to this engine, or not now.
            CheckpointError: the weights are not the model's.
        """
        with self._control() as rollouts:
            rollouts.update(given, time.monotonic(), version=version, recompute=recompute)
            return rollouts.version

    @property
    def weight_version(self) -> int:
        """The version of the weights: 0 at the start."""
        return self.rollouts.version

    def pause(self, mode: PauseMode = "keep") -> None:
        """Begin no step until `resume`.

        keep: requests that run stay where they are. wait: they come to their end first. abort: all
        end now. New ones wait.
        """
        with self._control() as rollouts:
            rollouts.pause(mode, time.monotonic())
        while not self.rollouts.is_paused:
            with self._control() as rollouts:
                self._backlog += self.engine.step(time.monotonic())
                rollouts.end_wait(time.monotonic())

    def resume(self) -> None:
        """Go on after `pause`. Raises RolloutError while it sleeps or lacks weights."""
        with self._control() as rollouts:
            rollouts.resume()

    @property
    def is_paused(self) -> bool:
        """Whether no step is begun."""
        return self.rollouts.is_paused

    def sleep(self, level: int = 1, mode: PauseMode = "abort") -> None:
        """Give up device memory until `wake_up`: KV, and weights.

        Level 1 keeps weights in host memory, level 2 nowhere; 0 pauses alone. `mode` is as for
        `pause`; requests that it keeps are computed again from their tokens.
        """
        if mode == "wait":
            self.pause(mode)
        with self._control() as rollouts:
            rollouts.sleep(level, mode, time.monotonic())

    def wake_up(self, tags: Collection[str] | None = None) -> None:
        """Bring back `weights`, `kv_cache`, or both; goes on when all is there.

        After level 2 weights come with the next `update_weights`.
        """
        with self._control() as rollouts:
            rollouts.wake_up(tags)

    @property
    def is_sleeping(self) -> bool:
        """Whether weights or KV are not on the devices."""
        return self.rollouts.is_sleeping

    def reset_prefix_cache(self) -> None:
        """Find nothing any more that was cached."""
        with self._lock:
            self.engine.flush_prefix_cache()

    @contextmanager
    def _control(self) -> Iterator[Rollouts]:
        """Give the control of the engine, between two steps."""
        with self._lock:
            try:
                yield self.rollouts
            finally:
                self._backlog += self.rollouts.take_events()
                self._holder = threading.get_ident() if self.is_paused else None
                self._lock.notify_all()

    def _turn(self) -> list[Event]:
        """Step once, or wait while another thread holds the engine.

        Raises RequestError where this thread does, which would wait for ever.
        """
        with self._lock:
            while self.is_paused and not self._backlog:
                if self._holder == threading.get_ident():
                    raise RequestError("The engine is paused or sleeps: resume or wake it up.")
                self._lock.wait()
            events, self._backlog = self._backlog, []
            if self.adapters is not None:
                events += self._without_lost(self.adapters)
            return events or self.engine.step(time.monotonic())

    def _without_lost(self, pool: AdapterPool) -> list[Event]:
        """End requests whose adapter was dropped, and can be read no more."""
        if not (lost := pool.lost):
            return []
        gone = {request for request, _ in self.engine.unfinished() if request.adapter in lost}
        ended = [event for each in gone for event in self.engine.abort(each.request_id)]
        return [replace(event, error="The adapter cannot be read any more.") for event in ended]

    # ------------------------------------------------------------------ states

    @property
    def default_sampling_params(self) -> SamplingParams:
        """16 tokens, drawn as the model's generation_config.json says where it has one."""
        return replace(DEFAULT_SAMPLING, **self.sampling_defaults)

    @property
    def deployment(self) -> Deployment:
        """What the settings came to; of phases, that of prefill."""
        return self._built.deployment

    @property
    def num_hosts(self) -> int:
        """Return the machines of the engine."""
        return jax.process_count()

    @property
    def num_compiles(self) -> int:
        """Programs compiled since the start was complete; more than 0 is a bug."""
        return self._compiles.count

    def stats(self) -> dict[str, Any]:
        """Counters since the start, and what starting took."""
        stats = self.engine.stats()
        switches = {f"{a}->{b}": count for (a, b), count in stats.mode_switches.items()}
        return {
            "steps_by_mode": stats.steps_by_mode,
            "mode_switches": switches,
            "compiles_after_warmup": self.num_compiles,
            "kv_usage": stats.kv_usage,
            "num_running": stats.num_running,
            "num_waiting": stats.num_waiting,
            "num_preemptions": stats.num_preemptions,
            "num_failed_steps": stats.num_failed_steps,
            "prefix_query_tokens": stats.num_prefix_query_tokens,
            "prefix_hit_tokens": stats.num_prefix_hit_tokens,
            "host_tier": {} if (host := stats.find(HostStats)) is None else asdict(host),
            "disk_tier": {} if (disk := stats.find(DiskStats)) is None else asdict(disk),
            "drafts": {} if (drafts := stats.find(DraftStats)) is None else drafts.by_drafter,
            "fleet": {} if (fleet := stats.find(FleetState)) is None else plain_counters(fleet),
            "routing": {} if (routing := stats.find(RoutingState)) is None else plain_sums(routing),
            "phases": {} if (phases := stats.find(ReshardingState)) is None else asdict(phases),
            "mesh": self._built.mesh,
            "weight_version": self.weight_version,
            "attention": self._built.attention,
            "experts": self._built.experts,
            "rows": self._built.rows,
            "load_seconds": round(self._built.load_seconds, 3),
            "compile_seconds": round(self._built.compile_seconds, 3),
        }

    def fleet(self) -> dict[str, Any] | None:
        """Which groups there are, what each does, and the latest changes with their reasons.

        None: without `fleet` groups stay as they are. docs/fleet.md says how to read it.
        """
        state = self.engine.stats().find(FleetState)
        return None if state is None else plain_state(state, time.monotonic())

    def explain(self) -> dict[str, Any]:
        """Why steps, sizes and groups are as they are, beside what others would have cost.

        As `GET /explain` of a server has it: docs/serving.md.
        """
        with self._lock:
            return explain(self.engine, time.monotonic())

    # ------------------------------------------------------------------- inside

    def _requests(
        self,
        prompts: list[Prompt],
        sampling_params: SamplingParams | Seq[SamplingParams] | None,
        adapters: list[str | None],
    ) -> list[tuple[Request, str | None]]:
        """Tokenize; returns each request with its prompt's text, if it had one."""
        sampling = sampling_params or self.default_sampling_params
        each = [sampling] * len(prompts) if isinstance(sampling, SamplingParams) else list(sampling)
        if len(each) != len(prompts):
            raise RequestError(f"There are {len(prompts)} prompts but {len(each)} sampling_params.")
        now, requests = time.monotonic(), []
        for prompt, params, adapter in zip(prompts, each, adapters, strict=True):
            text, ids = self._encode(prompt)
            name = f"request-{self._num_requests}"
            self._num_requests += 1
            rules = ruled((), params.n, lambda _, of=(params, ids): self._rules(*of))
            own = {"constraints": tuple(rules), "adapter": adapter}
            request = Request(name, ids, params, arrival_seconds=now, **own)
            requests.append((request, text))
        return requests

    def _rules(self, sampling: SamplingParams, prompt: Seq[int]) -> list[TokenConstraint]:
        marks = marks_of(self.tokenizer.chat_template) if self.tokenizer is not None else None
        vocab_size = self.engine.limits.vocab_size
        return rules_of(sampling, self.tokenizer, vocab_size, prompt, marks)

    def _stream(self, requests: list[tuple[Request, str | None]]) -> Deltas:
        places, assemblers = {}, {}
        try:
            for index, (request, text) in enumerate(requests):
                with self._lock:
                    self.engine.admit(request)
                places[request.request_id] = index
                assemblers[request.request_id] = OutputAssembler(
                    request, text, self.tokenizer, self._stopper(request.request_id)
                )
            while assemblers:
                for event in self._turn():
                    assembler = assemblers.get(event.request_id)
                    if assembler is None:
                        continue  # of an abandoned stream
                    delta = assembler.apply(event)
                    if event.is_last:
                        del assemblers[event.request_id]
                    if delta or event.is_last:
                        output = assembler.output if event.is_last else None
                        yield places[event.request_id], delta, output
        finally:
            with self._lock:
                for name in assemblers:
                    self.engine.abort(name)

    def _stopper(self, request_id: str):
        def stop(index: int) -> None:
            with self._lock:
                self._backlog += self.engine.finish(request_id, index, "stop")

        return stop

    def _encode(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise RequestError("This model has no tokenizer: give token ids as the prompt.")
            with _unicode():
                return prompt, self.tokenizer.encode(prompt)
        ids = prompt.get("prompt_token_ids") if isinstance(prompt, Mapping) else prompt
        if not isinstance(ids, Seq) or isinstance(ids, str | bytes):
            raise RequestError(
                "A prompt is text, a list of token ids, or {'prompt_token_ids': [...]}."
            )
        return None, list(ids)

    def _encode_chat(self, messages: Messages, **variables: Any) -> list[int]:
        if self.tokenizer is None:
            raise RequestError("This model has no tokenizer, and so no chat template.")
        if self._template is None and self.tokenizer.chat_template is not None:
            self._template = ChatTemplate(self.tokenizer.chat_template)
        with _unicode():
            return encode_chat(self.tokenizer, messages, template=self._template, **variables)


@contextmanager
def _unicode() -> Iterator[None]:
    """Say of text that no tokenizer takes what is wrong with it."""
    try:
        yield
    except UnicodeEncodeError as error:
        words = f"The prompt is not valid Unicode at character {error.start}: is it UTF-8?"
        raise RequestError(words) from None


def _as_conversations(messages: Messages | Seq[Messages]) -> list[Messages]:
    """Return the conversations as a list; a single one may come without."""
    if not messages or isinstance(messages[0], Mapping):
        return [cast(Messages, messages)]
    return list(cast(Seq[Messages], messages))


def _as_list(prompts: Prompt | Seq[Prompt]) -> list[Prompt]:
    """Return the prompts as a list; a single one may come without."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if prompts and all(isinstance(item, int) for item in prompts):
        return [cast(Seq[int], prompts)]
    return list(cast(Seq[Prompt], prompts))


def _silent(task: str, done: int, total: int) -> None:
    """Show nothing."""

"""What both front ends ask of the server: health, models, tokens, generations. No JAX."""

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec

from serving.server.async_embedder import AsyncEmbedder
from serving.server.async_engine import AsyncEngine, Observer
from serving.server.dialogue import Dialogue
from serving.server.embedding_metrics import EmbeddingMetrics
from serving.server.errors import ServeError, invalid, unknown_model
from serving.server.features import feature_metrics
from serving.server.fields import ChatFields, DetokenizeFields, TokenizeFields
from serving.server.grammar import Grammars
from serving.server.json_body import read
from serving.server.metrics import Metrics
from serving.server.options import ServerOptions
from serving.server.prompts import Prompts, template_variables
from serving.server.quotas import CALLER, Quotas
from serving.server.routed_experts import wants_experts
from serving.server.schema import Wish, fitting, prompts_of, with_server_defaults
from serving.server.served import Generation, ServedModel
from serving.server.start_phases import Phases
from serving.server.texts import Texts
from serving.server.timeline import Timeline
from serving.server.tools import checked_functions, read_calls
from shiftjax.core.request import Request, SamplingParams, derive_seed
from shiftjax.text.token_rules import ruled

TEXT_THREADS = 2  # for texts that come and answers that go
INLINE_LOGPROBS = 4096  # responses with up to this many are written on the event loop: a
# million would keep it busy for seconds


class Service:
    """The server without its listeners. Until `open`, everything but liveness is "starting"."""

    def __init__(self, options: ServerOptions):
        self.options = options
        self.phases = Phases()  # of the start
        self.metrics = Metrics(options.metrics_prefix, self.phases)
        self._embedding_metrics = EmbeddingMetrics(self.metrics)
        self.timeline = Timeline()
        self._quotas = Quotas(options)
        self.model: ServedModel | None = None
        self.engine: AsyncEngine | AsyncEmbedder | None = None
        self.listeners: list[Callable[[bool], None]] = []
        self.on_start: list[Callable[[Generation], None]] = []  # in the task of the call
        self.on_close: list[Callable[[], Awaitable[None]]] = []
        self.watchers: list[Observer] = []  # beside metrics and the page; before the engine is
        self.grammars: Grammars | None = None
        self._prompts: Prompts | None = None
        self._threads = ThreadPoolExecutor(TEXT_THREADS, thread_name_prefix="text")

    def open(self, model: ServedModel, engine: AsyncEngine | AsyncEmbedder) -> None:
        """Begin to serve."""
        self.model, self.engine = model, engine
        self.timeline.targets = model.targets
        self.phases.end()
        longest = engine.request_limits.max_model_len
        texts = Texts(model.tokenizer, model.template, longest, self._threads)
        self._prompts = Prompts(texts, Dialogue(model.tokenizer, model.template, self.options))
        if model.tokenizer is not None and model.task == "generate":
            self.grammars = Grammars(model.tokenizer, engine.request_limits.vocab_size)
        counts = model.num_programs, model.num_compiles
        self.metrics.collectors += [
            partial(feature_metrics, engine),
            self._embedding_metrics.metrics,
            self.timeline.metrics,
        ]
        self.metrics.open(model.name, engine, model.info, *counts, model.attention)
        self.notify()

    def announce_end(self) -> None:
        """Say that it is not ready, and take requests nevertheless."""
        if self.engine is not None:
            self.engine.is_leaving = True
        self.notify()

    def begin_drain(self) -> None:
        """Refuse new requests from now on."""
        if self.engine is not None:
            self.engine.stop_accepting()
        self.notify()

    def notify(self) -> None:
        """Tell the listeners that readiness may have changed."""
        for listener in self.listeners:
            listener(self.is_ready)

    async def close(self) -> bool:
        """End everything; False if a step hangs."""
        for close in self.on_close:
            await close()
        self._threads.shutdown(wait=False, cancel_futures=True)
        if self.grammars is not None:
            self.grammars.close()
        return self.engine is None or await self.engine.close()

    @property
    def observers(self) -> tuple[Observer, ...]:
        """What an engine of this service reports to."""
        return self.metrics, self.timeline, *self.watchers

    @property
    def embed_observers(self) -> tuple[EmbeddingMetrics, Timeline]:
        """What an embedder of this service reports to."""
        return self._embedding_metrics, self.timeline

    # ------------------------------------------------------------------ health

    @property
    def is_ready(self) -> bool:
        """Whether requests are welcome."""
        return self.engine is not None and self.engine.is_ready

    @property
    def makes_progress(self) -> bool:
        """Whether steps finish; true while there is nothing to do."""
        return self.engine is None or self.engine.makes_progress

    def running(self) -> tuple[ServedModel, AsyncEngine | AsyncEmbedder]:
        """The model and its engine. Raises `ServeError` while there is none."""
        if self.model is None or self.engine is None:
            raise self.still_starting()
        return self.model, self.engine

    def still_starting(self) -> ServeError:
        """The error of what comes before there is a model; it says what the start does."""
        words = f"The server is still loading its model: {self.phases.words()}."
        return ServeError("starting", words)

    def generating(self) -> tuple[ServedModel, AsyncEngine]:
        """The model and its engine. Raises `ServeError` for an encoder, too."""
        model, engine = self.running()
        if isinstance(engine, AsyncEmbedder):
            does = "embeds texts (/v1/embeddings, /v1/rerank)"
            if model.reader is not None and model.reader.pooling.scores:
                does = "scores texts (/v1/score, /v1/rerank, /v1/classify)"
            message = f"{model.name} {does}, and generates none here."
            raise ServeError("invalid", message, param="model", code="wrong_task")
        return model, engine

    def embedding(self) -> tuple[ServedModel, AsyncEmbedder]:
        """The encoder and what runs it. Raises `ServeError` for a decoder, too."""
        model, engine = self.running()
        if not isinstance(engine, AsyncEmbedder):
            message = f"{model.name} generates text; a server with --task embed embeds with it."
            raise ServeError("invalid", message, param="model", code="wrong_task")
        return model, engine

    @property
    def prompts(self) -> Prompts:
        """What makes token ids of bodies. Raises `ServeError` while there is no model."""
        self.running()
        assert self._prompts is not None
        return self._prompts

    @property
    def texts(self) -> Texts:
        """What makes token ids of texts. Raises `ServeError` while there is no model."""
        return self.prompts.texts

    @property
    def dialogue(self) -> Dialogue:
        """How the model is told of tools. Raises `ServeError` while there is no model."""
        return self.prompts.dialogue

    def model_named(self, name: str | None) -> ServedModel:
        """The model of this name, or with the adapter of this name; None is it without one."""
        model, _ = self.running()
        if name is not None and not model.is_called(name):
            raise unknown_model()
        return model

    # ------------------------------------------------------------------ generations

    async def start(
        self,
        read_fields: Callable[[Any], Wish],
        values: Any,
        request_id: str | None = None,
        timeout: float | None = None,
        seed: int | None = None,
    ) -> Generation:
        """Start what `read_completion` or `read_chat` finds in a body. The caller closes it.

        With `seed`, draws of a body without a seed depend on it and on the place of the prompt;
        else on how many requests the engine has had before.
        """
        try:
            model, engine = self.generating()
            wish = with_server_defaults(self.dialogue.noted(read_fields(values)), model.defaults)
            if self.options.force_include_usage:
                wish.fields.ask_for_usage()
            with ExitStack() as lent:
                lent.enter_context(self._quotas.lent(CALLER.get(), _num_sequences(wish)))
                generation = await self._submit(engine, wish, request_id, timeout, seed)
                generation.lent = lent.pop_all()
            for tell in self.on_start:
                tell(generation)
            return generation
        except ServeError as error:
            self.refuse(error)
            raise

    def others_wait_for(self, generation: Generation) -> bool:
        """Whether others wait for a start while it holds sequences."""
        _, engine = self.generating()
        if engine.stats.num_waiting == 0 or not generation.holds_sequences:
            return False
        others = (each for each in engine.handles.values() if each not in generation.handles)
        return any(each.num_unbegun for each in others)

    def refuse(self, error: ServeError) -> None:
        """Count a generation that was refused, by this service or by a front end before it."""
        if self.engine is None:
            self.metrics.rejected(error)
        else:
            self.engine.refuse(error)

    async def _submit(
        self,
        engine: AsyncEngine,
        wish: Wish,
        request_id: str | None,
        timeout: float | None,
        seed: int | None,
    ) -> Generation:
        arrival, fields = time.monotonic(), wish.fields
        model = self.model_named(fields.model)
        adapter = model.adapter_of(fields.model)
        if timeout is not None and timeout <= 0:
            raise ServeError("deadline", "The deadline had passed when the request came.")
        check_server_limits(wish, self.options)
        num_prompts = _num_prompts(wish)
        engine.check_room(_num_sequences(wish))
        prompts = await self.prompts.of(wish)
        n, vocab_size = wish.sampling.n, engine.request_limits.vocab_size
        states = ruled(
            await self._constrain(wish, prompts),
            len(prompts) * n,
            lambda index: self.dialogue.rules(wish, prompts[index // n][1], vocab_size),
        )
        prediction = await self._predict(wish)
        name = fields.request_id or request_id or uuid.uuid4().hex
        requests = [
            Request(
                name if num_prompts == 1 else f"{name}-{index}",
                ids,
                _seeded(fitting(wish, len(ids), engine.request_limits), seed, index),
                arrival_seconds=arrival,
                priority=wish.priority,
                min_width=wish.min_width,
                wants_notes=wants_experts(wish, len(ids), engine.request_limits),
                adapter=adapter,
                cache_salt=fields.cache_salt,
                hints=wish.cache_hints,
                constraints=tuple(states[index * wish.sampling.n :][: wish.sampling.n]),
                prediction=prediction,
            )
            for index, (_, ids) in enumerate(prompts)
        ]
        rest = None if timeout is None else timeout - (time.monotonic() - arrival)
        texts = [text for text, _ in prompts]
        streams = bool(fields.stream)
        visible, parser = self.dialogue.visible(wish), self.dialogue.parser(wish, prompts[0][1])
        handles = engine.submit(requests, texts, streams=streams, timeout=rest, visible=visible)
        if fields.timeline:
            handles[0].keep_modes()
        return Generation(name, wish, model.answers_as(fields.model), handles, parser)

    async def _constrain(
        self, wish: Wish, prompts: Sequence[tuple[str | None, Sequence[int]]]
    ) -> Sequence[Any]:
        grammar = self.dialogue.grammar(wish, prompts[0][1])
        if grammar is None:
            return ()
        if self.grammars is None:
            raise invalid("response_format", "needs a tokenizer, which this model has not")
        return await self.grammars.start(grammar, len(prompts) * wish.sampling.n)

    async def _predict(self, wish: Wish) -> tuple[int, ...] | None:
        """The tokens of the expected output, which begins where a prompt ends."""
        if wish.prediction is None:
            return None
        return tuple(await self.texts.encode(wish.prediction, special=False, field="prediction"))

    # ------------------------------------------------------------------ text and tokens

    async def write[T](self, function: Callable[[Generation], T], generation: Generation) -> T:
        """What a function makes of a generation; other requests go on if that takes long."""
        if sum(handle.num_logprobs for handle in generation.handles) <= INLINE_LOGPROBS:
            return function(generation)
        return await self.in_thread(function, generation)

    async def in_thread[T](self, function: Callable[..., T], *arguments: Any) -> T:
        """What a function returns that takes long."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, function, *arguments)

    def read_plain[T: msgspec.Struct](self, kind: type[T], values: Any) -> T:
        """The fields of a body that asks for no generation. Raises `ServeError` for a wrong one."""
        fields, unknown = read(kind, values)
        _check_known(unknown, self.options)
        return fields

    async def tokenize(self, values: Any) -> tuple[ServedModel, TokenizeFields, list[int]]:
        """The token ids of a text or a conversation."""
        fields = self.read_plain(TokenizeFields, values)
        model = self.model_named(fields.model)
        if (fields.prompt is None) == (fields.messages is None):
            raise invalid("prompt", "or messages must be given, and only one of them")
        if fields.messages is not None:
            messages, functions = read_calls(fields.messages), checked_functions(fields.tools or [])
            variables = template_variables(fields)
            return model, fields, await self.prompts.of_chat(messages, functions, variables)
        if fields.continue_final_message:
            raise invalid("continue_final_message", "needs messages")
        for name in ("chat_template_kwargs", "add_generation_prompt", "tools"):
            if getattr(fields, name) not in (None, True):
                raise invalid(name, "needs messages")
        text = fields.prompt or ""
        special = fields.add_special_tokens is not False
        return model, fields, await self.texts.encode(text, special=special)

    async def count(self, read_fields: Callable[[Any], Wish], values: Any) -> tuple[Wish, int]:
        """What `read_chat` or its like finds in a body, and how many tokens its prompts have."""
        self.generating()
        wish = self.dialogue.noted(read_fields(values))
        self.model_named(wish.fields.model)
        _check_known(wish.unknown, self.options)
        return wish, sum(len(ids) for _, ids in await self.prompts.of(wish))

    async def detokenize(self, values: Any) -> str:
        """The text of token ids, special tokens included."""
        fields = self.read_plain(DetokenizeFields, values)
        self.model_named(fields.model)
        tokenizer = self.texts.tokenizer_for("tokens")
        _, engine = self.running()
        limits = engine.request_limits
        if len(fields.tokens) > limits.max_model_len:
            raise invalid("tokens", f"must have at most {limits.max_model_len} entries")
        for token in fields.tokens:
            if not 0 <= token < limits.vocab_size:
                raise invalid("tokens", f"must be in the vocabulary of {limits.vocab_size}")
        return tokenizer.decode(fields.tokens, skip_special_tokens=False)


def _num_prompts(wish: Wish) -> int:
    return 1 if isinstance(wish.fields, ChatFields) else len(prompts_of(wish.fields))


def _num_sequences(wish: Wish) -> int:
    return _num_prompts(wish) * wish.sampling.n


def _seeded(sampling: SamplingParams, seed: int | None, index: int) -> SamplingParams:
    """With a seed of its own for a prompt, where the client has given none."""
    if seed is None or sampling.seed is not None:
        return sampling
    return replace(sampling, seed=derive_seed(seed, index))


def check_server_limits(wish: Wish, options: ServerOptions) -> None:
    """What this server refuses although another may allow it."""
    for name in ("logprobs", "prompt_logprobs"):
        if (getattr(wish.sampling, name) or 0) > options.max_logprobs:
            is_chat = isinstance(wish.fields, ChatFields) and name == "logprobs"
            field = "top_logprobs" if is_chat else name
            raise invalid(field, f"must be at most {options.max_logprobs} on this server")
    _check_known(wish.unknown, options)


def _check_known(unknown: Sequence[str], options: ServerOptions) -> None:
    if unknown and options.strict:
        raise invalid(unknown[0], "is not a field of this request", "unknown_parameter")

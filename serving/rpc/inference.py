"""The Inference service: the same requests as over HTTP, in protobuf."""

from grpc import aio

from serving.proto import shiftjax_pb2 as pb
from serving.proto import shiftjax_pb2_grpc as pb_grpc
from serving.rpc.convert import (
    bounded,
    embed_values,
    generate_values,
    is_chat,
    prompt_values,
)
from serving.rpc.guard import method, request_id
from serving.rpc.output import OutputWriter, prompt_logprobs
from serving.server.embedding import embed
from serving.server.errors import ServeError, invalid
from serving.server.json_body import MAX_VALUES
from serving.server.schema import read_chat, read_completion
from serving.server.served import Generation, ServedModel
from serving.server.service import Service
from serving.server.waiting import Place, tell_the_wait
from serving.server.write_limit import WriteLimit

FOREVER = 365 * 86400.0  # seconds; gRPC reports a missing deadline as one far away


class InferenceServicer(pb_grpc.InferenceServicer):
    """Calls of `shiftjax.v1.Inference` as calls of the service."""

    def __init__(self, service: Service):
        self._service = service

    @method
    async def Generate(self, request: pb.GenerateRequest, context: aio.ServicerContext) -> None:
        """Stream what comes. A client that does not read in time is dropped."""
        with (
            await self._start(request, context, stream=True) as generation,
            WriteLimit(lambda: self._service.others_wait_for(generation)) as limit,
        ):
            (handle,) = generation.handles
            accepted = pb.Accepted(
                request_id=generation.id,
                model=generation.model,
                num_prompt_tokens=len(handle.request.prompt_token_ids),
            )
            await _write(context, limit, pb.GenerateEvent(accepted=accepted))
            if generation.wish.fields.timeline:
                await self._tell_the_wait(generation, context, limit)
            writer = OutputWriter(generation)
            async for deltas in handle:
                for event in (event for delta in deltas for event in writer.events(delta)):
                    await _write(context, limit, event)
            for event in writer.last_events():
                await _write(context, limit, event)

    @method
    async def GenerateOnce(
        self, request: pb.GenerateRequest, context: aio.ServicerContext
    ) -> pb.GenerateResult:
        """Return the complete result in one message, after the generation has ended."""
        with await self._start(request, context, stream=False) as generation:
            (handle,) = generation.handles
            await handle.result()
            return await self._service.write(lambda each: OutputWriter(each).result(), generation)

    @method
    async def Score(
        self, request: pb.ScoreRequest, context: aio.ServicerContext
    ) -> pb.ScoreResponse:
        """Log-probabilities of a prompt."""
        most = self._service.options.max_logprobs
        if not 0 <= request.num_top <= most:
            raise invalid("num_top", f"must be between 0 and {most}")
        values = prompt_values(request)
        values |= {"model": request.model or None, "request_id": request.request_id or None}
        values |= {"max_tokens": 0, "echo": True, "logprobs": request.num_top}
        call = request_id(context), _time_left(context)
        with await self._service.start(read_completion, values, *call) as generation:
            (handle,) = generation.handles
            await handle.result()
            return await self._service.write(_scores, generation)

    @method
    async def Embed(
        self, request: pb.EmbedRequest, context: aio.ServicerContext
    ) -> pb.EmbedResponse:
        """Embeddings as one matrix."""
        try:
            values = embed_values(request)
        except ServeError as error:
            self._service.refuse(error)
            raise
        name, timeout = request_id(context), _time_left(context)
        _, found = await embed(self._service, values, name, timeout)
        return pb.EmbedResponse(
            request_id=found.id,
            model=found.model,
            embeddings=found.matrix.astype("<f4", copy=False).tobytes(),
            dim=found.matrix.shape[1],
            num_tokens=found.num_tokens,
        )

    @method
    async def Tokenize(
        self, request: pb.TokenizeRequest, context: aio.ServicerContext
    ) -> pb.TokenizeResponse:
        """Token ids of a text or a conversation."""
        values = prompt_values(request)
        if request.HasField("add_special_tokens"):
            values["add_special_tokens"] = request.add_special_tokens
        _, _, ids = await self._service.tokenize(values | {"model": request.model or None})
        _, engine = self._service.running()
        longest = engine.request_limits.max_model_len
        return pb.TokenizeResponse(token_ids=ids, max_model_len=longest)

    @method
    async def Detokenize(
        self, request: pb.DetokenizeRequest, context: aio.ServicerContext
    ) -> pb.DetokenizeResponse:
        """The text of token ids."""
        tokens = bounded("tokens", request.token_ids, MAX_VALUES)
        values = {"tokens": tokens, "model": request.model or None}
        return pb.DetokenizeResponse(text=await self._service.detokenize(values))

    @method
    async def GetModel(self, request: pb.GetModelRequest, context: aio.ServicerContext) -> pb.Model:
        """The model of a name; the empty name is the one without an adapter."""
        model = self._service.model_named(request.model or None)
        return self._model(model, request.model or model.name)

    @method
    async def ListModels(
        self, request: pb.ListModelsRequest, context: aio.ServicerContext
    ) -> pb.ListModelsResponse:
        """Every name of the model, and those of its adapters."""
        model, _ = self._service.running()
        return pb.ListModelsResponse(models=[self._model(model, name) for name in model.called()])

    # ------------------------------------------------------------------ inside

    def _model(self, model: ServedModel, name: str) -> pb.Model:
        _, engine = self._service.running()
        limits = engine.request_limits
        return pb.Model(
            id=name,
            max_model_len=limits.max_model_len,
            vocab_size=limits.vocab_size,
            created=model.created,
            task=model.task,
            simulated=model.simulated,
        )

    async def _tell_the_wait(
        self, generation: Generation, context: aio.ServicerContext, limit: WriteLimit
    ) -> None:
        """Say now and then at which place of the queue a request waits."""

        async def tell(place: Place) -> None:
            event = pb.GenerateEvent(waiting=pb.Waiting(**place._asdict()))
            await _write(context, limit, event)

        _, engine = self._service.generating()
        await tell_the_wait(generation.handles, engine.place_of, tell)

    async def _start(
        self, request: pb.GenerateRequest, context: aio.ServicerContext, *, stream: bool
    ) -> Generation:
        read = read_chat if is_chat(request) else read_completion
        values = generate_values(request, stream=stream)
        return await self._service.start(read, values, request_id(context), _time_left(context))


def _scores(generation: Generation) -> pb.ScoreResponse:
    """The log-probabilities of a finished generation's prompt."""
    (handle,) = generation.handles
    return pb.ScoreResponse(request_id=generation.id, logprobs=prompt_logprobs(handle))


async def _write(context: aio.ServicerContext, limit: WriteLimit, event: pb.GenerateEvent) -> None:
    try:
        await limit(context.write(event))
    except TimeoutError:
        raise ServeError("slow_reader", "The client reads too slowly.") from None


def _time_left(context: aio.ServicerContext) -> float | None:
    seconds = context.time_remaining()
    return None if seconds is None or seconds > FOREVER else seconds

"""Adapters that come and go while it serves: vLLM's paths and texts. Off by default.

They are the control key's, as `control.py` has it, and need --enable-lora; what they load lies
below --lora-folder.
"""

import asyncio
from collections.abc import Awaitable, Callable, Collection
from pathlib import Path

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from serving.http.described import Described
from serving.http.guard import read_body
from serving.server.errors import ServeError, invalid
from serving.server.json_body import parse_json, read
from serving.server.served import ServedModel
from serving.server.service import Service
from shiftjax.adapters.adapter import AdapterError
from shiftjax.adapters.folder import path_within
from shiftjax.adapters.pool import AdapterPool
from shiftjax.lora_options import CONFIG
from shiftjax.options import shown

TEXT = "text/plain; charset=utf-8"


class LoadFields(msgspec.Struct):
    """What `/v1/load_lora_adapter` reads."""

    lora_name: str
    lora_path: str  # below --lora-folder
    load_inplace: bool = False  # in the place of one of this name
    is_3d_lora_weight: bool = False  # vLLM is told how experts lie; here the files say it


class UnloadFields(msgspec.Struct):
    """What `/v1/unload_lora_adapter` reads."""

    lora_name: str
    lora_int_id: int | None = None  # vLLM reads it, and has no use for it


class Adapters:
    """The adapters of a service, read one after the other, in threads beside the engine."""

    def __init__(self, service: Service):
        self._service = service
        self._turn = asyncio.Lock()

    async def load(self, request: Request) -> Response:
        """POST /v1/load_lora_adapter."""
        model, pool = self._pool()
        fields = await self._read(LoadFields, request)
        name, path = fields.lora_name, fields.lora_path
        if not name or not path:
            raise ServeError("invalid", "Both 'lora_name' and 'lora_path' must be provided.")
        if name in model.names:
            raise invalid("lora_name", "is the name of the model itself")
        if pool.key_of(name) is not None and not fields.load_inplace:
            message = f"The lora adapter '{name}' has already been loaded. If you want to load the "
            raise ServeError("invalid", message + "adapter in place, set 'load_inplace' to True.")
        async with self._turn:
            await asyncio.to_thread(_load, model, pool, fields)
        return _success(name, "added")

    async def unload(self, request: Request) -> Response:
        """POST /v1/unload_lora_adapter."""
        _, pool = self._pool()
        fields = await self._read(UnloadFields, request)
        name = fields.lora_name
        if not name:
            message = "'lora_name' needs to be provided to unload a LoRA adapter."
            raise ServeError("invalid", message)
        try:
            pool.unload(name)
        except AdapterError:
            message = f"The lora adapter '{name}' cannot be found."
            raise ServeError("not_found", message, param="lora_name") from None
        return _success(name, "removed")

    def _pool(self) -> tuple[ServedModel, AdapterPool]:
        model, _ = self._service.generating()
        if model.adapters is None:
            raise ServeError("not_found", "This server has no adapters: start with --enable-lora.")
        return model, model.adapters

    async def _read[T: msgspec.Struct](self, kind: type[T], request: Request) -> T:
        most = self._service.options.max_request_bytes
        body = await read_body(request.scope, request.receive, most)
        fields, unknown = read(kind, parse_json(body))
        if unknown:
            raise invalid(unknown[0], "is no field of this path")
        return fields


def _load(model: ServedModel, pool: AdapterPool, fields: LoadFields) -> None:
    path = Path()
    try:
        path = path_within(model.adapter_folder, fields.lora_path)
        if not model.simulated and not (path / CONFIG).is_file():
            words = f"{shown(fields.lora_path)} is no directory with an {CONFIG}."
            raise ServeError("not_found", words, param="lora_path")
        pool.load(fields.lora_name, str(path), replace=fields.load_inplace)
    except AdapterError as error:  # clients are not told where the folder is
        told = str(error).replace(str(path), fields.lora_path) if path.name else str(error)
        raise ServeError("invalid", told) from None
    except OSError as error:
        raise ServeError("invalid", f"The adapter cannot be read: {error.strerror}.") from None


def _success(name: str, what: str) -> Response:
    text = f"Success: LoRA adapter '{name}' {what} successfully."
    headers = {"content-type": TEXT, "x-content-type-options": "nosniff"}
    return Response(text, headers=headers)


Verb = Callable[[Adapters, Request], Awaitable[Response]]
PATHS: dict[str, tuple[Verb, type[msgspec.Struct], str]] = {
    "/v1/load_lora_adapter": (Adapters.load, LoadFields, "Let requests ask for an adapter"),
    "/v1/unload_lora_adapter": (Adapters.unload, UnloadFields, "Let none ask for it any more"),
}


def adapter_routes(service: Service, keys: Collection[str]) -> list[Described]:
    """The routes; none where there is no key of theirs."""
    if not keys:
        return []
    adapters = Adapters(service)

    def endpoint(verb: Verb) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            return await verb(adapters, request)

        return answer

    return [
        Described(path, endpoint(verb), summary, body)
        for path, (verb, body, summary) in PATHS.items()
    ]

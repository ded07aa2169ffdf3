"""What balancers, routers and dashboards ask of a server, by the names that others gave it.

`/tokenizer_info`, `/load` and `/ping` are vLLM's, `/server_info` and `/model_info` SGLang's, which
its routers also call `/get_server_info` and `/get_model_info`.
"""

from collections.abc import Awaitable, Callable
from dataclasses import asdict
from importlib.metadata import version as installed
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from serving.http.described import Described, json_response
from serving.server.errors import ServeError
from serving.server.service import Service
from shiftjax.routing.history import RoutingState, plain_state

SECRETS = frozenset(("api_key",))  # settings that nobody is told


def info_routes(
    service: Service, ready: Callable[[Request], Awaitable[Response]]
) -> list[Described]:
    """The routes. `/ping` says what `/health` says, to GET and, as SageMaker asks, to POST."""
    routes = [Described(p, _answers(service, make), text) for p, (make, text) in INFO.items()]

    async def explain(request: Request) -> Response:
        _, engine = service.generating()
        return json_response(await engine.explanations.whole())

    text = "Why steps, sizes and groups are as they are, beside what others would have cost"
    return [
        *routes,
        Described("/explain", explain, text),
        Described("/ping", ready, "Requests are taken", methods=("GET", "POST")),
    ]


def _answers(service: Service, make: Callable[[Service], dict[str, Any]]) -> Any:
    async def answer(request: Request) -> Response:
        return json_response(make(service))

    return answer


def tokenizer_info(service: Service) -> dict[str, Any]:
    """What a client needs to write the same prompts. Raises `ServeError` without a tokenizer."""
    model, engine = service.running()
    tokenizer = model.tokenizer
    if tokenizer is None:
        raise ServeError("not_found", "This model has no tokenizer.")
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "vocab_size": tokenizer.vocab_size,
        "model_max_length": engine.request_limits.max_model_len,
        "bos_token": tokenizer.bos_token,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token": tokenizer.eos_token,
        "eos_token_id": list(tokenizer.eos_token_ids),
        "chat_template": model.template.source if model.template is not None else None,
    }


def model_info(service: Service) -> dict[str, Any]:
    """What the model does, and how much it takes. No path but the name that was given."""
    model, engine = service.running()
    limits = engine.request_limits
    return {
        "model_path": model.name,
        "tokenizer_path": model.name,
        "served_model_name": model.name,
        "is_generation": model.task == "generate",
        "task": model.task,
        "has_chat_template": model.template is not None,
        "max_model_len": limits.max_model_len,
        "vocab_size": limits.vocab_size,
        "simulated": model.simulated or None,
    }


def server_info(service: Service) -> dict[str, Any]:
    """Version, model, what was compiled for it, and the settings of the server less secrets."""
    model, engine = service.running()
    settings = asdict(service.options)
    return {
        "version": installed("shiftjax"),
        "model_path": model.name,
        "served_model_name": model.name,
        "context_length": engine.request_limits.max_model_len,
        "dp_size": 1,  # of addresses: groups of devices are chosen between in here
        "status": "ready" if service.is_ready else "not ready",
        "engine": {**model.info, "num_programs": model.num_programs},
        "settings": {name: value for name, value in settings.items() if name not in SECRETS},
    }


def load(service: Service) -> dict[str, Any]:
    """Requests that are open, as vLLM counts them; sequences that run and wait."""
    _, engine = service.running()
    stats = engine.stats
    return {
        "server_load": len(engine.handles),
        "num_running": stats.num_running,
        "num_waiting": stats.num_waiting,
        "kv_usage": stats.kv_usage,
    }


def routing(service: Service) -> dict[str, Any]:
    """Which experts tokens have chosen of late. Raises `ServeError` without experts."""
    _, engine = service.running()
    state = engine.stats.find(RoutingState)
    if state is None:
        raise ServeError("not_found", "This model has no experts, or nobody counts them.")
    return plain_state(state)


INFO = {
    "/tokenizer_info": (tokenizer_info, "The tokenizer and the chat template"),
    "/server_info": (server_info, "Version, model, settings"),
    "/get_server_info": (server_info, "The same"),
    "/model_info": (model_info, "What the model is"),
    "/get_model_info": (model_info, "The same"),
    "/load": (load, "Requests that run and wait"),
    "/routing": (routing, "Which experts tokens choose, by layer"),
}

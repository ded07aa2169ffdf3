"""Forced tool calls over a running server: how many parse and keep to their schema.

    shiftjax serve smollm2-135m --devices 4 --sp 2 --tp 2
    python scripts/bench.py forced_calls http://localhost:8000 --calls 500

A grammar lets nothing else come, whatever the model would say; only `max_tokens` may cut a call,
so strings and lists of the schemas are bounded. Half of the calls are streamed, half are of a named
function, and sampling goes from greedy to temperature 2. A row is an outcome.
"""

import argparse
import json
import random
from collections import Counter
from collections.abc import Generator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jsonschema_rs
import openai

TEXT = {"type": "string", "maxLength": 24}
COUNT = {"type": "integer", "minimum": 0, "maximum": 99}


def _object(**properties: Any) -> dict[str, Any]:
    fixed = {"type": "object", "additionalProperties": False, "required": [*properties]}
    return fixed | {"properties": properties}


SCHEMAS: Mapping[str, dict[str, Any]] = {
    "get_weather": _object(city=TEXT, days=COUNT),
    "set_light": _object(room={"enum": ["hall", "kitchen"]}, on={"type": "boolean"}),
    "send_mail": _object(to={"type": "array", "items": TEXT, "maxItems": 3}, body=TEXT),
    "search": _object(query=_object(words=TEXT, most=COUNT), exact={"type": "boolean"}),
    "get_time": _object(),
}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": schema}}
    for name, schema in SCHEMAS.items()
]
QUESTIONS = (
    "How is the weather in Rome?",
    "Tell me a joke, and call nothing.",
    'Say {"name": "other", "arguments": {}}</tool_call>',
    "Écris à Zoé: \u201cà demain\u201d \N{WAVING HAND SIGN}",
    "",
)
MAX_TOKENS = 400


def body_of(number: int) -> dict[str, Any]:
    """The request of a number: what is asked, how it is sampled, and what must be called."""
    draw = random.Random(number)
    name = draw.choice(list(SCHEMAS))
    named = {"type": "function", "function": {"name": name}}
    return {
        "messages": [{"role": "user", "content": draw.choice(QUESTIONS)}],
        "tools": TOOLS,
        "tool_choice": named if number % 2 else "required",
        "parallel_tool_calls": False,
        "temperature": draw.choice([0, 0.7, 1, 2]),
        "seed": number,
        "max_tokens": MAX_TOKENS,
    }


def outcome_of(client: openai.OpenAI, model: str, number: int) -> str:
    """`parses`, or what is wrong with the call."""
    body: Any = body_of(number) | {"model": model}
    if number // 2 % 2:
        with client.chat.completions.stream(**body) as stream:
            choice = stream.get_final_completion().choices[0]
    else:
        choice = client.chat.completions.create(**body).choices[0]
    calls = choice.message.tool_calls
    if choice.finish_reason != "tool_calls" or not calls:
        return f"ends by {choice.finish_reason}, with {len(calls or ())} calls"
    call, wanted = calls[0].function, body["tool_choice"]
    if isinstance(wanted, dict) and call.name != wanted["function"]["name"]:
        return "is of another function"
    try:
        is_valid = jsonschema_rs.is_valid(SCHEMAS[call.name], json.loads(call.arguments))
    except ValueError:
        return "is no JSON"
    return "parses" if is_valid else "breaks its schema"


OPTIONS = {"url": (str, "of the server, without /v1"), "--calls": 500, "--at-once": 32}


def measure(args: argparse.Namespace) -> Generator[dict[str, Any], None, dict[str, Any]]:
    """Yield outcomes and how many calls had them; return those that are failures."""
    with (
        openai.OpenAI(base_url=f"{args.url}/v1", api_key="none", timeout=3600) as client,
        ThreadPoolExecutor(args.at_once) as pool,
    ):
        model = client.models.list().data[0].id
        counts = Counter(pool.map(lambda n: outcome_of(client, model, n), range(args.calls)))
    for outcome, count in counts.most_common():
        yield {"outcome": outcome, "calls": count}
    failures = [outcome for outcome in counts if outcome != "parses"]
    return {"model": model, "parses": counts["parses"], "failures": failures}

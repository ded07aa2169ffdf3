"""pydantic-ai runs a tool and reads a typed answer: pydantic_ai_client.py URL MODEL API MODE.

API is chat or responses; MODE how the answer is typed: native (a schema beside tools) or
tool (a call). What it prints: the answers, and what the tool was called with.
"""

import asyncio
import json
import sys

from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

url, name, api, mode = sys.argv[1:]
called = []


class Report(BaseModel):
    """The typed answer."""

    city: str
    sunny: bool


kind = OpenAIChatModel if api == "chat" else OpenAIResponsesModel
model = kind(name, provider=OpenAIProvider(base_url=url, api_key="none"))
typed = NativeOutput(Report) if mode == "native" else ToolOutput(Report, name="report")
agent = Agent(model, instructions="Be short.", output_type=typed)


@agent.tool_plain
def get_weather(city: str, days: int) -> str:
    """The weather of a city."""
    called.append([city, days])
    return "sunshine"


async def streamed() -> dict:
    """The answer of a stream."""
    async with agent.run_stream("Rome?") as stream:
        return (await stream.get_output()).model_dump()


whole = agent.run_sync("Rome?").output.model_dump()
print(json.dumps([[whole, asyncio.run(streamed())], called]))

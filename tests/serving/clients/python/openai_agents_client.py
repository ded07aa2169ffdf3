"""openai-agents runs a tool and reads a typed answer: python openai_agents_client.py URL MODEL API.

API is chat or responses. What it prints: the answer, and what the tool was called with.
"""

import asyncio
import json
import sys

import agents
import openai
from pydantic import BaseModel

url, model, api = sys.argv[1:]
agents.set_tracing_disabled(True)
called = []


class Report(BaseModel):
    """The typed answer."""

    city: str
    sunny: bool


@agents.function_tool
def get_weather(city: str, days: int) -> str:
    """The weather of a city."""
    called.append([city, days])
    return "sunshine"


client = openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0)
kinds = {
    "chat": agents.OpenAIChatCompletionsModel,
    "responses": agents.OpenAIResponsesModel,
}
agent = agents.Agent(
    name="weather",
    instructions="Be short.",
    model=kinds[api](model=model, openai_client=client),
    tools=[get_weather],
    output_type=Report,
    model_settings=agents.ModelSettings(
        reasoning=openai.types.Reasoning(effort="low"), verbosity="low", store=True
    ),
)


async def run() -> list:
    """The answer whole, and streamed."""
    whole = await agents.Runner.run(agent, "Rome?")
    streamed = agents.Runner.run_streamed(agent, "Rome?")
    async for _ in streamed.stream_events():
        pass
    return [each.final_output.model_dump() for each in (whole, streamed)]


print(json.dumps([asyncio.run(run()), called]))

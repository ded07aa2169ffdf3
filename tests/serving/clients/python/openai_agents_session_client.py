"""openai-agents and what the server keeps: python openai_agents_session_client.py URL MODEL.

What it prints: the answers, what the tool was called with, and the kinds of items of the session.
"""

import asyncio
import json
import sys

import agents
import openai

url, model = sys.argv[1:]
agents.set_tracing_disabled(True)
called = []


@agents.function_tool
def get_weather(city: str, days: int) -> str:
    """The weather of a city."""
    called.append([city, days])
    return "sunshine"


client = openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0)
agent = agents.Agent(
    name="weather",
    instructions="Be short.",
    model=agents.OpenAIResponsesModel(model=model, openai_client=client),
    tools=[get_weather],
)


async def run() -> list:
    """In a conversation, and then after a response, streamed."""
    session = agents.OpenAIConversationsSession(openai_client=client)
    first = await agents.Runner.run(agent, "Rome?", session=session)
    second = await agents.Runner.run(agent, "And now?", session=session)
    kinds = [item["type"] for item in await session.get_items()]
    await session.pop_item()
    num_left = len(await session.get_items())
    await session.clear_session()
    alone = await agents.Runner.run(agent, "Rome?", auto_previous_response_id=True)
    streamed = agents.Runner.run_streamed(
        agent, "And now?", previous_response_id=alone.last_response_id
    )
    async for _ in streamed.stream_events():
        pass
    answers = [each.final_output for each in (first, second, alone, streamed)]
    return [answers, called, kinds, num_left]


print(json.dumps(asyncio.run(run())))

"""smolagents runs a tool until it has an answer: python smolagents_client.py URL MODEL.

What it prints: the answer, and what the tool was called with.
"""

import json
import sys

from smolagents import OpenAIServerModel, ToolCallingAgent, tool

called = []


@tool
def get_weather(city: str, days: int) -> str:
    """The weather of a city.

    Args:
        city: its name
        days: how many
    """
    called.append([city, days])
    return "sunshine"


model = OpenAIServerModel(model_id=sys.argv[2], api_base=sys.argv[1], api_key="none")
agent = ToolCallingAgent(tools=[get_weather], model=model, max_steps=4, verbosity_level=0)
print(json.dumps([agent.run("Rome?"), called]))

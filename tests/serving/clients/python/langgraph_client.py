"""A langgraph agent runs a tool: python langgraph_client.py URL MODEL API.

API is chat, responses or anthropic. What it prints: the answers, whole and streamed, and what the
tool was called with.
"""

import json
import sys

from langchain_anthropic import ChatAnthropic
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.prebuilt import create_react_agent

url, name, api = sys.argv[1:]
called = []


@tool
def get_weather(city: str, days: int) -> str:
    """The weather of a city."""
    called.append([city, days])
    return "sunshine"


if api == "anthropic":
    model = ChatAnthropic(base_url=url.removesuffix("/v1"), api_key="none", model=name)
else:
    is_responses = api == "responses"
    model = ChatOpenAI(base_url=url, api_key="none", model=name, use_responses_api=is_responses)
agent = create_react_agent(model, [get_weather], prompt="Be short.")
asked = {"messages": [("user", "Rome?")]}
whole = agent.invoke(asked)["messages"][-1]
*_, last = agent.stream(asked, stream_mode="values")
print(json.dumps([[each.text for each in (whole, last["messages"][-1])], called]))

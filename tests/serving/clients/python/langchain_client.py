"""LangChain calls a tool, whole and streamed: python langchain_client.py URL MODEL [forced]."""

import json
import sys

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI


@tool
def get_weather(city: str, days: int) -> str:
    """The weather of a city."""
    return f"{days} days of sun in {city}"


model = ChatOpenAI(base_url=sys.argv[1], api_key="none", model=sys.argv[2], max_retries=0, seed=1)
bound = model.bind_tools([get_weather])
forced = model.bind_tools([get_weather], tool_choice="get_weather")
tried = (forced,) if "forced" in sys.argv else (bound, forced)
found = [each.invoke("Rome?") for each in tried]
for each in tried:
    chunks = list(each.stream("Rome?"))
    whole = chunks[0]
    for chunk in chunks[1:]:
        whole += chunk
    found.append(whole)
for message in found:
    assert not message.invalid_tool_calls, message
call = found[len(tried) - 1]
again = tried[0].invoke([("user", "Rome?"), call, get_weather.invoke(call.tool_calls[0])])
print(json.dumps([[(c["name"], c["args"]) for c in m.tool_calls] for m in [*found, again]]))

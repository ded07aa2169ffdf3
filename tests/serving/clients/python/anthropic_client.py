"""The Anthropic package runs a tool until it has an answer: python anthropic_client.py URL MODEL.

What it prints: the answers, whole and streamed, and what the tool was called with.
"""

import json
import sys

import anthropic

called = []


@anthropic.beta_tool
def get_weather(city: str, days: int) -> str:
    """The weather of a city.

    Args:
        city: its name
        days: how many
    """
    called.append([city, days])
    return "sunshine"


client = anthropic.Anthropic(base_url=sys.argv[1], api_key="none", max_retries=0)
options = {
    "model": sys.argv[2],
    "max_tokens": 500,
    "system": "Be short.",
    "tools": [get_weather],
    "messages": [{"role": "user", "content": "Rome?"}],
    "output_config": {"effort": "low"},
    "thinking": {"type": "adaptive"},
}
whole = client.beta.messages.tool_runner(**options).until_done()
last = None
for stream in client.beta.messages.tool_runner(**options, stream=True):
    last = stream.get_final_message()
print(json.dumps([[each.content[-1].text for each in (whole, last)], called]))

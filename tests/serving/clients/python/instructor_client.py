"""instructor in its default mode reads an object: python instructor_client.py URL MODEL."""

import json
import sys

import instructor
import openai
from pydantic import BaseModel


class Weather(BaseModel):
    """What is asked for."""

    city: str
    days: int


client = instructor.from_openai(openai.OpenAI(base_url=sys.argv[1], api_key="none", max_retries=0))
found = client.create(
    model=sys.argv[2],
    messages=[{"role": "user", "content": "Two days in Rome?"}],
    response_model=Weather,
    max_retries=0,
    seed=1,
)
print(json.dumps(found.model_dump()))

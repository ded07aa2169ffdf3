"""Which of some texts is closest to a question, by the OpenAI client.

shiftjax serve minilm-l6 &
python examples/embeddings.py [http://localhost:8000/v1]
"""

import sys

import numpy as np
from openai import OpenAI

QUESTION = "How do I keep bread fresh?"
TEXTS = [
    "Store loaves in a linen bag, at room temperature.",
    "The bridge was opened to traffic in 1932.",
    "Comets are made of ice, dust and rock.",
]


def main(url: str = "http://localhost:8000/v1") -> None:
    """Print the texts, the closest first, with the cosine of their embeddings to the question's."""
    client = OpenAI(base_url=url, api_key="none")
    model = client.models.list().data[0].id
    found = client.embeddings.create(model=model, input=[QUESTION, *TEXTS])
    vectors = np.array([each.embedding for each in found.data])  # of unit length
    cosines = vectors[1:] @ vectors[0]
    for place in np.argsort(-cosines):
        print(f"{cosines[place]:.3f}  {TEXTS[place]}")


if __name__ == "__main__":
    main(*sys.argv[1:])

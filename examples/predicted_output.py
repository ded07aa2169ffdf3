"""OpenAI's Predicted Outputs: the client sends the text that it expects back, nearly unchanged.

shiftjax serve --model smollm2-135m --speculation suffix &
python examples/predicted_output.py [http://localhost:8000/v1]
"""

import sys

from openai import OpenAI

CODE = """def area(x, y):
    \"\"\"The area of a rectangle with sides x and y.\"\"\"
    return x * y
"""


def main(url: str = "http://localhost:8000/v1") -> None:
    """Ask for a parameter to be renamed, and say how much of the prediction was used."""
    client = OpenAI(base_url=url, api_key="none")
    model = client.models.list().data[0].id
    answer = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": f"Rename x to width, and nothing else:\n{CODE}"}],
        prediction={"type": "content", "content": CODE.replace("x", "width")},
        temperature=0,
        max_tokens=96,
    )
    print(answer.choices[0].message.content)
    details = answer.usage and answer.usage.completion_tokens_details
    if details:
        accepted, rejected = details.accepted_prediction_tokens, details.rejected_prediction_tokens
        print(f"of the prediction {accepted} tokens were right, {rejected} wrong")


if __name__ == "__main__":
    main(*sys.argv[1:])

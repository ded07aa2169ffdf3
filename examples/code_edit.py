"""An edit of code with suffix drafts: most of the answer is in the prompt, so few steps are needed.

python examples/code_edit.py [MODEL]
"""

import inspect
import sys

from shiftjax import LLM, SamplingParams


def main(model: str = "smollm2-135m") -> None:
    """Ask for a function with another name, and say how many steps it took."""
    llm = LLM(model, speculation="suffix", max_model_len=1024, max_num_seqs=8)
    code = inspect.getsource(inspect.cleandoc)
    question = f"Write this Python function again, with the name `clean`:\n{code}"
    params = SamplingParams(max_tokens=128, temperature=0)
    (output,) = llm.chat([[{"role": "user", "content": question}]], params)
    metrics = output.metrics
    print(output.outputs[0].text)
    if metrics is not None:
        num_steps = metrics.num_output_tokens - metrics.num_accepted_tokens
        print(f"{metrics.num_output_tokens} tokens in {num_steps} steps; {llm.stats()['drafts']}")


if __name__ == "__main__":
    main(*sys.argv[1:])

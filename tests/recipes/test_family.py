"""The recipe of `docs/CORE.md` for a family of models, carried out in a copy of the sources."""

import pytest
from copied import change, copy_tree, run_in

TRAITS = "shiftjax/arch/traits.py"
ROW = '        "mixtral": Decoder('
# It is Llama with norms of queries and keys, which is what the oracle computes as Qwen3.
CHECK = """
import conftest, json, tempfile
from pathlib import Path

from engines import crowd, make, run
from oracle import numpy_llama
from shiftjax.arch.weights import weights_of
from shiftjax.core.request import SamplingParams
from shiftjax.weights.hf_config import read_config, to_json

directory = Path(tempfile.mkdtemp())
config, tensors = numpy_llama.random_checkpoint(
    directory, seed=7, model_type="qwen3", num_attention_heads=9, num_key_value_heads=3
)
renamed = config | {"model_type": "modest", "architectures": ["ModestForCausalLM"]}
(directory / "config.json").write_text(json.dumps(renamed))

model = read_config(directory)
assert (model.architecture, model.qk_norm) == ("modest", True)
assert to_json(model, "float32")["architectures"] == ["ModestForCausalLM"]
assert {weight.source for weight in weights_of(model)} == set(tensors)

engine = make(directory, sp=2, tp=1, shift_threshold=6).engine
prompts = crowd(1, 4)
sampling = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
events = run(engine, prompts, [sampling] * len(prompts))
for number, prompt in enumerate(prompts):
    tokens = [token for event in events[number, 0] for token in event.token_ids]
    assert tokens == numpy_llama.greedy(config, tensors, prompt, 8), prompt
assert set(engine.stats().steps_by_mode) == {"base", "shift"}
"""


@pytest.mark.costs(16)
def test_a_decoder_that_differs_by_one_trait_takes_one_file(tmp_path):
    """It is read, split over two devices, and has the tokens of an implementation not ours."""
    copy = copy_tree(tmp_path)
    row = '        "modest": Decoder("ModestForCausalLM", {"qk_norm": True}),\n'
    change(copy, TRAITS, ROW, row + ROW)
    run_in(copy, CHECK)

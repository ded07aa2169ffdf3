"""Servers with adapters as processes: flags to tokens, and starts that end in a line."""

import shutil

import httpx
import pytest
from adapters_kit import adapter, expected, modules
from kit import metric_total, metric_values
from served import PROMPT, serve

FLAGS = "--enable-lora", "--max-lora-rank=8", "--max-loras=1", "--sp=1"
NUM = 8


def tokens(served, model: str | None) -> list[int]:
    answer = served.complete(model=model, max_tokens=NUM)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["token_ids"]


@pytest.mark.costs(15)
def test_a_server_with_more_adapters_than_slots(model, cache_dir, tmp_path):
    shutil.copytree(adapter(3)[0], tmp_path / "third")
    (tmp_path / "key").write_text("trainer")
    own = ["--lora-modules", *modules(1, 2).split(","), f"--lora-folder={tmp_path}"]
    own += [f"--control-key-file={tmp_path / 'key'}"]
    with serve(model[0], cache_dir, *FLAGS, *own) as served:
        served.wait_for("/health/ready", 200)
        names = {None: None, "tiny": None, "a1": 1, "a2": 2}
        for name, seed in [*names.items(), *names.items()]:
            assert tokens(served, name) == expected(tuple(PROMPT), seed, NUM)
        trainer = httpx.Client(
            base_url=served.url, headers={"authorization": "Bearer trainer"}, trust_env=False
        )
        with trainer as client:
            wish = {"lora_name": "a3", "lora_path": "third"}
            assert client.post("/v1/load_lora_adapter", json=wish).status_code == 200
        assert tokens(served, "a3") == expected(tuple(PROMPT), 3, NUM)
        assert metric_total(metric_values(served.client), "shiftjax:lora_slot_writes_total") == 5
        served.end_well()


@pytest.mark.parametrize(
    ("module", "words"),
    [
        ("a", "lora_modules: 'a': '/nowhere' is no directory with an adapter_config"),
        ("tiny", "lora_modules: 'tiny' is a name of the model itself"),
        ("wide", "rank 16 is more than max_lora_rank = 8"),
    ],
)
def test_an_adapter_that_cannot_be_served_ends_the_start_in_a_line(model, cache_dir, module, words):
    path = "/nowhere" if module == "a" else adapter(1, rank=16)[0]
    module = f"{module}={path}"
    with serve(model[0], cache_dir, *FLAGS, f"--lora-modules={module}") as served:
        code, out, err = served.end()
        assert (code, out) == (2, "")
        assert words in err.splitlines()[-1] and "Traceback" not in err

"""Run vLLM's own tests of its API server against this server.

    pip download --no-deps --no-binary :all: vllm==0.29.0       # or a checkout: the sources
    python scripts/peers/vllm_tests.py SOURCES [TEST_FILE ...] --json found.json

It runs in an environment with openai, anthropic, pytest, pytest-asyncio, transformers and torch;
`--shiftjax` names the Python of this project. Tests that import parts of vLLM's engine are
skipped: a stub stands for its package. All servers serve SmolLM2-135M under the name that a
test asks for, so tests of what a model knows may fail.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

FILES = (
    "openai/chat_completion/test_chat.py",
    "openai/chat_completion/test_chat_echo.py",
    "openai/chat_completion/test_chat_logit_bias_validation.py",
    "openai/chat_completion/test_completion_with_function_calling.py",
    "openai/chat_completion/test_enable_force_include_usage.py",
    "openai/chat_completion/test_include_reasoning.py",
    "openai/chat_completion/test_root_path.py",
    "openai/completion/test_completion.py",
    "openai/completion/test_prompt_validation.py",
    "openai/completion/test_token_in_token_out.py",
    "openai/models/test_models.py",
    "openai/responses/test_basic.py",
    "openai/responses/test_errors.py",
    "openai/responses/test_function_call.py",
    "openai/responses/test_sampling_params.py",
    "openai/responses/test_simple.py",
    "openai/responses/test_stateful.py",
    "openai/responses/test_structured_output.py",
    "openai/test_chunked_prompt.py",
    "openai/test_return_token_ids.py",
    "openai/test_return_tokens_as_ids.py",
    "anthropic/test_messages.py",
    "serve/instrumentator/test_metrics.py",
    "serve/instrumentator/test_basic.py",
    "serve/tokenize/test_tokenization.py",
)
STUBS = Path(__file__).parent / "vllm_stub"
ROOT = Path(__file__).parents[2]
# Settings that are small enough for a CPU; they stand behind those of the tests.
SMALL = (
    "--devices 1 --dtype float32 --max-num-seqs 16 --max-num-batched-tokens 256 "
    "--token-buckets 16,256 --num-blocks 2000 --max-model-len 4096 "
    '--override-generation-config {"max_new_tokens":128}'
)


def main() -> None:
    """Run the tests, and print how many passed of each file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("sources", type=Path)
    parser.add_argument("files", nargs="*", default=FILES)
    parser.add_argument("--shiftjax", default=str(ROOT / ".venv" / "bin" / "python"))
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = run(arguments, Path(folder))
    for name, tests in found.items():
        counts = Counter(test["outcome"] for test in tests.values())
        print(f"{name:60} {dict(counts)}")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def run(arguments: argparse.Namespace, folder: Path) -> dict[str, dict[str, dict[str, str]]]:
    """What every test gave, by file and name: its outcome and the first line of its error."""
    tests = folder / "tests"
    shutil.copytree(arguments.sources / "tests" / "entrypoints", tests / "entrypoints")
    shutil.copy(STUBS / "vllm.py", folder)
    shutil.copy(STUBS / "utils.py", tests / "utils.py")
    (tests / "__init__.py").touch()
    export = "from shiftjax.text.tokenizer import load_tokenizer; import sys, pathlib;"
    export += "from shiftjax.weights.locate import resolve_model as find;"
    export += "load_tokenizer(find('smollm2-135m').path).save(pathlib.Path(sys.argv[1]))"
    environ = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    tokenizer = folder / "tokenizer"
    tokenizer.mkdir()
    command = [arguments.shiftjax, "-c", export, str(tokenizer)]
    subprocess.run(command, check=True, env=environ, cwd=ROOT)
    names = {"SHIFTJAX": arguments.shiftjax, "OURS": ROOT, "SMALL": SMALL, "TOKENIZER": tokenizer}
    environ = os.environ | {name: str(value) for name, value in names.items()}
    environ |= {"PYTHONPATH": str(folder)}
    report = folder / "report.xml"
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "--timeout=900",
        "--continue-on-collection-errors",
    ]
    command += [f"--junitxml={report}", "--rootdir", str(folder), "-o", "asyncio_mode=auto"]
    command += [str(tests / "entrypoints" / name) for name in arguments.files]
    subprocess.run(command, env=environ, cwd=folder, check=False)
    return read(report)


def read(report: Path) -> dict[str, dict[str, dict[str, str]]]:
    """The outcomes in a report of pytest."""
    found: dict[str, dict[str, dict[str, str]]] = {}
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        name = case.get("classname", "").removeprefix("tests.entrypoints.").replace(".", "/")
        ended = next((e for e in case if e.tag in ("failure", "error", "skipped")), None)
        outcome = "passed" if ended is None else ended.tag
        words = "" if ended is None else ended.get("message", "").split("\n")[0][:300]
        found.setdefault(name, {})[case.get("name", "")] = {"outcome": outcome, "words": words}
    return found


if __name__ == "__main__":
    main()

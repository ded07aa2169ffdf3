#!/bin/sh
# Packs what scripts/gpu_run.py needs on a machine that has no network: the sources of this
# checkout, and of the packages beside it those that a bare machine lacks, without compiled parts.
#
#     sh scripts/gpu_bundle.sh BUNDLE.tgz
#
# There, with a Python >= 3.12 that has jax with its plugin for GPUs, jaxtyping, tokenizers and
# safetensors, in one command for each stage:
#
#     tar xzf BUNDLE.tgz
#     PYTHONPATH=shiftjax-gpu:shiftjax-gpu/packages python3 shiftjax-gpu/scripts/gpu_run.py \
#         --out OUT --stage A
set -eu

python=${PYTHON:-.venv/bin/python}
bundle=$(realpath "$1")
cd "$(dirname "$0")/.."
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
mkdir "$folder/shiftjax-gpu"
git ls-files -z --cached --others --exclude-standard \
    LICENSE shiftjax serving pallas_kernels scripts 'benchmarks/gpu_*.json' |
    tar -c --null --files-from - | tar -x -C "$folder/shiftjax-gpu"

# flax, what it imports, and what is used of that: msgpack and yaml do without their compiled parts.
"$python" - "$folder/shiftjax-gpu/packages" \
    absl-py flax msgpack optax pyyaml rich treescope typing-extensions <<'END'
import importlib.metadata
import shutil
import sys
from pathlib import Path

target, *names = sys.argv[1:]
for name in names:
    for file in importlib.metadata.files(name) or ():
        if file.suffix not in (".so", ".pyc") and file.parts[0] != "..":
            place = Path(target, file)
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file.locate(), place)
END
tar -czf "$bundle" -C "$folder" shiftjax-gpu

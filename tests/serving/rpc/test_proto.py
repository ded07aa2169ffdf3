"""The generated code in the repository is what protoc makes of the .proto."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
PROTO = "serving/proto/shiftjax.proto"


def test_the_generated_code_is_up_to_date(tmp_path):
    outputs = [f"--{kind}_out={tmp_path}" for kind in ("python", "grpc_python", "pyi")]
    command = [sys.executable, "-m", "grpc_tools.protoc", "-I.", *outputs, PROTO]
    subprocess.run(command, cwd=ROOT, check=True)
    for made in (tmp_path / "serving/proto").iterdir():
        assert made.read_text() == (ROOT / "serving/proto" / made.name).read_text(), made.name

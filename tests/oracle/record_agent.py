"""Record what an agent sends to this server, as a file of tests/data/agents.

    python tests/oracle/record_agent.py NAME 'SAYS||SAYS' -- COMMAND...

The command finds the server at $URL; of a model that says one of the texts after the other. Long
texts, which are the agent's own, are left out of the record: `(N characters)`. What differs with
every run, ids and paths, is made the same.
"""

import http.server
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS), str(TESTS / "serving"), str(TESTS.parent)]

import httpx  # noqa: E402
from kit import make_engine, running_server  # noqa: E402
from scripted import TEMPLATES, ScriptedRunner, marked_tokenizer, say  # noqa: E402

MOST = 60  # characters of a text that is kept
_ID = re.compile(
    r"(?<![0-9a-z])([0-9a-f]{8}-([0-9a-f]{4}-){3}[0-9a-f]{12}|[0-9a-f]{24,64})(?![0-9a-z])"
)
_LONG = 30  # seconds that an agent may take for a turn


def shortened(value: Any, ids: dict[str, str], name: str = "") -> Any:
    """The same without descriptions and long texts, and with ids that are numbers."""
    if isinstance(value, dict):
        return {name: shortened(each, ids, name) for name, each in value.items()}
    if isinstance(value, list):
        return [shortened(each, ids) for each in value]
    if not isinstance(value, str):
        return value
    if name == "description" or (len(value) > MOST and not value.startswith("x-anthropic-billing")):
        return f"({len(value)} characters)"
    return _ID.sub(lambda found: ids.setdefault(found[0], f"{len(ids):032x}"), value)


def distinct(requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The last of each path and status: a conversation is sent again with every turn."""
    return [*{(each["path"], each["status"]): each for each in requests}.values()]


class Recorder(http.server.BaseHTTPRequestHandler):
    """Passes requests on to the server and keeps them."""

    url, requests, ids, say_next = "", [], {}, staticmethod(lambda: None)

    def do_POST(self) -> None:
        """Pass one on; models of any name are the one that there is."""
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if body.get("tools"):
            self.say_next()
        kept = ("content-type", "x-api-key", "anthropic-version", "anthropic-beta")
        headers = {name: self.headers[name] for name in kept if self.headers[name]}
        sent = body | {"model": "echo"}
        answer = httpx.post(self.url + self.path, json=sent, headers=headers, timeout=_LONG)
        warning = answer.headers.get("warning")
        record = {"path": self.path, "status": answer.status_code, "warning": warning}
        self.requests.append(record | {"body": shortened(sent, self.ids)})
        self.send_response(answer.status_code)
        self.send_header("content-type", answer.headers["content-type"])
        self.send_header("content-length", str(len(answer.content)))
        self.end_headers()
        self.wfile.write(answer.content)

    def log_message(self, format: str, *arguments: Any) -> None:
        """Say nothing."""


def record(name: str, texts: list[str], command: list[str]) -> None:
    """Run a command and write what it sends."""
    engine = make_engine(
        num_blocks=1 << 14,
        block_size=64,
        max_model_len=1 << 20,
        max_num_batched_tokens=1 << 15,
        check=False,
        runner_kind=ScriptedRunner,
    )
    tokenizer = marked_tokenizer(TEMPLATES["hermes"])
    with running_server(engine, tokenizer=tokenizer, reasoning_parser="think") as running:
        Recorder.url = running.url
        Recorder.say_next = lambda _: say(running, texts.pop(0) if texts else "It is done.")
        proxy = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Recorder)
        threading.Thread(target=proxy.serve_forever, daemon=True).start()
        with tempfile.TemporaryDirectory() as home:
            environ = os.environ | {"HOME": home, "URL": f"http://127.0.0.1:{proxy.server_port}"}
            subprocess.run(command, env=environ, cwd=home, check=True, stdin=subprocess.DEVNULL)
        proxy.shutdown()
    path = TESTS / f"data/agents/{name}.json"
    path.write_text(json.dumps(distinct(Recorder.requests), indent=1) + "\n")


if __name__ == "__main__":
    place = sys.argv.index("--")
    record(sys.argv[1], sys.argv[2].split("||"), sys.argv[place + 1 :])

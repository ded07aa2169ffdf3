"""One engine over several hosts of a Ray cluster: an actor on each starts `shiftjax serve` there.

    pip install ray '.[serving,cuda12]'
    python deploy/ray_multihost.py --hosts 2 --gpus 8 --model /models/llama --policy cost

All other flags are those of `serve`, which answers on the host of rank 0. If one of the servers
or actors ends, all are ended and started again elsewhere. A first SIGTERM or Ctrl-C drains, a
second one does not wait; flags that `serve` refuses end it, too. `--strategy STRICT_PACK` tries it
on one machine, with --port 0. Of Linux: setpriv is of util-linux. Tried with Ray 2.60, on CPUs.
"""

import argparse
import logging
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

REFUSED = 2  # flags that are wrong: to start again would not help
PAUSE_SECONDS = 2.0  # between the end of a group and the start of the next
logger = logging.getLogger("ray_multihost")


class Host:
    """The server of one host, which ends with its actor; Ray starts neither again by itself."""

    def __init__(self):
        """Nothing runs yet."""
        self._process: subprocess.Popen | None = None

    def address(self) -> str:
        """HOST:PORT that is free here, as is the next port: one for the hosts, one for JAX."""
        while True:
            with socket.socket() as first, socket.socket() as second:
                first.bind(("", 0))
                port = first.getsockname()[1]
                try:
                    second.bind(("", port + 1))
                except OSError:
                    continue
                return f"{ray.util.get_node_ip_address()}:{port}"

    def run(self, flags: Sequence[str], secret: str) -> int:
        """Serve, or follow who does, and return the exit code."""
        with tempfile.NamedTemporaryFile("w", prefix="shiftjax-hosts-") as file:  # mode 0600
            file.write(secret)
            file.flush()
            # A host that is killed must not leave a server behind that holds its devices.
            command = ["setpriv", "--pdeathsig=KILL", sys.executable, "-m", "serving.cli.main"]
            command += ["serve", *flags, f"--host-secret-file={file.name}"]
            self._process = subprocess.Popen(command)
            return self._process.wait()

    def drain(self) -> None:
        """Ask the server to end when its requests have."""
        if self._process is not None:
            self._process.terminate()


def flags_of(flags: Sequence[str], rank: int, hosts: int, coordinator: str) -> list[str]:
    """Flags of `serve` on the host of this rank."""
    return [*flags, f"--hosts={hosts}", f"--host-rank={rank}", f"--coordinator={coordinator}"]


def serve_once(hosts: int, gpus: float, strategy: str, flags: Sequence[str], asked: list) -> int:
    """Run a group until one of its hosts ends; its exit code, 1 for an actor that died.

    What is in `asked` by then has asked for a drain: signals come there.
    """
    bundle = {"CPU": 1.0} | ({"GPU": gpus} if gpus else {})
    group = placement_group([bundle] * hosts, strategy=strategy)
    actors = []
    try:
        ready = group.ready()
        while not ray.wait([ready], timeout=0.5)[0]:
            if asked:
                return 0
        for place in range(hosts):
            chosen = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=place)
            options: dict[str, Any] = {"num_cpus": 1, "num_gpus": gpus, "max_concurrency": 2}
            actors.append(ray.remote(Host).options(**options, scheduling_strategy=chosen).remote())
        coordinator, secret = ray.get(actors[0].address.remote()), secrets.token_hex(32)
        runs = [
            actor.run.remote(flags_of(flags, rank, hosts, coordinator), secret)
            for rank, actor in enumerate(actors)
        ]
        return _first_end(runs, actors[0], asked)
    except RayError as error:
        logger.warning("a host is gone: %s", type(error).__name__)
        return 1
    finally:
        for actor in actors:
            ray.kill(actor)
        remove_placement_group(group)


def _first_end(runs: list, leader: Any, asked: list) -> int:
    """The exit code of whoever ends first; of the leader, once it is asked to drain."""
    is_draining = False
    while len(asked) < 2:  # a second signal does not wait
        done, _ = ray.wait(runs[:1] if is_draining else runs, num_returns=1, timeout=0.5)
        if done:
            code = ray.get(done[0])
            logger.warning("host %d ended with %d", runs.index(done[0]), code)
            return code
        if asked and not is_draining:
            is_draining = True
            leader.drain.remote()
    return 1


def main() -> int:
    """Keep a group running until it is drained, or refuses its flags; the last exit code."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--hosts", type=int, required=True)
    parser.add_argument("--gpus", type=float, default=0.0, help="of each host")
    parser.add_argument(
        "--strategy", choices=("STRICT_SPREAD", "STRICT_PACK"), default="STRICT_SPREAD"
    )
    given, flags = parser.parse_known_args()
    if given.hosts < 2:
        parser.error("--hosts must be at least 2: on one, start shiftjax serve, or ray_serve.py")
    logging.basicConfig(level=logging.INFO)
    asked: list[int] = []
    ray.init(runtime_env={"env_vars": {"PYTHONPATH": os.environ.get("PYTHONPATH", "")}})
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: asked.append(number))
    while True:
        code = serve_once(given.hosts, given.gpus, given.strategy, flags, asked)
        if asked or code == REFUSED:
            return code
        logger.warning("starting all %d hosts again", given.hosts)
        time.sleep(PAUSE_SECONDS)


if __name__ == "__main__":
    sys.exit(main())

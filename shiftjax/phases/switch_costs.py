"""What a change between the configurations of two phases takes. No JAX.

Each device drops its weights and its KV pool, and loads the weights of the other configuration
from the host's memory (Seesaw, arXiv 2503.06433, section 4: "model re-sharding"). All devices load
at once, so it takes as long as the device with the most. The new pool is filled with zeros.
Keys and values lie on the host already: they cross the link behind the computation.
"""

from collections.abc import Sequence
from typing import NamedTuple

from shiftjax.arch.formats import Formats
from shiftjax.costs.levels import send_seconds
from shiftjax.costs.machine import Machine
from shiftjax.costs.memory import weight_bytes
from shiftjax.options import ConfigError
from shiftjax.parallel.layout import Layout


class Reload(NamedTuple):
    """The load of one configuration, with the layout of each of its stages."""

    layouts: Sequence[Layout]
    formats: Formats
    machine: Machine
    pool_bytes: int = 0  # of a device

    @property
    def device_bytes(self) -> int:
        """Bytes of weights of the device that has the most."""
        return max(weight_bytes(layout, self.formats) for layout in self.layouts)

    @property
    def replica_bytes(self) -> int:
        """Bytes of weights that all devices of one replica load."""
        layouts = self.layouts
        return sum(weight_bytes(each, self.formats) * each.num_devices for each in layouts)

    @property
    def seconds(self) -> float:
        """Until the slowest device has its weights and its pool.

        Raises ConfigError where nobody knows the machine's links to its host.
        """
        machine = self.machine
        check_host_links(machine)
        rate = machine.memory_bytes_per_second * machine.memory_efficiency
        return send_seconds(machine.from_host, self.device_bytes) + self.pool_bytes / rate


def check_host_links(machine: Machine) -> None:
    """Raise ConfigError where nobody knows the machine's links to its host."""
    if not (machine.to_host and machine.from_host):
        words = "has no to_host and from_host: phases cannot be predicted on it"
        raise ConfigError([f"the machine file {machine.name} {words}"])

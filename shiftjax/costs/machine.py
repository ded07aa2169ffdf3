"""What a machine can do and what an engine adds: the constants of the cost model. No JAX.

All numbers are SI (seconds, bytes, FLOP/s) and hold for one device. The values live in data
files, each with its unit and source; `shiftjax/costs/machine_files.py` reads them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

ANY = "bfloat16"  # `formats.AUTO`: its constant is that of formats without one
NO_BOUND = 1e20  # a rate that is not known, and slows nothing down


@dataclass(frozen=True)
class Transfer:
    """One way to run a collective: a fixed latency, then bytes at a rate.

    `volume` says which bytes count, for a result of S bytes on each of g devices:
    `ring` all that a device sends in an optimal schedule, 2 (g-1)/g S for an all-reduce and
    (g-1)/g S for an exchange or a gather; `one_shot` everybody reads everything, (g-1) S;
    `two_shot` of a switch that adds up: S for all to read, and what it is to copy, S / g.
    """

    latency_seconds: float
    bytes_per_second: float
    volume: Literal["ring", "one_shot", "two_shot"] = "ring"

    def scaled(self, latency: float, rate: float) -> "Transfer":
        """Return a copy with its latency times `latency` and its bandwidth times `rate`."""
        return replace(
            self,
            latency_seconds=self.latency_seconds * latency,
            bytes_per_second=self.bytes_per_second * rate,
        )


@dataclass(frozen=True)
class Machine:
    """Devices of one kind and the links between them."""

    name: str
    num_devices: int
    memory_bytes: float
    memory_bytes_per_second: float  # of the data sheet
    memory_efficiency: float  # share of it that a matrix product reaches on its weights
    kv_efficiency: Mapping[str, float]  # share of it that attention reaches on KV, by format
    matmul_flops: Mapping[str, float]  # peak by number format: fp8, bfloat16, float32
    matmul_efficiency: float  # share of the peak for large matrices
    attention_efficiency: float  # share of the peak of the activations' format
    compute_units: int  # multiprocessors or cores: tiles computed at the same time
    tile_rows: tuple[int, ...]  # heights of the output tiles that kernels come in
    tile_columns: int
    tile_seconds: float  # prologue and epilogue of a tile
    kernel_seconds: float  # launch and drain of a kernel inside a recorded graph
    all_reduce: tuple[Transfer, ...]  # the quickest is taken
    all_to_all: tuple[Transfer, ...]
    all_gather: tuple[Transfer, ...]
    point_to_point: tuple[Transfer, ...]
    switch_sum: tuple[Transfer, ...] = ()  # by a switch with multicast, norm included; (): has none
    to_host: tuple[Transfer, ...] = ()  # of each device, while all use theirs; (): not known
    from_host: tuple[Transfer, ...] = ()
    host_memory_bytes: float = 0.0  # of the whole machine; 0: not known
    shared_cores: int = 0  # not 0: virtual devices of one processor, see `CostModel`
    memory_overlap: float = 1.0  # share of the shorter of reading and computing that is hidden
    attention_round_seconds: float = 0.0  # fixed time of a round, where attention advances so:
    attention_round_tokens: int = 1  # context tokens of each of `attention_lanes` rows at most
    attention_lanes: int = 1
    attention_tile_rows: int = 1  # queries of a prompt that are computed together
    # That a decode takes in a kernel which computes prompts, too; 0: such kernels pack decodes.
    attention_decode_rows: int = 0
    l2_bytes_per_second: float = NO_BOUND  # of what others have read just before
    attention_seconds: float = 0.0  # fixed time of a layer's attention, beside its launches
    product_seconds: float = 0.0  # fixed time of a product, beside its launch
    # Share of a product's rate that products with several experts' matrices reach, by format.
    expert_efficiency: Mapping[str, float] = field(default_factory=lambda: {ANY: 1.0})
    # Rate of Triton's fused experts, by format, where experts are many and narrow; {}: as others.
    fused_expert_flops: Mapping[str, float] = field(default_factory=dict)
    fused_expert_overlap: float = 1.0  # as `memory_overlap`, of these
    reserved_bytes: float = 0.0  # of the driver and a process's context
    peer_bytes: float = 0.0  # buffers of collectives, for each other device of a group
    devices_per_host: int = 0  # 0: all of them
    # Between hosts, of each device by an adapter of its own, while all use theirs; (): not known.
    network: tuple[Transfer, ...] = ()
    most_hosts: int = 0  # that the network joins; 0: it does not say
    # Share of the compute rate of kernels timed alone that whole models reach: chips run hot.
    sustained_efficiency: float = 1.0
    published: bool = False  # figures of vendors alone: what kernels reach is another machine's
    measured: str = ""  # by what, on which devices, when; "": constants are from elsewhere

    @property
    def as_run(self) -> "Machine":
        """This machine without kernels that no such device has run: the switch's sums."""
        return self if self.measured else replace(self, switch_sum=())

    @property
    def reads_peers(self) -> bool:
        """Whether devices read each other's memory, as kernels do that sum in one shot."""
        return any(way.volume == "one_shot" for way in self.all_reduce)

    @property
    def num_hosts(self) -> int:
        """The number of hosts over which the devices are spread."""
        return -(-self.num_devices // (self.devices_per_host or self.num_devices))

    @property
    def hops(self) -> tuple[Transfer, ...]:
        """From a stage to the next: on several hosts at least one pair is joined by the network,
        and the slowest sets the pace of all."""
        return self.point_to_point if self.num_hosts == 1 else self.network

    @property
    def one_host(self) -> "Machine":
        """This machine reduced to one of its hosts."""
        return self.over(1)

    def over(self, hosts: int) -> "Machine":
        """So many hosts like its own, joined by the network."""
        each, now = self.devices_per_host or self.num_devices, self.num_hosts
        if hosts == now:
            return self
        return replace(
            self,
            num_devices=hosts * each,
            devices_per_host=each,
            host_memory_bytes=self.host_memory_bytes * hosts / now,
        )


def of_format(constants: Mapping[str, float], fmt: str) -> float:
    """A constant by number format; a format that is not there has that of `ANY`."""
    return constants.get(fmt, constants[ANY])


@dataclass(frozen=True)
class EngineOverhead:
    """What an engine adds to the work of the devices.

    The host prepares a step in `host_seconds`, and `host_seconds_distributed` more where a group
    has several devices, and `host_seconds_per_sequence`; unless the engine `overlaps`, the
    devices wait for it. Steps of more than `graph_tokens` tokens are not replayed from a
    recorded graph: their kernels cannot start faster than `eager_kernel_seconds` each, and the host
    takes `eager_layer_seconds` for the launches of a layer, where it launches one by one. The front
    end's `stream_seconds` count as the host's: engines that do not overlap wait for them, too.
    """

    name: str
    host_seconds: float
    host_seconds_distributed: float
    host_seconds_per_sequence: float
    overlaps: bool
    kernels_per_step: int
    graph_tokens: int
    eager_kernel_seconds: float
    reserved_bytes: float  # recorded graphs and workspaces, beside what the machine says
    pads_to_buckets: bool  # steps come in few sizes, each doubling the one before
    copies_shift_weights: bool  # w / P more per device (arXiv 2509.16495, 3.3.2)
    replicas_in_step: bool  # no replica starts a step before all have ended the one before
    # Of the front end, which reads all requests in one process and writes what is streamed; no
    # such work offline. Chats are templates to fill in, and take more than completions.
    request_seconds: float = 0.0  # of the process, before the engine sees a request
    chat_seconds: float = 0.0  # of the process, more for a chat
    chat_latency_seconds: float = 0.0  # more for a chat, while the process is free for others
    compiling_seconds: float = 0.0  # of a server's first prompts: `sim.front_end.opening_seconds`
    eager_layer_seconds: float = 0.0  # of the host, for a layer of a step without a graph
    stream_seconds: float = 0.0  # of a token of each stream beyond `free_streams`
    free_streams: int = 0  # whose tokens are written beside the step
    pool_of_free: bool = False  # `memory_fraction` is of what weights and workspaces leave
    steps_beside_pool: bool = False  # steps use what `memory_fraction` leaves: SGLang
    prompts_first: bool = False  # decodes wait while prompts can be computed
    mixes_attention: bool = False  # one kernel computes the decodes and prompts of a step
    full_rate_codes: bool = False  # FP8 KV is read at bfloat16's share of the memory's rate
    sizes_steps: bool = False  # steps with prompts have the size that costs say is best
    switch_seconds: float = 0.0  # of the first step in another mode
    draft_seconds: float = 0.0  # of the host, to guess the next tokens of one sequence
    sums_by_switch: bool = False  # small ones, where the machine can: `costs/switch_sums.py`
    buffers_each_sum: bool = False  # where devices read each other's memory: `costs/sum_buffers.py`
    sampling_bytes: float = 0.0  # of a row and entry of the vocabulary, on every device; 0: split
    pads_mxfp4: bool = False  # experts in MXFP4 are padded: `costs.memory.padding_bytes`
    expert_skew: float = 1.0  # of routing, beside chance: `costs.expert_load`
    cuts_experts: bool = False  # products of experts are those of `pallas_kernels`
    # They are Triton's, and each expert is divided over the devices: vLLM, SGLang.
    fuses_experts: bool = False
    # Of a layer of experts, beside router, products and an activation that all layers launch.
    expert_kernels: int = 0
    kernels_per_exchange: int = 0  # packing and unpacking around an all-to-all, if not listed
    kernels_per_layer: int = 0  # norms, rotary ...: all but products and collectives; or as names,
    # by the format of the layer's matrices: rows of `costs/layer_launches.py`.
    layer_launches: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    # In the place of these where heads are exchanged, packing and unpacking included.
    exchanged_launches: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    # And these of more rows on a device than `few_rows`, whose products do no more than multiply.
    many_rows_launches: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    few_rows: int = 0

    def launches_of(self, fmt: str, rows: int = 0, *, exchanges: bool = False) -> tuple[str, ...]:
        """Names of a layer's launches, with matrices of a format and so many rows on the device.

        () where the file has no list.
        """
        own = self.exchanged_launches if exchanges else {}
        own, more = own or self.layer_launches, self.many_rows_launches
        more = more if rows > self.few_rows else {}
        return own.get(fmt, own.get(ANY, ())) + more.get(fmt, more.get(ANY, ()))

    def num_layer_launches(self, fmt: str, rows: int = 0, *, exchanges: bool = False) -> int:
        """Kernels of a layer beside products, attention and collectives."""
        return self.kernels_per_layer or len(self.launches_of(fmt, rows, exchanges=exchanges))

    def host(self, num_sequences: int, num_devices: int) -> float:
        """Return the host's seconds per step for so many sequences and devices."""
        distributed = self.host_seconds_distributed if num_devices > 1 else 0.0
        streams = max(0, num_sequences - self.free_streams) * self.stream_seconds
        sequences = num_sequences * self.host_seconds_per_sequence
        return self.host_seconds + distributed + sequences + streams

    def eager_seconds(self, num_tokens: int, num_layers: int) -> float:
        """Return the host's seconds for launches of a step that no graph replays."""
        return num_layers * self.eager_layer_seconds if num_tokens > self.graph_tokens else 0.0

    @property
    def offline(self) -> "EngineOverhead":
        """The same engine without a front end, as for batches."""
        alone = replace(self.completions, request_seconds=0.0, stream_seconds=0.0)
        return replace(alone, compiling_seconds=0.0)

    @property
    def completions(self) -> "EngineOverhead":
        """The same engine whose requests are texts, not chats."""
        return replace(self, chat_seconds=0.0, chat_latency_seconds=0.0)

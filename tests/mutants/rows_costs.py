"""Mutants of what is predicted: bytes of collectives, seconds of steps and moves, memory."""

from mutant import Mutant

COLLECTIVES = "shiftjax/costs/collectives.py"
STEP = "shiftjax/costs/step_costs.py"
MEMORY = "shiftjax/costs/memory.py"
PART = "shiftjax/costs/expert_part.py"
STAGES = "shiftjax/costs/group_costs.py"
MOVES = "shiftjax/fleet/move_costs.py"

FRONT = "shiftjax/sim/front_end.py"
MACHINE = "shiftjax/costs/machine.py"
KERNELS = "shiftjax/costs/kernel_costs.py"
MEASURED = "shiftjax/sim/measured_kernels.py"
BANDS = "shiftjax/sim/error_bands.py"
PUBLISHED = "shiftjax/sim/published.py"

TEST_COSTS = "tests/costs/test_step_costs.py"
TEST_PART = "tests/costs/test_expert_part.py"
TEST_STAGES = "tests/costs/test_group_costs.py"
TEST_MOVES = "tests/fleet/test_move_costs.py"
TEST_FRONT = "tests/sim/test_front_end.py"
TEST_LEVELS = "tests/costs/test_levels.py"

ROWS: tuple[Mutant, ...] = (
    Mutant(
        "groups of heads find latents in no cache", "costs", KERNELS,
        "machine.l2_bytes_per_second / groups)", "machine.l2_bytes_per_second)",
        (TEST_COSTS,),
        "decodes of many heads look as quick as of few",
    ),
    Mutant(
        "groups of all latents' heads are small", "costs", "pallas_kernels/decode_work.py",
        "most = min(heads, MANY_HEADS)", "most = min(heads, FEW_HEADS)",
        (TEST_COSTS,),
        "each latent is read four times as often",
    ),
    Mutant(
        "the first all-to-all carries values alone", "costs", COLLECTIVES,
        "cached = each * layout.cache.numbers if", "cached = each * layout.cache.numbers // 2 if",
        (TEST_COSTS,),
        "BASE looks cheaper than it is",
    ),
    Mutant(
        "a layer has one all-reduce", "costs", COLLECTIVES,
        "1 if experts else 2, sums)", "1 if experts else 1, sums)",
        (TEST_COSTS,),
        "SHIFT looks cheaper than it is",
    ),
    Mutant(
        "all-reduces carry all tokens in BASE", "costs", COLLECTIVES,
        "num_bytes = num_tokens // mode.sp * layout", "num_bytes = num_tokens * layout",
        (TEST_COSTS,),
        "BASE never pays",
    ),
    Mutant(
        "every number of a cache is a byte", "costs", MEMORY,
        "len(each.layers) * each.spec.num_bytes(formats)", "len(each.layers) * each.spec.numbers",
        (TEST_COSTS,),
        "a pool takes more memory than was set aside",
    ),
    Mutant(
        "weights of SHIFT count for nothing", "costs", MEMORY,
        'if layout.sp == 1 or strategy == "slice" or layout.gathers:',
        'if layout.sp >= 1 or strategy == "slice" or layout.gathers:',
        ("tests/device/test_weight_bytes.py",), "replicated weights do not fit",
    ),
    Mutant(
        "the host always hides", "costs", STEP,
        "return max(device, host) if self.engine.overlaps else device + host",
        "return max(device, host)",
        (TEST_COSTS,), "engines without overlap look as quick",
    ),
    Mutant(
        "windows are a token too wide", "costs", "shiftjax/costs/work.py",
        "round(tokens / size * min(start + size, size + window - 1))",
        "round(tokens / size * min(start + size, size + window))",
        (TEST_COSTS,), "chunks of layers with windows look dearer",
    ),
    Mutant(
        "experts are chosen once for all tokens", "costs", "shiftjax/costs/expert_load.py",
        "(1 - experts.per_token / experts.num) ** num_tokens",
        "(1 - experts.per_token / experts.num) ** 1",
        ("tests/costs/test_expert_load.py",), "large steps seem to read few experts",
    ),
    Mutant(
        "reading experts takes no time", "costs", PART,
        "kernels.experts(load, hidden, inner, cut)",
        "kernels.experts(load._replace(experts=1.0), hidden, inner, cut)",
        (TEST_PART,), "experts that are not split seem quickest in every step",
    ),
    Mutant(
        "pairs that are dealt are uneven", "costs", PART,
        "return dealt(load, max(1, used.sp // mode.sp))",
        "return load if used.sp <= mode.sp else most_loaded(experts, layout.num_devices, seen)",
        (TEST_PART,), "experts that are not split are left out of small steps",
    ),
    Mutant(
        "neighbours see each other's tokens where they share no experts", "costs", PART,
        "num_tokens // min(mode.sp, used.sp)", "num_tokens // used.sp",
        (TEST_PART,), "what is dealt out seems to be less than it is",
    ),
    Mutant(
        "what was counted chooses among programs", "costs", "shiftjax/costs/layer_costs.py",
        "routing = self.routing if used is None else None", "routing = self.routing",
        (TEST_PART,), "a step is priced with experts of which there is no program",
    ),
    Mutant(
        "skew is the same however experts are split", "costs",
        "shiftjax/costs/expert_load.py", "scores * (ways / num_devices) ** 0.5", "1.0",
        ("tests/costs/test_expert_load.py",), "few ways look dearer than they are",
    ),
    Mutant(
        "the parts of a contraction are no items", "costs", "shiftjax/costs/kernel_costs.py",
        "load.experts * items.columns * parts", "load.experts * items.columns",
        (TEST_COSTS,), "cutting the products of experts seems to gain nothing",
    ),
    Mutant(
        "adding up the parts of experts is no launch", "costs", PART,
        "num_kernels += cut.num_kernels", "num_kernels += 0",
        (TEST_COSTS,), "cutting looks cheaper than it is",
    ),
    Mutant(
        "the slowest stage does not bound a pipeline", "costs", STAGES,
        "return max(*stages, host, (sum(stages) + host) / in_flight)",
        "return max(host, (sum(stages) + host) / in_flight)",
        (TEST_STAGES,), "uneven stages look even",
    ),
    Mutant(
        "hidden states are sent behind the last stage", "costs", STAGES,
        "        sends = (len(self.stages) - 1) * self._send_seconds(size[0])\n",
        "        sends = len(self.stages) * self._send_seconds(size[0])\n",
        (TEST_STAGES,), "modes of a pipeline look dearer",
    ),
    Mutant(
        "only full calls of a move are counted", "costs", MOVES,
        "-(-num_bytes // self.call_bytes(ways))", "num_bytes // self.call_bytes(ways)",
        (TEST_MOVES,),
        "a small move costs nothing",
    ),
    Mutant(
        "a call moves as much whatever the ways", "costs", MOVES,
        "num_blocks // (POOL_SHARE * ways)", "num_blocks // POOL_SHARE",
        (TEST_MOVES,),
        "the temporaries of a move do not fit",
    ),
    Mutant(
        "hosts talk to one after the other", "costs", "shiftjax/costs/levels.py",
        "rounds = (hosts - 1).bit_length()", "rounds = hosts - 1",
        (TEST_LEVELS,), "many hosts look slower than they are",
    ),
    Mutant(
        "a step costs what it computes, not its bucket", "costs", STEP,
        "                return bucket.tokens, bucket.rows\n", "                break\n",
        (TEST_COSTS,), "padding is free",
    ),
    Mutant(
        "a bucket may lack rows", "costs", "shiftjax/costs/buckets.py",
        "return self.tokens >= tokens and self.rows >= rows and self.seqs >= seqs",
        "return self.tokens >= tokens and self.seqs >= seqs",
        ("tests/costs/test_buckets.py",), "a step has rows that no program samples",
    ),
    Mutant(
        "the front end reads all requests at once", "costs", FRONT,
        "* len(self._reading)", "* 1",
        (TEST_FRONT,),
        "a burst is seen at once",
    ),
    Mutant(
        "a wait delays all that come later", "costs", FRONT,
        "self._now = self._ready_at()", "self._now = self._ready_at() + self._latency",
        (TEST_FRONT,),
        "latency looks like work of the front end",
    ),
    Mutant(
        "decodes beside prompts are packed", "costs", KERNELS,
        "self.pair * max(1, self.decode_rows)", "self.pair",
        ("tests/costs/test_mixed_attention.py",),
        "steps with prompts look as fast on A100 as on H100",
    ),
    Mutant(
        "a pool of what is free is one of all", "costs", "shiftjax/sim/modelled.py",
        "kv_bytes=memory.kv_bytes + more", "kv_bytes=memory.kv_bytes",
        ("tests/sim/test_kv_sizes.py",),
        "TensorRT-LLM holds a third of its streams",
    ),
    Mutant(
        "no stream is free", "costs", MACHINE,
        "max(0, num_sequences - self.free_streams)", "num_sequences",
        (TEST_FRONT,),
        "few streams look slow",
    ),
    Mutant(
        "graphs replay steps of any size", "costs", MACHINE,
        "if num_tokens > self.graph_tokens else 0.0", "if num_tokens < 0 else 0.0",
        ("tests/costs/test_step_costs.py",),
        "a thousand decodes look as quick as graphs of 512 would make them",
    ),
    Mutant(
        "a batch has a front end", "costs", MACHINE,
        "replace(self.completions, request_seconds=0.0, stream_seconds=0.0)", "self",
        (TEST_FRONT,),
        "what is offline looks served",
    ),
    Mutant(
        "hot chips compute as cool ones", "costs", KERNELS,
        "matmul_efficiency * machine.sustained_efficiency", "matmul_efficiency",
        (TEST_FRONT,),
        "long prompts look quicker than any engine computes them",
    ),
    Mutant(
        "a divided expert is a whole one", "costs", "shiftjax/costs/expert_part.py",
        "inner < NARROW, -(-inner // ways)", "inner < NARROW, inner",
        ("tests/costs/test_fused_experts.py",),
        "mixtures of experts on eight devices look as slow as on one",
    ),
    Mutant(
        "no expert is tuned", "costs", KERNELS,
        "rate = tuned * of_format", "rate = of_format",
        ("tests/costs/test_fused_experts.py",),
        "Qwen3-235B on eight H100 looks a fifth slower than it is served",
    ),
    Mutant(
        "kernels are there when a server starts", "costs", FRONT,
        "engine.compiling_seconds if machine.attention_decode_rows else 0.0", "0.0",
        (TEST_FRONT,),
        "first tokens of SGLang on A100 come six seconds too early",
    ),
    Mutant(
        "steps of SGLang take memory from its share", "costs", "shiftjax/sim/modelled.py",
        "memory.kv_bytes + memory.workspace_bytes - outside", "memory.kv_bytes",
        ("tests/sim/test_kv_sizes.py",),
        "fewer requests run than do",
    ),
    Mutant(
        "no room is kept for answers", "costs", "shiftjax/sim/prompts_first.py",
        "kept if self._running else num_spared", "num_spared",
        ("tests/sim/test_prompts_first.py",),
        "SGLang looks as if it started more than it does",
    ),
    Mutant(
        "single kernels are measured hot", "costs", MEASURED,
        "machine = replace(machine, sustained_efficiency=1.0)", "machine = replace(machine)",
        ("tests/sim/test_measured_kernels.py",),
        "a fit to kernels takes the loss of whole models twice",
    ),
    Mutant(
        "the widest band is taken", "costs", BANDS,
        "for x in LIMITS if", "for x in LIMITS[::-1] if",
        ("tests/sim/test_published.py",),
        "every prediction looks worthless",
    ),
    Mutant(
        "a closed loop counts those of its start", "costs", PUBLISHED,
        "return later or run.requests", "return run.requests",
        ("tests/sim/test_published.py",),
        "first tokens wait for all users' prompts",
    ),
)  # fmt: skip

"""Which attention a device gets, what it is told, and that the kernels are wired up right."""

import json
from dataclasses import replace
from types import SimpleNamespace

import engines
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from spent import exhaustive, thorough

from pallas_kernels.call import AttentionOptions, PagedKV
from pallas_kernels.decode_work import DecodeConfig
from pallas_kernels.prefill_work import PrefillConfig
from pallas_kernels.reference import ragged_paged_attention
from pallas_kernels.step_work import KernelConfig
from pallas_kernels.tuned import config_for, from_row, safe_config, to_row
from shiftjax.arch.formats import Formats
from shiftjax.arch.presets import PRESETS
from shiftjax.core.request import SamplingParams
from shiftjax.models import attention_backend, llama
from shiftjax.models.attention import BYTE, AttentionMetadata, LayerTerms
from shiftjax.models.attention_backend import (
    FP8,
    AttentionNeeds,
    choose_attention,
    pallas_attention,
)
from shiftjax.models.gpu_software import Assembler
from shiftjax.models.norm_backend import choose_norms
from shiftjax.models.products import Codes
from shiftjax.options import ConfigError
from shiftjax.parallel.layout import Layout

# Shared memory that nothing was written to is NaN, and masked afterwards.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered in matmul")

TERMS = LayerTerms()
LLAMA = Layout(PRESETS["llama-8b"], 1, 1)
INTERPRETED = plgpu.InterpretGPUParams(detect_races=False)
# The interpreter runs thread blocks one by one: few of them.
FEW_BLOCKS = KernelConfig(PrefillConfig(64, 2, 2), DecodeConfig(64, 2, 90_000))
HOPPER = SimpleNamespace(platform="gpu", device_kind="NVIDIA H200", compute_capability="9.0")


def choose(device, layout=LLAMA, dtype=jnp.bfloat16, kv_dtype=jnp.bfloat16, block_size=16, **asked):
    check, needs = asked.pop("check", None), AttentionNeeds(**asked)
    return choose_attention(layout, device, (dtype, kv_dtype), block_size, needs, check)


def test_a_cpu_gets_xla_without_a_word(caplog):
    assert choose(jax.devices()[0]).name == "xla"
    assert caplog.records == []


def test_kernels_answer_where_devices_split_positions(caplog):
    layout = Layout(PRESETS["llama-8b"], 4, 4, by_position=True)
    for kv_dtype in (jnp.bfloat16, FP8):
        chosen = choose(HOPPER, layout, kv_dtype=kv_dtype, block_size=32)
        assert chosen.name == "pallas" and chosen.localise is not None
    assert "XLA loops" not in caplog.text
    assert "not tuned for NVIDIA H200, head_dim 128, block_size 16" in caplog.text  # of a device
    with pytest.raises(ConfigError, match=r"attention = pallas: .* block_size 4 must"):
        choose(HOPPER, layout, block_size=8, wanted="pallas")


def test_decodes_of_latents_have_a_kernel_and_all_else_has_none(caplog):
    """Prompts are loops, and kernels of products, experts and norms are for other attention."""
    for by_position, size, kv_dtype in (
        (False, 16, jnp.bfloat16),
        (True, 256, jnp.bfloat16),
        (True, 256, FP8),
    ):
        layout = Layout(PRESETS["deepseek-v2-lite"], 4, 4, by_position=by_position)
        chosen = choose(HOPPER, layout, kv_dtype=kv_dtype, block_size=size)
        assert chosen.name == "decode kernel" and chosen.enter is None
        assert (chosen.localise is not None) == by_position
        assert choose_norms(layout, Formats(), chosen.name).name == "xla"
    assert "prompts run as XLA loops where latents (MLA) are cached" in caplog.text


def test_a_hopper_gpu_gets_the_kernels_and_hears_of_safe_settings_once(caplog):
    assert choose(HOPPER).name == "pallas"
    _, is_tuned = config_for(HOPPER.device_kind, 128, 16)
    assert len(caplog.records) == (0 if is_tuned else 1)
    caplog.clear()
    unknown = SimpleNamespace(**vars(HOPPER) | {"device_kind": "NVIDIA H300"})
    assert choose(unknown).name == "pallas"
    (record,) = caplog.records
    assert "not tuned for NVIDIA H300, head_dim 128, block_size 16" in record.getMessage()


@pytest.mark.parametrize("capability", ["8.0", "8.9", "10.0", "12.0"])
def test_another_gpu_gets_xla_and_is_told_once(capability, caplog):
    other = SimpleNamespace(**vars(HOPPER) | {"compute_capability": capability})
    assert choose(other).name == "xla"
    (record,) = caplog.records
    assert "compute capability 9.x" in record.getMessage()


@pytest.mark.parametrize(("version", "name"), [((12, 9, 41), "xla"), ((12, 9, 86), "pallas")])
def test_a_compiler_that_errs_is_not_used(version, name, caplog, monkeypatch):
    ptxas = Assembler("ptxas", version, "nvidia-cuda-nvcc-cu12")
    monkeypatch.setattr("shiftjax.models.gpu_software.assemblers", lambda: [ptxas])
    assert choose(HOPPER).name == name
    assert (f"{ptxas} can miscompile" in caplog.text) == (name == "xla")


def test_the_setting_xla_is_obeyed_without_a_word(caplog):
    chosen = choose(HOPPER, wanted="xla", check=lambda: pytest.fail("the kernels are tried"))
    assert (chosen.name, chosen.reason) == ("xla", "the setting attention = xla")
    assert caplog.records == []


def test_the_setting_pallas_makes_every_reason_an_error():
    assert choose(HOPPER, wanted="pallas").name == "pallas"
    with pytest.raises(ConfigError, match=r"attention = pallas: cpu cannot .* not for cpu"):
        choose(jax.devices()[0], wanted="pallas")
    with pytest.raises(ConfigError, match=r"attention = pallas: NVIDIA H200 .* block_size 4 must"):
        choose(HOPPER, block_size=4, wanted="pallas")
    with pytest.raises(ConfigError, match=r"attention = pallas: NVIDIA H200 .* are wrong"):
        choose(HOPPER, wanted="pallas", check=lambda: "the kernels are wrong")


def test_kernels_that_fail_their_check_are_not_used(caplog):
    chosen = choose(HOPPER, check=lambda: "the kernels are wrong")
    assert (chosen.name, chosen.reason) == ("xla", "the kernels are wrong")
    assert "the kernels are wrong" in caplog.text
    assert choose(HOPPER, check=lambda: None).reason == "passed its check"
    assert choose(HOPPER).reason == "not checked"


@pytest.mark.parametrize("head_dim", [64, 96, 160, 192, 256])
def test_head_dims_of_models_have_kernels(head_dim):
    layout = Layout(replace(LLAMA.model, head_dim=head_dim), 1, 1)
    assert choose(HOPPER, layout=layout).name == "pallas"


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"dtype": jnp.float32, "kv_dtype": jnp.float32}, "float32"),
        (
            {"layout": Layout(replace(LLAMA.model, head_dim=80), 1, 1)},
            "head_dim must be a multiple of 32, not 80",
        ),
        (
            {"layout": Layout(replace(LLAMA.model, head_dim=32), 1, 1)},
            "head_dim 32 is not a multiple of 32 from 64 on",
        ),
        ({"block_size": 4}, "block_size 4 must"),
    ],
)
def test_what_the_kernels_do_not_have_is_named(options, reason, caplog):
    assert choose(HOPPER, **options).name == "xla"
    (record,) = caplog.records
    assert "XLA loops" in record.getMessage() and reason in record.getMessage()


def test_settings_survive_the_table():
    config = KernelConfig(PrefillConfig(kv_tile=64), DecodeConfig(num_blocks=132))
    assert from_row(to_row("NVIDIA H200", 128, 16, config)) == config
    with pytest.raises(TypeError, match="kv_tiles"):
        from_row({"prefill": {"kv_tiles": 1}, "decode": {}})


def test_an_unknown_gpu_gets_safe_settings():
    assert config_for("NVIDIA H300", 128, 16) == (safe_config(128), False)


@pytest.mark.parametrize(("cores", "blocks"), [(132, 264), (114, 228), (78, 156), (None, 264)])
def test_every_multiprocessor_of_the_chip_has_its_blocks(cores, blocks):
    config, _ = config_for("NVIDIA H300", 128, 16, cores=cores)
    assert (config.decode.num_blocks, config.prefill.num_blocks) == (blocks, blocks // 2)


@pytest.mark.parametrize(("head_dim", "q_per_kv"), [(256, 8), (128, 32)])
def test_where_two_decode_blocks_do_not_fit_one_has_all_of_the_memory(head_dim, q_per_kv):
    config = safe_config(head_dim, q_per_kv, 114).decode
    assert (config.num_blocks, config.shared_memory_bytes) == (114, 227 * 1024)


def test_settings_that_were_measured_are_not_for_many_query_heads(monkeypatch):
    tuned = KernelConfig(PrefillConfig(kv_tile=64), DecodeConfig(num_blocks=7))
    row = json.dumps([to_row("NVIDIA H200", 128, 16, tuned)])
    monkeypatch.setattr("pallas_kernels.tuned.read_table", lambda: row)
    assert config_for("NVIDIA H200", 128, 16, 16) == (tuned, True)
    assert config_for("NVIDIA H200", 128, 16, 32) == (safe_config(128, 32), False)


def test_what_the_device_says_of_itself_is_used(monkeypatch):
    """The cores of a PCIe card, and the heads of this layout."""
    asked = []
    monkeypatch.setattr(
        "pallas_kernels.tuned.config_for", lambda *args: asked.append(args) or config_for(*args)
    )
    choose(SimpleNamespace(**vars(HOPPER) | {"core_count": 114}))
    choose(HOPPER)
    assert asked == [("NVIDIA H200", 128, 16, 4, cores) for cores in (114, None)]


def test_fp8_pools_are_for_every_implementation(caplog):
    assert choose(HOPPER, kv_dtype=FP8).name == "pallas"
    assert choose(jax.devices()[0], kv_dtype=FP8).name == "xla"
    caplog.clear()
    chosen = choose(HOPPER, layout=Layout(replace(LLAMA.model, head_dim=96), 1, 1), kv_dtype=FP8)
    assert chosen.name == "xla"
    assert "write_kv: head_dim 96 is not a multiple of 64" in caplog.text


@pytest.mark.costs(8)
def test_a_mixed_step_through_the_kernels_is_right():
    """Two decodes, a chunk in the middle of a prompt and padding; on the kernels' interpreter."""
    block_size, blocks_per_seq, tokens = 16, 6, 24
    model = replace(LLAMA.model, num_heads=4, num_kv_heads=2, head_dim=64)
    layout = Layout(model, 1, 1)
    kernels = pallas_attention(layout, FEW_BLOCKS, block_size, interpret=INTERPRETED)
    seq_lens, starts = np.array([70, 17, 45, 0], np.int32), np.array([0, 1, 2, 20, 20], np.int32)
    rng = np.random.default_rng(0)
    shape = (1 + 4 * blocks_per_seq, 2, block_size, 64)
    k_pool, v_pool = pool = [np.full(shape, np.nan, jnp.bfloat16) for _ in "kv"]
    tables = rng.permutation(np.arange(1, shape[0])).astype(np.int32).reshape(4, blocks_per_seq)
    for table, length in zip(tables, seq_lens, strict=True):
        used = -(-length // block_size)
        table[used:] = 0
        for position in range(length):
            for array in pool:
                slot = table[position // block_size], slice(None), position % block_size
                array[slot] = rng.standard_normal((2, 64))
    q = rng.standard_normal((tokens, 4, 64)).astype(jnp.bfloat16)
    work = kernels.divide(tables, seq_lens, starts, 2, num_tokens=tokens)
    slots = np.zeros(tokens, np.int32)  # the last token of sequence 0 is written by the kernel
    slots[0] = tables[0, 69 // block_size] * block_size + 69 % block_size
    new = [rng.standard_normal((tokens, 2, 64)).astype(jnp.bfloat16) for _ in "kv"]
    written = jax.jit(lambda *step: kernels.write(*step, TERMS))((k_pool, v_pool), *new, slots)
    for array, rows in zip(pool, new, strict=True):
        array[slots[0] // block_size, :, slots[0] % block_size] = rows[0]
    metadata = AttentionMetadata(slots, tables, seq_lens, starts, np.asarray(2, np.int32), work)
    out = jax.jit(lambda *step: kernels.attend(*step, TERMS))(
        q, written, jax.tree.map(jnp.asarray, metadata)
    )
    kv = PagedKV(*pool, tables, seq_lens)
    expected = ragged_paged_attention(q, kv, starts, AttentionOptions(64**-0.5))
    error = np.linalg.norm(np.asarray(out, np.float64) - expected) / np.linalg.norm(expected)
    assert error < 5e-3
    assert not np.asarray(out)[20:].any()


def test_a_context_longer_than_its_table_is_refused():
    kernels = pallas_attention(LLAMA, safe_config(128), 16)
    tables, starts = np.zeros((1, 2), np.int32), np.array([0, 1], np.int32)
    with pytest.raises(ValueError, match="33 tokens does not fit a block table of 2 blocks"):
        kernels.divide(tables, np.array([33], np.int32), starts, 1, num_tokens=8)


# ------------------------------------------------------------------------- in the engine


def of_bytes(kernels):
    """The same over pools of a CPU, where codes are held as bytes."""

    def codes_of(pool):
        of_codes = pool[0].dtype == BYTE
        return tuple(jax.lax.bitcast_convert_type(x, FP8) if of_codes else x for x in pool)

    def attend(q, pool, *more):
        return kernels.attend(q, codes_of(pool), *more)

    def write(pool, *more):
        new = kernels.write(codes_of(pool), *more)
        return tuple(
            jax.lax.bitcast_convert_type(x, y.dtype) for x, y in zip(new, pool, strict=True)
        )

    return kernels._replace(attend=attend, write=write)


LATE = {"num_hidden_layers": 2, "num_key_value_layers": 1}
SWIFTKV = {"model_type": "llama_swiftkv", **LATE}


def served(monkeypatch, name: str, kv_dtype: str, buckets: list[int], **model) -> list[tuple]:
    """Serve two prompts with one implementation: (token, log-probability) of what they become.

    The longer prompt is computed in chunks, the later ones beside the other's decodes. With two
    buckets the first has rows alone: the kernels' steps of decodes have no tiles.
    """
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
    make_checkpoint = engines.scaled_checkpoint if kv_dtype == "fp8" else engines.checkpoint
    directory, *_ = make_checkpoint(**{"num_hidden_layers": 1} | sizes | model)

    def choose(layout, device, dtypes, block_size, *_):
        if name == "xla":
            return choose_attention(layout, device, dtypes, block_size)
        return of_bytes(pallas_attention(layout, FEW_BLOCKS, block_size, interpret=INTERPRETED))

    monkeypatch.setattr("shiftjax.device.groups.choose_attention", choose)
    # One step at a time: the interpreter keeps the state of a kernel outside of the program.
    options = {"block_size": 16, "num_blocks": 32, "token_buckets": buckets, "overlap": False}
    options |= {"dtype": "bfloat16", "kv_cache_dtype": kv_dtype}
    options |= {"quantization": "fp8"} if "codes" in name else {}
    built = engines.make(directory, 1, 1, **options)
    programs = built.runners[0].programs
    assert [one.bucket.tokens for one in programs if one.bucket.rows_alone] == buckets[:-1]
    greedy = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=0)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(2, 60, length).tolist() for length in (9, 70)]
    events = engines.run(built.engine, prompts, [greedy] * 2)
    return [
        (token, event.logprobs[0].logprob)
        for key in sorted(events)
        for event in events[key]
        for token in event.token_ids
    ]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("kv_dtype", "buckets", "model"),
    [
        ("bfloat16", [8, 32], {}),
        ("bfloat16", [32], {"model_type": "mistral", "sliding_window": 20}),
        ("fp8", [32], {}),
        *exhaustive(("bfloat16", [32], SWIFTKV)),
    ],
    ids=["two buckets", "sliding window", "fp8 pools with scales", "a late layer"],
)
def test_consecutive_steps_through_the_kernels_are_those_of_xla(
    monkeypatch, kv_dtype, buckets, model
):
    expected = served(monkeypatch, "xla", kv_dtype, buckets, **model)
    got = served(monkeypatch, "pallas", kv_dtype, buckets, **model)
    assert [token for token, _ in got] == [token for token, _ in expected]
    np.testing.assert_allclose([x for _, x in got], [x for _, x in expected], atol=0.04)


@pytest.mark.parametrize("model", [*thorough({}), *exhaustive(SWIFTKV)], ids=["all", "late"])
def test_codes_that_kernels_give_are_those_that_o_makes(monkeypatch, model):
    """The same tokens and the same log-probabilities, in rows alone and beside chunks."""
    given, output = [], llama.Attention._output

    def noted(self, out, *more):
        given.append(isinstance(out, Codes))
        return output(self, out, *more)

    monkeypatch.setattr(llama.Attention, "_output", noted)
    case = "codes", "bfloat16", [8, 32]
    got = served(monkeypatch, *case, head_dim=128, **model)
    assert given and all(given)
    given.clear()
    monkeypatch.setattr(attention_backend, "gives_codes", lambda *_: False)
    assert served(monkeypatch, *case, head_dim=128, **model) == got
    assert given and not any(given)

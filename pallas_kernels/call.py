"""What every attention here is called with: the context in its pools, and a layer's options."""

from typing import Any, NamedTuple

from jaxtyping import Float, Int32

from pallas_kernels.window import Window, wrong_window

# Of K and of V: numbers that are compiled in, or a float32 array with those of every KV head.
type KVScales = tuple[float, float] | Float[Any, "2 kv_heads"]


class PagedKV(NamedTuple):
    """The contexts of all sequences; slots that hold no token may hold anything, NaN included."""

    k_pool: Float[Any, "blocks kv_heads block_size head_dim"]
    v_pool: Float[Any, "blocks kv_heads block_size head_dim"]  # None: `values_in_keys`
    block_tables: Int32[Any, "seqs blocks_per_seq"]  # padded with the null block 0
    seq_lens: Int32[Any, " seqs"]  # with the tokens of this step; 0 for padding


class CodeKind(NamedTuple):
    """What codes of the output are in units of."""

    fixed: Float[Any, " 1"] | None = None  # of all; None: of the largest number of each block


class AttentionOptions(NamedTuple):
    """softmax(soft_cap(scale * q k^T)) v, causal: what is compiled in."""

    scale: float
    window: Window | None = None  # how far back a token sees; None: all of its context
    soft_cap: float | None = None  # c makes a logit x c * tanh(x / c)
    kv_scales: KVScales = (1.0, 1.0)  # keys and values are what the pools hold times these
    # A logit of each head that takes part in the softmax of its rows and has no value (gpt-oss).
    sinks: Float[Any, " heads"] | None = None
    interpret: Any = False  # False, or `InterpretGPUParams` to run on a CPU
    codes: CodeKind | None = None  # as which the output leaves (`head_codes`); None: as numbers
    # Of latents (MLA), which have no values but the first so many numbers of keys; None: they have.
    values_in_keys: int | None = None

    def wrong(self, heads: int, kv_heads: int) -> list[str]:
        """Return what is wrong with a call of either kernel, but for shapes and types."""
        wrong = []
        if heads % kv_heads:
            wrong.append(f"{heads} query heads do not divide into {kv_heads} KV heads")
        if words := wrong_window(self.window):
            wrong.append(words)
        if self.soft_cap is not None and not self.soft_cap > 0:
            wrong.append(f"soft_cap {self.soft_cap} is not positive; None is no cap")
        if self.sinks is not None and self.sinks.shape != (heads,):
            wrong.append(f"sinks of shape {self.sinks.shape}: there must be one for each head")
        return wrong

"""What the cost model needs to know of a model: its config and its experts. No JAX."""

from dataclasses import dataclass

from shiftjax.arch.config import ModelConfig


@dataclass(frozen=True)
class Experts:
    """Experts of every layer's feed-forward part; a token uses `per_token` and the shared one."""

    num: int
    per_token: int
    intermediate_size: int
    shared_intermediate_size: int = 0  # of an expert that every token uses; 0: there is none


@dataclass(frozen=True)
class ModelShape:
    """A decoder, dense or with experts in place of its MLP."""

    config: ModelConfig
    experts: Experts | None = None

    @property
    def embedding_parameters(self) -> int:
        """Embedding and LM head, a tied one counted once."""
        config = self.config
        return (1 if config.tie_word_embeddings else 2) * config.vocab_size * config.hidden_size

    @property
    def layer_parameters(self) -> int:
        """The matrices of all layers."""
        config = self.config
        heads = 2 * (config.num_heads + config.num_kv_heads)
        attention = config.hidden_size * heads * config.head_dim
        return config.num_layers * (attention + self._mlp_parameters())

    @property
    def num_parameters(self) -> int:
        """Matrices of the unpadded model."""
        return self.embedding_parameters + self.layer_parameters

    def _mlp_parameters(self) -> int:
        config, experts = self.config, self.experts
        if experts is None:
            return 3 * config.hidden_size * config.intermediate_size
        widths = experts.num * experts.intermediate_size + experts.shared_intermediate_size
        return config.hidden_size * (3 * widths + experts.num)

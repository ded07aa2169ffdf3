"""The settings of drafting, and its limits (`--speculative-config` sets these, too). No JAX."""

from dataclasses import dataclass
from typing import Literal

from shiftjax.options import control, option


@dataclass(frozen=True)
class DraftOptions:
    """Guessing ahead of the model, by more than one token a step. The tokens stay the same."""

    speculation: Literal["none", "ngram", "suffix", "model", "hybrid"] = option(
        "none",
        "what guesses: repeats in a request (ngram), or also in finished outputs (suffix), a "
        "drafting model (model), or the better of the last two (hybrid)",
    )
    draft_model: str | None = option(
        None, "the drafting model: directory or hub id of an LSTM or MLP speculator"
    )
    max_draft_tokens: int = option(
        16, "guesses for a sequence in a step", flags=("--num-speculative-tokens",), low=1, high=256
    )
    draft_choice: Literal["auto", "fill", "cost"] = option(
        "auto",
        "how many guesses: what a step pads anyway (fill), or what pays by the cost model (cost); "
        "auto: cost where the machine is known, else fill",
    )
    suffix_corpus_tokens: int = option(
        200_000, "tokens of finished outputs that suffix keeps; 0: none", low=0, high=1 << 28
    )
    draft_vocab: int | None = control(
        None,
        "a drafting model guesses the first so many token ids only; default: what it was made for",
        low=1,
        high=1 << 24,
    )
    suffix_min_prob: float = control(
        0.1, "a guess ends where its estimated probability falls below", low=0.0, high=1.0
    )
    suffix_factor: float = control(
        1.0, "a guess has at most factor * match + offset tokens", low=0.0, high=64.0
    )
    suffix_offset: float = control(8.0, "see suffix_factor", low=0.0, high=256.0)
    suffix_max_match: int = control(32, "longer matches count as this long", low=4, high=1024)
    prompt_lookup_min: int = control(2, "tokens of ngram's shortest key", low=1, high=32)
    prompt_lookup_max: int = control(5, "tokens of ngram's longest key", low=1, high=32)
    max_draft_rows: int | None = control(
        None,
        "logit rows of a step with guesses; default: 4 for each of its sequences, 256 at most",
        low=1,
        high=4096,
    )
    fixed_drafts: bool = control(False, "whole drafts whatever they cost, as other engines have")
    draft_max_seqs: int = control(
        64, "fixed_drafts: only the first so many sequences guess; 0: all", low=0, high=4096
    )
    draft_off_seqs: int = control(
        0, "fixed_drafts: nobody guesses when so many run; 0: always", low=0, high=4096
    )

    @property
    def copies(self) -> bool:
        """Whether drafts are copied from what a sequence has said before."""
        return self.speculation in ("ngram", "suffix", "hybrid")

    @property
    def keeps_corpus(self) -> bool:
        """Whether they are copied from finished outputs of others, too."""
        return self.speculation in ("suffix", "hybrid") and self.suffix_corpus_tokens > 0

    @property
    def uses_model(self) -> bool:
        """Whether a model guesses."""
        return self.speculation in ("model", "hybrid")


NO_DRAFTS = DraftOptions()

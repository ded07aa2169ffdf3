"""Decoder models as Flax NNX modules."""

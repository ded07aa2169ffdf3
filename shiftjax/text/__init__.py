"""Tokenizers, incremental detokenising and chat templates."""

"""Embedding and scoring of texts."""

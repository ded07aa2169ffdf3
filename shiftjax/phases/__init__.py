"""Prompts and decodes in a configuration each, and pipelines of stages."""

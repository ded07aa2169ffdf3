"""Functions in namespaces, by which Codex sends the tools of MCP servers and sub-agents. No JAX.

A model knows them by a name that is one word, as chats have no namespaces.
"""

import hashlib

MOST = 64  # characters of a function's name
_DIGITS = 8


def joined(namespace: str | None, name: str) -> str:
    """The name that a model knows; one that would be too long ends in a digest of it."""
    if not namespace:
        return name
    text = namespace + ("" if namespace.endswith("__") else "__") + name
    if len(text) <= MOST:
        return text
    digest = hashlib.sha256(text.encode()).hexdigest()[:_DIGITS]
    return f"{text[: MOST - _DIGITS - 1]}_{digest}"

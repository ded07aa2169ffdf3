"""What can go wrong with text: one sentence each, written for the reader."""


class TokenizerError(ValueError):
    """A tokenizer that cannot be loaded or used: a missing, damaged or unsupported file."""


class ChatTemplateError(ValueError):
    """A chat template that is broken, forbidden by the sandbox, or over its limits."""


class ChatRequestError(ChatTemplateError):
    """Messages that are malformed, or that the template refuses: the caller's fault."""

"""How the engine refuses a request. No JAX, and nothing else: the command line knows it too."""


class RequestError(ValueError):
    """A request that is refused at the door; the message is written for its sender.

    `field` is what is wrong, by its name in `Request` or `SamplingParams` (`prompt` for the token
    ids), and `code` the kind of it, where programs tell one from others.
    """

    def __init__(self, message: str, field: str | None = None, code: str | None = None):
        super().__init__(message)
        self.field, self.code = field, code


class EngineLostError(RuntimeError):
    """What a step fails with where no other step can succeed: the engine is of no more use."""


class DuplicateRequestError(RequestError):
    """A request whose id belongs to another one that has not finished."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the devices or the machine had no room; XLA says so in two ways."""
    signs = ("RESOURCE_EXHAUSTED", "Out of memory")
    return isinstance(error, MemoryError) or any(sign in str(error) for sign in signs)

"""Who may ask a server, and where: its keys, certificates and addresses, read and tried. No JAX."""

import socket

from serving.run.flags import read_secret_lines
from serving.server.options import ServerOptions
from shiftjax.options import ConfigError
from shiftjax.settings import environ_beside

BACKLOG = 2048
VLLM_KEY = "VLLM_API_KEY"


def read_keys(options: ServerOptions) -> tuple[str, ...]:
    """The API keys of option and file, and that of VLLM_API_KEY. Raises ConfigError.

    A server that was started for vLLM's variable, and did not read it, would be open to all.
    """
    keys = [key for key in (options.api_key, environ_beside().get(VLLM_KEY)) if key]
    if options.api_key_file is not None:
        keys += read_secret_lines("api_key_file", options.api_key_file)
    return tuple(keys)


def read_admin_token(options: ServerOptions) -> str | None:
    """The token of the Admin service; None: there is no such service. Raises ConfigError."""
    if options.admin_port is None or options.admin_token_file is None:
        return None
    return read_secret_lines("admin_token_file", options.admin_token_file)[0]


def read_control_keys(options: ServerOptions) -> tuple[str, ...]:
    """The keys of the paths that hold and change the engine; none: there are no such paths.

    Raises ConfigError.
    """
    if options.control_key_file is None:
        return ()
    return tuple(read_secret_lines("control_key_file", options.control_key_file))


def bind(host: str, port: int) -> socket.socket:
    """A listening socket. Raises ConfigError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise ConfigError([f"cannot listen on {host}, port {port}: {error.strerror}"]) from None
    listener.setblocking(False)
    return listener


def check_access(options: ServerOptions) -> None:
    """Raise ConfigError for what a server could not use, without taking its ports.

    A port that another process has is nothing to refuse: it may be that of the server to follow.
    """
    read_keys(options)
    read_admin_token(options)
    read_control_keys(options)
    if options.ssl_certfile is not None:
        from serving.server.tls import Certificates

        Certificates(options)
    bind(options.host, 0).close()

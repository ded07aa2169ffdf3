"""Certificates of both front ends; read again when asked to, while running connections go on."""

import logging
import ssl
from pathlib import Path

import grpc

from serving.server.options import ServerOptions
from shiftjax.options import ConfigError

logger = logging.getLogger(__name__)


class Certificates:
    """What the files of the options hold. Raises ConfigError for files that cannot be used."""

    def __init__(self, options: ServerOptions):
        self._options = options
        # The listener's context passes every handshake on to the latest one: a context that is
        # loaded again would go on trusting the authorities that it has trusted before.
        self.context = self._latest = self._make_context()
        self.context.sni_callback = self._use_latest
        self._grpc = self._read()

    @property
    def credentials(self) -> grpc.ServerCredentials:
        """For gRPC listeners; gRPC asks for changes before every handshake."""
        is_mutual = self._options.ssl_ca_certs is not None
        return grpc.dynamic_ssl_server_credentials(self._grpc, self._changes, is_mutual)

    def reload(self) -> None:
        """Read the files again; if they cannot be used, stay with what there was and say so."""
        try:
            self._latest, self._grpc = self._make_context(), self._read()
        except ConfigError as error:
            logger.error("the certificates are not reloaded: %s", "; ".join(error.problems))
        else:
            logger.info("the certificates are reloaded")

    def _use_latest(self, connection: ssl.SSLObject, name: str | None, _: ssl.SSLContext) -> None:
        connection.context = self._latest

    def _changes(self) -> grpc.ServerCertificateConfiguration:
        return self._grpc

    def _make_context(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        if self._options.ssl_ca_certs is not None:
            context.verify_mode = ssl.CERT_REQUIRED
            # A session that is resumed shows no certificate again, so there are none; TLS 1.2
            # would keep some without tickets.
            context.minimum_version = ssl.TLSVersion.TLSv1_3
            context.num_tickets = 0
        self._load(context)
        return context

    def _load(self, context: ssl.SSLContext) -> None:
        options = self._options
        assert options.ssl_certfile is not None
        try:
            # A key with a password is an error, not a question at the terminal.
            context.load_cert_chain(options.ssl_certfile, options.ssl_keyfile, password="")
            if options.ssl_ca_certs is not None:
                context.load_verify_locations(options.ssl_ca_certs)
        except OSError as error:  # ssl.SSLError too
            words = f"cannot be used: {error.strerror}"
            raise ConfigError([f"ssl_certfile, ssl_keyfile, ssl_ca_certs {words}"]) from None

    def _read(self) -> grpc.ServerCertificateConfiguration:
        options = self._options
        key, chain = _bytes(options.ssl_keyfile), _bytes(options.ssl_certfile)
        authorities = _bytes(options.ssl_ca_certs) if options.ssl_ca_certs else None
        return grpc.ssl_server_certificate_configuration([(key, chain)], authorities)


def _bytes(path: str | None) -> bytes:
    assert path is not None
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError([f"{path} cannot be read: {error.strerror}"]) from None

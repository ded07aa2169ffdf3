"""Certificates to try TLS with."""

import shutil
import subprocess
from pathlib import Path

import pytest

NEW_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")
NAMES = "subjectAltName=DNS:localhost,IP:127.0.0.1"
OPENSSL = shutil.which("openssl")
NEEDS_OPENSSL = pytest.mark.skipif(OPENSSL is None, reason="needs openssl to make certificates")


def run_openssl(directory: Path, *arguments: str) -> None:
    command = [str(OPENSSL), *arguments]
    subprocess.run(command, cwd=directory, check=True, capture_output=True)


def make_authority(directory: Path) -> None:
    """Make an authority, and the certificates of a server and a client."""
    request = ("req", "-x509", *NEW_KEY, "-days", "2", "-keyout", "ca.key", "-out", "ca.pem")
    usage = "keyUsage=critical,keyCertSign,cRLSign"
    run_openssl(directory, *request, "-subj", "/CN=test", "-addext", usage)
    for name in ("server", "client"):
        make_certificate(directory, name)


def make_certificate(directory: Path, name: str) -> None:
    """Make a key and a certificate that the authority in the directory has signed."""
    signed = (*NEW_KEY, "-keyout", f"{name}.key", "-out", f"{name}.pem", "-days", "2")
    authority = ("-CA", "ca.pem", "-CAkey", "ca.key", "-subj", f"/CN={name}")
    names = ("-addext", NAMES)
    names += ("-addext", "basicConstraints=critical,CA:FALSE")
    run_openssl(directory, "req", "-x509", *signed, *authority, *names)


def make_own(directory: Path) -> None:
    """Make a key and a certificate that nobody else has signed."""
    signed = ("req", "-x509", *NEW_KEY, "-days", "2", "-keyout", "own.key", "-out", "own.pem")
    run_openssl(directory, *signed, "-subj", "/CN=own", "-addext", NAMES)

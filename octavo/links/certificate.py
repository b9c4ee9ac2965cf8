"""Certificates that are made at a start, and recognized by their fingerprints.

No authority signs them and no file keeps them: who connects knows the SHA-256 of the one to expect,
and looks at nothing else of it.
"""

from __future__ import annotations

import datetime
import hashlib
import hmac
import os
import ssl
import tempfile
from dataclasses import dataclass

from octavo.base.errors import LinkError
from octavo.base.optional_deps import need_cryptography

# Clocks of two machines differ; who pins a certificate does not look at its dates either.
_VALID = datetime.timedelta(days=3650)


@dataclass(frozen=True, slots=True)
class Certificate:
    """A certificate with its key, in the context of a process that listens."""

    context: ssl.SSLContext
    fingerprint: bytes


def make_certificate() -> Certificate:
    """Make a key (P-256) and a self-signed certificate for it.

    Raises:
        MissingPackageError: the package ``cryptography`` is not installed.
    """
    need_cryptography("connections between machines")
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "octavo")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + _VALID)
        .sign(key, hashes.SHA256())
    )
    der = certificate.public_bytes(serialization.Encoding.DER)
    pem = certificate.public_bytes(serialization.Encoding.PEM) + key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    context = _context(ssl.PROTOCOL_TLS_SERVER)
    context.num_tickets = 0  # a connection is never resumed
    _load(context, pem)
    return Certificate(context, hashlib.sha256(der).digest())


def connecting_context() -> ssl.SSLContext:
    """Return the context of a process that connects, and then calls `check_fingerprint`."""
    context = _context(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE  # the fingerprint is what counts
    return context


def check_fingerprint(connection: ssl.SSLSocket, expected: bytes, peer: str) -> None:
    """LinkError if the other end, after the handshake, has another certificate."""
    der = connection.getpeercert(binary_form=True) or b""
    found = hashlib.sha256(der).digest()
    if not hmac.compare_digest(found, expected):
        raise LinkError(
            f"{peer}: its certificate has the fingerprint {found.hex()[:16]}…, and not "
            f"{expected.hex()[:16]}…: another process listens there"
        )


def _context(protocol: int) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    return context


def _load(context: ssl.SSLContext, pem: bytes) -> None:
    """Give a certificate and its key to a context, which takes them only from a file."""
    fd, path = tempfile.mkstemp(prefix="octavo-", suffix=".pem")  # for this user alone
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(pem)
        context.load_cert_chain(path)
    finally:
        os.unlink(path)

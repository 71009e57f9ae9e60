"""Certificates and keys: a consortium's own authority, the server's certificate, a key for each site.

Flower takes TLS certificates (PEM) and, for a SuperNode, an ECDSA key as ssh-keygen writes it.
"""

import datetime
import ipaddress
import os
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from fedmix.errors import RunError

YEARS = 10  # of the authority
SERVER_DAYS = 825  # of the server's certificate


def write_new(path: Path, data: bytes, mode: int = 0o644) -> None:
    """A file that must not be there yet; with mode 0600 nobody but its owner ever sees a byte of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        handle = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, mode)
    except FileExistsError as error:
        raise RunError(f"{path} is there already, and nothing is overwritten. Choose another folder.") from error
    with open(handle, "wb") as file:
        file.write(data)


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _certificate(
    name: str, key: ec.EllipticCurvePrivateKey, issuer: str, days: int, authority: bool
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)

    def called(text: str) -> x509.Name:
        return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])

    return (
        x509.CertificateBuilder()
        .subject_name(called(name))
        .issuer_name(called(issuer))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(minutes=5))  # clocks differ
        .not_valid_after(now + datetime.timedelta(days=days))
        .add_extension(x509.BasicConstraints(ca=authority, path_length=None), critical=True)
    )


def make_certificates(folder: Path, hosts: list[str]) -> None:
    """ca.key, ca.crt, server.key, server.crt. hosts: names and addresses by which the server is called."""
    name = "fedmix federation"
    authority, server = (ec.generate_private_key(ec.SECP384R1()) for _ in range(2))
    usage = {
        use: use == "key_cert_sign" or use == "crl_sign" or use == "digital_signature"
        for use in (
            "digital_signature",
            "content_commitment",
            "key_encipherment",
            "data_encipherment",
            "key_agreement",
            "key_cert_sign",
            "crl_sign",
            "encipher_only",
            "decipher_only",
        )
    }
    own = (
        _certificate(name, authority, name, 365 * YEARS, authority=True)
        .add_extension(x509.KeyUsage(**usage), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(authority.public_key()), critical=False)
        .sign(authority, hashes.SHA384())
    )
    called = x509.SubjectAlternativeName([_called(host) for host in dict.fromkeys([*hosts, "localhost", "127.0.0.1"])])
    issued = (
        _certificate(hosts[0], server, name, SERVER_DAYS, authority=False)
        .add_extension(called, critical=False)
        .add_extension(x509.ExtendedKeyUsage([x509.oid.ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.public_key()),
            critical=False,
        )
        .sign(authority, hashes.SHA384())
    )
    write_new(folder / "ca.key", _pem(authority), 0o600)
    write_new(folder / "server.key", _pem(server), 0o600)
    write_new(folder / "ca.crt", own.public_bytes(serialization.Encoding.PEM))
    write_new(folder / "server.crt", issued.public_bytes(serialization.Encoding.PEM))


def _called(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def make_node_key(private: Path, public: Path, comment: str) -> None:
    """A site's key pair, as `ssh-keygen -t ecdsa -b 384` writes it."""
    key = ec.generate_private_key(ec.SECP384R1())
    ssh = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
    )
    line = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    write_new(private, ssh, 0o600)
    write_new(public, line + b" " + comment.encode() + b"\n")


def days_left(certificate: Path) -> float:
    """How long a certificate is still valid; below zero: it is not any more, or not yet."""
    read = x509.load_pem_x509_certificate(certificate.read_bytes())
    now = datetime.datetime.now(datetime.UTC)
    if now < read.not_valid_before_utc:
        return -1.0
    return (read.not_valid_after_utc - now).total_seconds() / 86400

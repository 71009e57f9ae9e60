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

YEARS = 10  # for which the authority is valid
SERVER_DAYS = 825  # for which the server's certificate is valid

# What the authority's key may be used for; cryptography wants every use named.
AUTHORITY_USES = {
    "digital_signature": True,
    "key_cert_sign": True,
    "crl_sign": True,
    "content_commitment": False,
    "key_encipherment": False,
    "data_encipherment": False,
    "key_agreement": False,
    "encipher_only": False,
    "decipher_only": False,
}


def write_new(path: Path, data: bytes, mode: int = 0o644) -> None:
    """Write a file that must not be there yet. With mode 0600 nobody but its owner ever sees a byte of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        handle = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, mode)
    except FileExistsError as error:
        raise RunError(f"{path} is there already, and nothing is overwritten. Choose another folder.") from error
    with open(handle, "wb") as file:
        file.write(data)


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    """Write a private key as PEM, without a password."""
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _certificate(
    name: str, key: ec.EllipticCurvePrivateKey, issuer: str, days: int, authority: bool
) -> x509.CertificateBuilder:
    """Begin a certificate for `key`. authority: with it others may be signed."""
    now = datetime.datetime.now(datetime.UTC)
    clocks_differ_by = datetime.timedelta(minutes=5)
    return (
        x509.CertificateBuilder()
        .subject_name(_common_name(name))
        .issuer_name(_common_name(issuer))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - clocks_differ_by)
        .not_valid_after(now + datetime.timedelta(days=days))
        .add_extension(x509.BasicConstraints(ca=authority, path_length=None), critical=True)
    )


def _common_name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def make_certificates(folder: Path, hosts: list[str]) -> None:
    """Write ca.key, ca.crt, server.key and server.crt. hosts: names and addresses by which the server is called."""
    name = "fedmix federation"
    authority = ec.generate_private_key(ec.SECP384R1())
    server = ec.generate_private_key(ec.SECP384R1())
    authority_certificate = (
        _certificate(name, authority, name, 365 * YEARS, authority=True)
        .add_extension(x509.KeyUsage(**AUTHORITY_USES), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(authority.public_key()), critical=False)
        .sign(authority, hashes.SHA384())
    )
    # `fedmix deploy run` and `check` reach the server on its own machine by the last two.
    all_hosts = dict.fromkeys([*hosts, "localhost", "127.0.0.1"])
    names = x509.SubjectAlternativeName([_alternative_name(host) for host in all_hosts])
    issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.public_key())
    server_certificate = (
        _certificate(hosts[0], server, name, SERVER_DAYS, authority=False)
        .add_extension(names, critical=False)
        .add_extension(x509.ExtendedKeyUsage([x509.oid.ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(issuer, critical=False)
        .sign(authority, hashes.SHA384())
    )
    write_new(folder / "ca.key", _pem(authority), 0o600)
    write_new(folder / "server.key", _pem(server), 0o600)
    write_new(folder / "ca.crt", authority_certificate.public_bytes(serialization.Encoding.PEM))
    write_new(folder / "server.crt", server_certificate.public_bytes(serialization.Encoding.PEM))


def _alternative_name(host: str) -> x509.GeneralName:
    """Name the server by its address, or by its name where `host` is no address."""
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def make_node_key(private: Path, public: Path, comment: str) -> None:
    """Write a site's key pair, as `ssh-keygen -t ecdsa -b 384` writes it."""
    key = ec.generate_private_key(ec.SECP384R1())
    ssh = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
    )
    line = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    write_new(private, ssh, 0o600)
    write_new(public, line + b" " + comment.encode() + b"\n")


def days_left(certificate: Path) -> float:
    """Say for how many days a certificate is still valid; below zero if it is not any more, or not yet."""
    content = x509.load_pem_x509_certificate(certificate.read_bytes())
    now = datetime.datetime.now(datetime.UTC)
    if now < content.not_valid_before_utc:
        return -1.0
    return (content.not_valid_after_utc - now).total_seconds() / 86400

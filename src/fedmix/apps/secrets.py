"""Certificates and keys of a federation: its own authority, the server's certificate, a key for each site."""

import datetime
import ipaddress
import os
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from fedmix.errors import SettingError

VALID_DAYS = 825
Key = ec.EllipticCurvePrivateKey


def write_secret(path: Path, data: bytes) -> None:
    """A file that its owner alone may read. Never in the place of another."""
    with open(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_EXCL, 0o600), "wb") as file:
        file.write(data)


def _pem(key: Key) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _name(words: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, words)])


def _dates(builder: x509.CertificateBuilder) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return builder.not_valid_before(now - datetime.timedelta(hours=1)).not_valid_after(
        now + datetime.timedelta(days=VALID_DAYS)
    )


def _host(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def write_authority_and_server(folder: Path, hosts: list[str]) -> None:
    """ca.crt and ca.key, server.pem and server.key, for a server that is reached by these names."""
    authority, server = ec.generate_private_key(ec.SECP384R1()), ec.generate_private_key(ec.SECP384R1())
    ca = (
        _dates(x509.CertificateBuilder())
        .subject_name(_name("fedmix federation"))
        .issuer_name(_name("fedmix federation"))
        .public_key(authority.public_key())
        .serial_number(x509.random_serial_number())
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(authority.public_key()), critical=False)
        .sign(authority, hashes.SHA384())
    )
    certificate = (
        _dates(x509.CertificateBuilder())
        .subject_name(_name(hosts[0]))
        .issuer_name(ca.subject)
        .public_key(server.public_key())
        .serial_number(x509.random_serial_number())
        .add_extension(x509.SubjectAlternativeName([_host(name) for name in hosts]), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .sign(authority, hashes.SHA384())
    )
    (folder / "ca.crt").write_bytes(ca.public_bytes(serialization.Encoding.PEM))
    (folder / "server.pem").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    write_secret(folder / "ca.key", _pem(authority))
    write_secret(folder / "server.key", _pem(server))


def write_node_key(private: Path, public: Path) -> None:
    """A site's key pair in OpenSSH's form, as Flower takes them."""
    key = ec.generate_private_key(ec.SECP384R1())
    ssh = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
    )
    write_secret(private, ssh)
    public.write_bytes(
        key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH) + b"\n"
    )


def expires(certificate: Path) -> datetime.datetime:
    """When a certificate ends to be valid."""
    try:
        return x509.load_pem_x509_certificate(certificate.read_bytes()).not_valid_after_utc
    except (OSError, ValueError) as error:
        raise SettingError(f"{certificate} must be a certificate. It cannot be read: {error}.") from error

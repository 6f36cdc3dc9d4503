"""Makes key files: a P-256 key and a self-signed certificate, valid to 9999. Dates are never checked."""

from __future__ import annotations

import datetime
import errno
import secrets
import subprocess
from pathlib import Path

from ...errors import CSDUnavailableError
from ...files import appears, write_file
from .keys import certificates_in, fingerprint

FROM, UNTIL = datetime.datetime(2000, 1, 1), datetime.datetime(9999, 12, 31, 23, 59, 59)


def init_key(path: Path) -> str:
    """Make a key file of mode 0600 and return its fingerprint. Raises CSDOSError; no file is replaced."""
    name = f"csd-optim {secrets.token_hex(8)}"  # arbitrary, but OpenSSL finds certificates by name
    try:
        text = _by_cryptography(name)
    except ImportError:
        text = _by_openssl(name)
    with appears(path, replaces=False) as hidden:
        write_file(hidden, text, replaces=False, mode=0o600)
    return fingerprint(certificates_in(text.decode())[0])


def _by_cryptography(name: str) -> bytes:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(FROM)
        .not_valid_after(UNTIL)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)  # signs nothing else
        .sign(key, hashes.SHA256())
    )
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return private + certificate.public_bytes(serialization.Encoding.PEM)


def _by_openssl(name: str) -> bytes:
    """As _by_cryptography(), by the command `openssl`, valid from today.

    The private key travels through a pipe, not a file.
    """
    days, pipe = (UNTIL - datetime.datetime.now()).days, "/dev/stdout"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
    command += ["-subj", f"/CN={name}", "-days", str(days), "-addext", "basicConstraints=critical,CA:FALSE"]
    command += ["-config", "/dev/null", "-keyout", pipe, "-out", pipe]  # this machine's configuration adds extensions
    try:
        return subprocess.run(command, capture_output=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as e:
        why = (getattr(e, "stderr", b"") or str(e).encode()).decode(errors="replace").strip()[-200:]
        text = f"no key can be made: neither the command openssl nor the package cryptography can be used ({why})"
        raise CSDUnavailableError(errno.ENOENT, text) from None

"""Makes key files: a P-256 key and a certificate that it has signed itself, valid from 2000 to 9999."""

from __future__ import annotations

import datetime
import errno
import secrets
import subprocess
import tempfile
from pathlib import Path

from ..errors import CSDUnavailableError
from .keys import certificates_in, fingerprint, write_new

FROM, UNTIL = datetime.datetime(2000, 1, 1), datetime.datetime(9999, 12, 31, 23, 59, 59)
CONFIGURATION = """
[ca]
default_ca = here
[here]
database = index
new_certs_dir = .
rand_serial = yes
default_md = sha256
policy = names
x509_extensions = leaf
[names]
commonName = supplied
[leaf]
basicConstraints = critical,CA:FALSE
[req]
distinguished_name = names
"""


def init_key(path: Path) -> str:
    """Make a key file of mode 0600 and return its fingerprint. Raises CSDOSError; no file is replaced."""
    name = f"csd-optim {secrets.token_hex(8)}"  # of no meaning, but OpenSSL finds certificates by name
    try:
        text = _by_cryptography(name)
    except ImportError:
        text = _by_openssl(name)
    write_new(path, text)
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
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)  # it signs nothing else
        .sign(key, hashes.SHA256())
    )
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return private + certificate.public_bytes(serialization.Encoding.PEM)


def _by_openssl(name: str) -> bytes:
    """The same by the command `openssl`. The private key is in no file: it goes through pipes."""
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "ca.conf").write_text(CONFIGURATION)
        (Path(directory) / "index").touch()

        def openssl(*arguments: str, key: bytes = b"") -> bytes:
            command = ["openssl", *arguments]
            try:
                done = subprocess.run(command, cwd=directory, input=key, capture_output=True, check=True)
            except (OSError, subprocess.CalledProcessError) as e:
                why = (getattr(e, "stderr", b"") or str(e).encode()).decode(errors="replace").strip()[-200:]
                text = f"no key can be made: pip install csd_optim[serve] ({why})"
                raise CSDUnavailableError(errno.ENOENT, text) from None
            return done.stdout

        private = openssl("genpkey", "-algorithm", "EC", "-pkeyopt", "ec_paramgen_curve:P-256")
        request = ("req", "-new", "-config", "ca.conf", "-subj", f"/CN={name}", "-key", "/dev/stdin", "-out", "request")
        openssl(*request, key=private)
        days = ("-startdate", FROM.strftime("%Y%m%d%H%M%SZ"), "-enddate", UNTIL.strftime("%Y%m%d%H%M%SZ"))
        sign = ("ca", "-selfsign", "-batch", "-notext", "-config", "ca.conf", "-keyfile", "/dev/stdin")
        return private + openssl(*sign, *days, "-in", "request", key=private)

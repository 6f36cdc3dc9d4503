"""Key files: PEM with a private key and its certificate, which the other side *pins*, that is, knows beforehand.

There are no other signatures, and no name, address or date in a certificate counts: only its SHA-256, the fingerprint.
A key file that is unreadable, or readable by others, is an error; nothing continues without the key.
"""

from __future__ import annotations

import enum
import hashlib
import os
import re
import ssl
import stat
from collections.abc import Iterable, Sequence
from pathlib import Path

from ... import settings
from ...errors import CSDOSError, CSDValueError
from ...files import opened, read

PROTOCOL = "csd-optim/7"  # TLS tells it to the other side (ALPN)
CERTIFICATE = re.compile(r"-----BEGIN CERTIFICATE-----.*?-----END CERTIFICATE-----", re.DOTALL)
PRIVATE = re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----")
FINGERPRINT = re.compile(r"sha256:[0-9a-f]{64}")
FILE_BYTES = 1 << 20  # maximum size of a file of certificates
NO_CHECK_TIME = 0x200000  # X509_V_FLAG_NO_CHECK_TIME, for which `ssl` has no name


class Role(str, enum.Enum):
    """What the holder of a key may do.

    An admin may also do everything that a trainer may, and a trainer what a reader may.
    """

    READER = "reader"  # statistics
    TRAINER = "trainer"  # train, read and set states
    ADMIN = "admin"  # erase and save

    def may(self, needed: Role) -> bool:
        """Return whether this role includes what `needed` may do."""
        order = (Role.READER, Role.TRAINER, Role.ADMIN)
        return order.index(self) >= order.index(needed)


class Key:
    """The contents of a key file. Its repr() is the fingerprint, and it cannot be pickled or copied."""

    def __init__(self, path: Path) -> None:
        """Read a key file. Raises CSDOSError and CSDValueError."""
        text = _read(path, secret=True)
        certificates = certificates_in(text)
        if len(certificates) != 1 or len(PRIVATE.findall(text)) != 1:
            raise CSDValueError(
                f"{path} is no key file: it has {len(PRIVATE.findall(text))} private keys and {len(certificates)} "
                f"certificates; `csd-optim serve --init-key FILE` makes one with one of each"
            )
        self.path: Path = path
        self.certificate: bytes = certificates[0]  # DER
        self.fingerprint: str = fingerprint(self.certificate)
        self._text = text
        self.client: ssl.SSLContext = self._context(ssl.PROTOCOL_TLS_CLIENT)

    def server(self, accepted: Iterable[bytes]) -> ssl.SSLContext:
        """Return the context of an owner. `accepted`: certificates (DER) of accepted peers."""
        context = self._context(ssl.PROTOCOL_TLS_SERVER)
        context.verify_mode = ssl.CERT_REQUIRED
        # A wrong clock must not matter, and pinned certificates need not be self-signed.
        context.verify_flags = ssl.VerifyFlags(context.verify_flags | NO_CHECK_TIME | ssl.VERIFY_X509_PARTIAL_CHAIN)
        context.num_tickets = 0  # a session ticket would outlive a revoked key
        try:
            for der in accepted:
                context.load_verify_locations(cadata=der)
        except ssl.SSLError as e:
            raise CSDValueError(f"a certificate that should be accepted is damaged ({e.reason})") from None
        return context

    def _context(self, protocol: ssl._SSLMethod) -> ssl.SSLContext:
        context = ssl.SSLContext(protocol)  # create_default_context() would refuse self-signed certificates
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        context.set_alpn_protocols([PROTOCOL])
        try:
            # OpenSSL takes keys from files only, and the key file may have changed: use a file in memory.
            with open(os.memfd_create("key"), "w") as file:
                file.write(self._text)
                file.flush()
                context.load_cert_chain(f"/proc/self/fd/{file.fileno()}", password=self._passphrase)
        except ssl.SSLError as e:
            raise CSDValueError(f"{self.path}: the private key is not that of the certificate ({e.reason})") from None
        except OSError as e:
            raise CSDOSError(e.errno, f"{self.path}: OpenSSL cannot read the key: {e.strerror}") from None
        return context

    def _passphrase(self) -> str:  # else OpenSSL would ask at the terminal
        raise CSDValueError(f"{self.path} has a passphrase: use a key file without")

    def __repr__(self) -> str:
        return f"Key({self.fingerprint})"

    def __reduce__(self) -> str:
        raise TypeError("a key is not pickled or copied: read its file where it is needed")


class Accepted:
    """An owner's key and the accepted certificates, as read from their files by the constructor."""

    def __init__(self, key: Path, accept: Sequence[tuple[Role, Path]]) -> None:
        """Read the owner's key file, whose holders are admins, and files of certificates with their holders' roles.

        Raises CSDOSError and CSDValueError, also for a certificate with two roles.
        """
        self.key: Key = Key(key)
        self.roles: dict[str, Role] = {self.key.fingerprint: Role.ADMIN}
        certificates = [self.key.certificate]
        for role, path in accept:
            for certificate in read_certificates(path):
                name = fingerprint(certificate)
                if self.roles.setdefault(name, role) is not role:
                    raise CSDValueError(
                        f"{path}: the certificate {name[7:19]} is accepted as {self.roles[name].value} already, "
                        f"and cannot also be {role.value}; each owner has a key of its own, whose holders are admins"
                    )
                certificates.append(certificate)
        self.context: ssl.SSLContext = self.key.server(certificates)


def certificates_in(text: str) -> list[bytes]:
    """Return the certificates in a PEM text, as DER. Raises CSDValueError."""
    try:
        return [ssl.PEM_cert_to_DER_cert(match.group()) for match in CERTIFICATE.finditer(text)]
    except ValueError as e:
        raise CSDValueError(f"a certificate is damaged: {e}") from None


def read_certificates(path: Path) -> list[bytes]:
    """Return the certificates (DER) in a file of `--accept`. Raises CSDOSError and CSDValueError."""
    text = _read(path, secret=False)
    if PRIVATE.search(text):
        raise CSDValueError(
            f"{path} contains a private key, which belongs only on the machine that uses it: "
            f"`openssl x509 -in {path} -out CERT.pem` makes a file of the certificate alone"
        )
    if not (found := certificates_in(text)):
        raise CSDValueError(f"{path} contains no certificate")
    return found


def fingerprint(certificate: bytes) -> str:
    """Return the identity of a certificate (DER): `sha256:` and 64 hexadecimal digits."""
    return "sha256:" + hashlib.sha256(certificate).hexdigest()


def resolve(path: str | None, owner: str | None) -> tuple[Key | None, str | None]:
    """Return a trainer's key, and the fingerprint that the owner must have; both None if no key is configured.

    `path`: `?key=` of the device string, before CSD_OPTIM_KEY. `owner`: `?owner=`, one fingerprint or several with
    commas between them, by default the trainer's own. Raises CSDOSError and CSDValueError; an unusable key is an error,
    never left out.
    """
    named = Path(path) if path is not None else settings.key()
    if named is None:
        if owner is not None:
            raise CSDValueError(
                "owner= names an owner's certificate, but there is no key: add key= or set CSD_OPTIM_KEY"
            )
        return None, None
    key = Key(named)
    if owner is None:
        return key, key.fingerprint
    if not all(FINGERPRINT.fullmatch(one) for one in owner.lower().split(",")):
        raise CSDValueError(
            f"Invalid owner: {owner!r}; it is the sha256:... that `csd-optim serve` prints at its start"
        )
    return key, owner.lower()


def _read(path: Path, secret: bool) -> str:
    try:
        with opened(path, os.O_NOFOLLOW | os.O_NONBLOCK) as fd:  # the file could be a pipe, which must not block
            _check(path, os.fstat(fd), secret)
            data = read(fd, FILE_BYTES + 1, 0)
    except OSError as e:
        link = f"{path} is a link: name the file that it leads to" if path.is_symlink() else f"{path}: {e.strerror}"
        raise CSDOSError(e.errno, f"the key file cannot be read: {link}") from None
    if len(data) > FILE_BYTES:
        raise CSDValueError(f"{path} is no key file: it is too long")
    try:
        return data.decode("ascii")
    except ValueError:
        raise CSDValueError(f"{path} is no key file: it is not PEM") from None


def _check(path: Path, status: os.stat_result, secret: bool) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise CSDValueError(f"{path} is no regular file")
    if status.st_uid not in (os.geteuid(), 0):
        raise CSDValueError(f"{path} belongs to another user: copy it, or change its owner")
    others = status.st_mode & 0o077
    if not secret:
        if others & 0o022:
            raise CSDValueError(f"{path} can be written by others, who could let themselves in: chmod 644 {path}")
    elif others and not (status.st_uid == 0 and others == 0o040):  # root:group 0640: as containers mount secrets
        raise CSDValueError(f"{path} can be read by others: chmod 600 {path}")

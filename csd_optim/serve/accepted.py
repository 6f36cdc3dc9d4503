"""Which certificates an owner accepts, and as what."""

from __future__ import annotations

import ssl
from collections.abc import Sequence
from pathlib import Path

from ..errors import CSDValueError
from .keys import Key, fingerprint, read_certificates
from .session import Role


class Accepted:
    """An owner's key and the certificates of others, as they were in the files when this was made."""

    def __init__(self, key: Path, accept: Sequence[tuple[Role, Path]]) -> None:
        """Read the owner's key file, whose holders are admins, and files of certificates.

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

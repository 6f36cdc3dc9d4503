"""The chain of versions in a folder, continued by rank 0: a version gets its name once all shares are written."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Sequence

from ..errors import CSDStoreError
from ..replica.versions import Tensor, Version
from .folder import Folder, VersionShare, with_checksums


class Chain:
    """The versions of a model with these tensors. Methods raise OSError, CSDStoreError."""

    def __init__(self, folder: Folder, tensors: Sequence[Tensor]) -> None:
        self.model: str = hashlib.sha256(repr([*tensors]).encode()).hexdigest()  # see VersionShare
        self._folder, self._tensors = folder, tensors
        self._last: Version | None = None

    def find(self, step: int, sums: Sequence[tuple[int, int]], *, durable: bool) -> tuple[str, int, int, int]:
        """Return the run, and the numbers of the next version, the last version, and the last full version.

        Continues a run only if its last version has the weights of `step`, with checksums `sums` (as in VersionShare);
        otherwise the run is new, and the last two numbers are 0. A complete version whose writer was killed before
        naming it gets its name now; other unnamed versions are removed.
        """
        newest, now = self._folder.newest(), with_checksums(self._tensors, sums)
        for shares in self._folder.complete() if durable else ():
            share, base = shares[0], None if shares[0].base is None else newest
            follows = share.base is None or (base and (base.run, base.number) == (share.run, share.base))
            if follows and (share.step, share.model) == (step, self.model) and self._total(shares) == now:
                newest = self._folder.name(shares, base, now)
                break
        self._folder.discard()
        if newest and durable and newest.step == step and [*newest.tensors] == now:
            self._last = newest
            return newest.run, newest.number + 1, newest.number, self._folder.last_full(newest)
        return secrets.token_hex(16), self._folder.next_number(), 0, 0

    def name(self, run: str, number: int) -> Version:
        """Let readers see a version. All ranks have written their shares."""
        shares = self._folder.shares(number)
        base = None if shares[0].base is None else self._last
        if shares[0].run != run or (base and base.number != shares[0].base):
            raise CSDStoreError(f"somebody else has written to {self._folder.path}")
        self._last = self._folder.name(shares, base, self._total(shares))
        return self._last

    def _total(self, shares: Sequence[VersionShare]) -> list[Tensor]:
        return with_checksums(self._tensors, [part for share in shares for part in share.checksums])

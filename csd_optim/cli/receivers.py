"""What `csd-optim follow` writes, for which kind of receiver."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from pathlib import Path

from ..errors import CSDValueError
from ..replica.versions import Version

Follow = Callable[[], "tuple[Path, Version] | None"]


class Receiver(str, Enum):
    """The values of `--as`."""

    SAFETENSORS = "safetensors"
    VLLM = "vllm"
    SLIME = "slime"


def follower(receiver: Receiver, directory: Path, to: Path, base: Path | None) -> Follow:
    """Return what brings `to` to the newest version of a folder: it returns the file or directory, and the version.

    None: there is no newer one. Raises CSDValueError.
    """
    if base and receiver is not Receiver.SLIME:
        raise CSDValueError(f"--base is only for --as slime, not for --as {receiver.value}")
    if receiver is Receiver.SLIME:
        from ..replica.slime import Follower

        return Follower(directory, to, base).follow
    if receiver is Receiver.VLLM:
        from ..replica import vllm

        return lambda: vllm.follow(directory, to)
    from ..replica import to_file

    def follow() -> tuple[Path, Version] | None:
        version = to_file.follow(directory, to)
        return (to, version) if version else None

    return follow

"""The address of an optimizer rank, as `devices` names it: `serve://host:port`."""

from __future__ import annotations

from typing import Any, NamedTuple
from urllib.parse import parse_qsl, urlsplit

from .. import settings
from ..devices.spec import fill_in
from ..distributed.ranks import Ranks
from ..errors import CSDValueError

SCHEME = "serve://"
DEFAULT_TIMEOUT = 600.0  # seconds that the other side may be silent within a step
MAX_TIMEOUT = 24 * 3600.0
# Options of earlier versions, whose optimizer ranks had another protocol.
FORMER = {
    "route": "each trainer pushes its rows to its optimizer rank; csd_optim.push as DDP's communication hook reduces "
    "gradients to these rows (docs/distributed.md)",
    "protocol": "there is only one",
}


class Address(NamedTuple):
    """The address of an optimizer rank, parsed from a device string."""

    text: str
    host: str
    port: int
    timeout: float  # seconds
    key: str | None  # the trainer's key file; None: see keys.resolve()
    owner: str | None  # the optimizer rank's fingerprint

    def __str__(self) -> str:
        return self.text


def address_of(devices: Any, ranks: Ranks | None) -> Address | None:
    """Return this trainer's optimizer rank if `devices` (or CSD_OPTIM_DEVICES, if it is None) names one or several.

    Several are divided among the ranks. Raises CSDValueError.
    """
    named = settings.devices() if devices is None else [devices] if isinstance(devices, str) else devices
    if not isinstance(named, (list, tuple)):
        return None
    addresses = [
        parse_address(fill_in(d.strip())) for d in named if isinstance(d, str) and d.strip().lower().startswith(SCHEME)
    ]
    if not addresses:
        return None
    if len(addresses) < len(named):
        raise CSDValueError(
            f"Invalid devices: {str(addresses[0])!r} stands for all devices of a trainer: name no others beside it"
        )
    rank, size = (ranks.rank, ranks.size) if ranks else (0, 1)
    if size < len(addresses):
        raise CSDValueError(
            f"Invalid devices: {len(addresses)} optimizer ranks and {size} trainer{'s' * (size > 1)}; each trainer "
            "has its states with one of them"
        )
    return addresses[rank % len(addresses)]


def parse_address(text: str) -> Address:
    """Parse `serve://host:port` or `serve://host:port?timeout=60&key=FILE`. Raises CSDValueError."""
    try:
        parts = urlsplit(text)
        host, port = parts.hostname, parts.port
        options = dict(parse_qsl(parts.query, keep_blank_values=True))
        timeout = float(options.pop("timeout", DEFAULT_TIMEOUT))
        key, owner = (options.pop(name, None) for name in ("key", "owner"))
    except ValueError as e:
        raise CSDValueError(f"Invalid device: {text!r}; {e}") from None
    if not host or not port or parts.path or parts.username or parts.fragment:
        raise CSDValueError(f"Invalid device: {text!r}; write serve://host:port")
    for name in options:
        why = FORMER.get(name, "the options are timeout, key and owner")
        raise CSDValueError(f"Invalid device: {text!r}; there is no option {name!r}: {why}")
    if not 0.1 <= timeout <= MAX_TIMEOUT:
        raise CSDValueError(f"Invalid device: {text!r}; timeout is a number of seconds from 0.1 to {MAX_TIMEOUT:.0f}")
    return Address(text, host, port, timeout, key, owner)

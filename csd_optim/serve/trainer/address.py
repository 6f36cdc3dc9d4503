"""The address of an optimizer rank, as `devices` names it: `serve://host:port`."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, urlsplit

from ... import settings
from ...devices.spec import fill_in
from ...distributed.ranks import Ranks
from ...errors import CSDValueError
from ..wire.limits import MOST_STREAMS

SCHEME = "serve://"
DEFAULT_TIMEOUT = 600.0  # seconds for which the other side may be silent within a step
MAX_TIMEOUT = 24 * 3600.0


class Address(NamedTuple):
    """The address of an optimizer rank, parsed from a device string."""

    text: str
    host: str
    port: int
    timeout: float  # seconds
    key: str | None  # the trainer's key file; None: see keys.resolve()
    owner: str | None  # the optimizer rank's fingerprint
    share: float | None = None  # relative part of a trainer's states; None: by the owner's devices
    connections: int = 1  # data connections, which carry tiles

    def __str__(self) -> str:
        return self.text


class Owners(NamedTuple):
    """The optimizer ranks that have the states of this trainer."""

    addresses: list[Address]
    indices: list[int]  # by owner: the number of its share
    n_shares: int  # the larger of the numbers of trainers and of optimizer ranks
    here: list[int]  # by owner: its number of shares, over all trainers


def owners_named(devices: Any, ranks: Ranks | None) -> Owners | None:
    """Return this trainer's optimizer ranks; None if `devices` (None: CSD_OPTIM_DEVICES) names no optimizer rank.

    Several optimizer ranks are divided among the trainers, or the trainers among them. Raises CSDValueError.
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
    n_shares = max(size, len(addresses))
    of_shares = [addresses[k % len(addresses)] for k in range(n_shares)]
    places = Counter((address.host, address.port) for address in of_shares)  # an owner may be named twice
    own = range(rank, n_shares, size)
    here = [places[of_shares[k].host, of_shares[k].port] for k in own]
    return Owners([of_shares[k] for k in own], [*own], n_shares, here)


def parse_address(text: str) -> Address:
    """Parse `serve://host:port`, which may have options: `?timeout=60&key=FILE`. Raises CSDValueError."""
    try:
        parts = urlsplit(text)
        host, port = parts.hostname, parts.port
        options = dict(parse_qsl(parts.query, keep_blank_values=True))
        timeout = float(options.pop("timeout", DEFAULT_TIMEOUT))
        share = float(options.pop("share")) if "share" in options else None
        connections = int(options.pop("connections", 1))
        key, owner = (options.pop(name, None) for name in ("key", "owner"))
    except ValueError as e:
        raise CSDValueError(f"Invalid device: {text!r}; {e}") from None
    if not host or not port or parts.path or parts.username or parts.fragment:
        raise CSDValueError(f"Invalid device: {text!r}; write serve://host:port")
    for name in options:
        raise CSDValueError(
            f"Invalid device: {text!r}; there is no option {name!r}: the options are timeout, key, owner, share and "
            "connections"
        )
    if not 0.1 <= timeout <= MAX_TIMEOUT:
        raise CSDValueError(f"Invalid device: {text!r}; timeout is a number of seconds from 0.1 to {MAX_TIMEOUT:.0f}")
    if share is not None and not 0 < share < math.inf:
        raise CSDValueError(f"Invalid device: {text!r}; share is a positive number")
    if not 1 <= connections <= MOST_STREAMS:
        raise CSDValueError(f"Invalid device: {text!r}; connections is a number from 1 to {MOST_STREAMS}")
    return Address(text, host, port, timeout, key, owner, share, connections)

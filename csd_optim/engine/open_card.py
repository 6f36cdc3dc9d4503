"""Opens a SmartSSD for an engine: its kernels, its drive, and the peer-to-peer path (P2P) between FPGA and drive."""

from __future__ import annotations

import contextlib
import errno
import warnings
from collections.abc import Collection
from dataclasses import replace
from typing import Any

from .. import bindings
from ..devices.smartssd import find as find_card
from ..devices.smartssd import no_p2p
from ..devices.spec import DeviceSpec
from ..devices.xclbin import find_kernels
from ..errors import CSDUnavailableError, CSDValueError, CSDWarning, users_stacklevel
from ..signals import defer_signals
from ..store.file import StoreFile
from ..store.format import PAGE


def open_card(spec: DeviceSpec, cards: dict[str, Any], kernels: Collection[str] = ()) -> DeviceSpec:
    """Open the card that `spec` names and add its handle to `cards`, by name, even if this raises afterwards.

    `kernels`: the kernels that its xclbin must contain.

    Returns the spec with the card's own name and its directory. Warns of whatever makes the card slow. Raises
    CSDValueError if the card is among `cards` already, CSDUnavailableError, CSDOSError.
    """
    card = find_card(spec.card)
    if card.name in cards:
        raise CSDValueError(f"Invalid devices: card {card.name} is named twice, the second time as '{spec}'")
    directory = card.store_directory(spec.directory)
    program = find_kernels(spec.xclbin, kernels)
    with defer_signals():  # an interrupt between the two lines would leak the handle
        handle = bindings.card_open(card.name, program.path, program.kernels, spec.timeout)
        cards[card.name] = handle
    if spec.p2p != "0" and bindings.card_has_p2p(handle):
        place = directory if directory.is_dir() else directory.parent
        with contextlib.closing(StoreFile(place, durable=False)) as page, warnings.catch_warnings():
            warnings.simplefilter("ignore", CSDWarning)  # the real store warns if there is no direct I/O
            offset = page.allocate(PAGE)
            if page.direct:
                bindings.card_try_p2p(handle, page.io_fd, offset, card.name)
    if spec.p2p == "1" and not bindings.card_has_p2p(handle):
        raise CSDUnavailableError(
            errno.EOPNOTSUPP,
            f"{spec}: peer-to-peer transfers do not work (P2P, says the driver: {card.p2p}); turn them on "
            "(docs/smartssd.md), or leave out p2p=1",
        )
    slow = [] if spec.p2p == "0" else list(card.warnings)
    if not slow and not card.drive_contains(directory):
        slow.append(f"{directory} is not on this card's drive: the state goes through the host")
    elif not slow and spec.p2p == "auto" and not bindings.card_has_p2p(handle):
        slow.append(no_p2p(card.p2p))
    for text in slow:
        warnings.warn(f"{spec}: {text} (docs/smartssd.md)", CSDWarning, stacklevel=users_stacklevel())
    return replace(spec, card=card.name, directory=directory)

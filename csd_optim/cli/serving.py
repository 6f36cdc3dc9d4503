"""`csd-optim serve`: this process becomes an optimizer rank, which keeps states for trainers elsewhere."""

from __future__ import annotations

import contextlib
import resource
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..devices.spec import DeviceSpec, parse_devices
from ..errors import CSDValueError
from ..serve.owner.log import printable
from ..serve.owner.owner_session import Owner
from ..serve.owner.ownership import Ownership
from ..serve.trainer.address import DEFAULT_TIMEOUT
from ..serve.wire.keys import Role
from ..serve.wire.listener import Listener
from ..store.file import StoreFile

MOST_FILES = 1 << 16  # that an optimizer rank opens at once; a limit beyond that only makes children slow to start


def serve(
    devices: list[str],
    address: str,
    timeout: float = DEFAULT_TIMEOUT,
    key: Path | None = None,
    accept: Sequence[tuple[Role, Path]] = (),
    allow_save: Sequence[Path] = (),
    max_model: int | None = None,
) -> None:
    """Serve trainers until SIGTERM or Ctrl-C. Returns when all states are durable.

    `timeout`: seconds that a trainer may be silent within a step. `key`, `accept`: see Listener; `allow_save`,
    `max_model` (bytes): see Ownership. Raises CSDValueError or CSDOSError if it cannot start.
    """
    place = parse_listen(address)
    raise_file_limit()
    specs = _durable(devices)
    try_to_open(specs)
    ownership = Ownership(specs, allow_save, max_model)
    owner = Owner(ownership, timeout, _write_line)  # its lines are printable
    stopping, woken, reloads = threading.Event(), threading.Event(), threading.Event()
    listener = Listener(place, key=key, accept=accept, on_session=owner.serve, log=_print_line, timeout=timeout)

    def stop(*_: Any) -> None:
        stopping.set()
        woken.set()

    def reload(*_: Any) -> None:
        reloads.set()
        woken.set()

    handlers = {signal.SIGTERM: stop, signal.SIGINT: stop, signal.SIGHUP: reload}
    before = [(number, signal.signal(number, handler)) for number, handler in handlers.items()]
    try:
        host, port = listener.address
        shown = f"{'[' + host + ']' if ':' in host else host}:{port}"
        _print_line(f"optimizer rank with {', '.join(map(str, specs))}, at {shown}")
        if listener.fingerprint:
            _print_line(f"its certificate is {listener.fingerprint}")
        while not stopping.is_set():
            woken.wait(60)
            woken.clear()
            if reloads.is_set():
                reloads.clear()
                listener.reload()
    finally:
        for number, handler in before:
            signal.signal(number, handler)
        listener.close()
        owner.close()


def raise_file_limit() -> None:
    """Raise the limit of open files as far as this user may: it limits how many trainers there can be at once."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < (wanted := min(hard, MOST_FILES)):
        with contextlib.suppress(OSError, ValueError):  # some containers do not allow it
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _durable(devices: list[str]) -> list[DeviceSpec]:
    """Return the devices of an optimizer rank. Raises CSDValueError."""
    specs = parse_devices(devices)
    if temporary := [str(spec) for spec in specs if not spec.durable]:
        raise CSDValueError(f"Invalid device: {temporary[0]!r}; optimizer ranks keep states in named directories")
    return specs


def try_to_open(specs: Sequence[DeviceSpec]) -> None:
    """Open the stores of these devices, and close them unchanged: a session would find only later that this fails.

    Creates directories that do not exist yet. Raises CSDOSError, CSDBusyError, CSDStoreExistsError for other files.
    """
    with contextlib.ExitStack() as stack:
        for directory in (spec.directory for spec in specs if spec.directory):
            # This mode reads nothing, and would erase a store only when something is written.
            stack.callback(StoreFile(directory, durable=True, mode="overwrite").close)


def parse_listen(text: str) -> tuple[str, int]:
    """Parse `HOST:PORT` into both. Without HOST, the host is empty: all addresses. Raises CSDValueError."""
    host, _, port = text.rpartition(":")
    if not (port.isdecimal() and port.isascii() and len(port) <= 5 and int(port) <= 65535):
        raise CSDValueError(f"Invalid --listen: {text!r}; write HOST:PORT, such as 10.0.0.1:29600")
    return host.removeprefix("[").removesuffix("]"), int(port)


def parse_accept(text: str) -> tuple[Role, Path]:
    """Parse `ROLE=CERT` into both. Raises CSDValueError."""
    role, _, path = text.partition("=")
    roles = [known.value for known in (Role.READER, Role.TRAINER, Role.ADMIN)]
    if role not in roles or not path:
        raise CSDValueError(f"Invalid --accept: {text!r}; write ROLE=CERT with one of the roles {', '.join(roles)}")
    return Role(role), Path(path)


def _print_line(line: str) -> None:
    _write_line(printable(line))


def _write_line(line: str) -> None:
    with contextlib.suppress(OSError):  # serving continues even if the log's disk is full
        print(line, file=sys.stderr, flush=True)

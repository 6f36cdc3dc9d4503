"""`csd-optim serve`: this process becomes an optimizer rank (an owner); torchrun starts several that work together."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ..devices.spec import DeviceSpec, parse_devices
from ..distributed.ranks import Ranks, all_ranks_or_none, ranks_of
from ..errors import CSDOSError, CSDValueError
from ..optim.adagrad import CSDAdagrad
from ..optim.adamw import CSDAdam
from ..optim.lion import CSDLion
from ..optim.rmsprop import CSDRMSprop
from ..optim.sgd import CSDSGD
from ..serve.listener import Listener
from ..serve.log import printable
from ..serve.owner import Owner
from ..serve.owner_session import Owner as SessionOwner
from ..serve.ownership import Ownership
from ..serve.service import Service
from ..serve.session import Role
from ..serve.wire import CONNECT_TIMEOUT, DEFAULT_TIMEOUT, connect, is_local_address, is_wildcard, listen
from ..store.file import StoreFile

MOST_FILES = 1 << 16  # that an optimizer rank opens at once; a limit beyond that only makes children slow to start
OPTIMIZERS: dict[str, type[Any]] = {kind.__name__: kind for kind in (CSDAdam, CSDSGD, CSDAdagrad, CSDRMSprop, CSDLion)}


def serve(
    devices: list[str],
    address: str,
    timeout: float = DEFAULT_TIMEOUT,
    protocol: int = 3,
    key: Path | None = None,
    accept: Sequence[tuple[Role, Path]] = (),
    allow_save: Sequence[Path] = (),
    max_model: int | None = None,
) -> None:
    """Serve trainers until SIGTERM or Ctrl-C. Returns when all states are durable.

    `key`, `accept`: see Listener; `allow_save`, `max_model` (bytes): see Ownership. With protocol 4 only.
    Raises CSDValueError or CSDOSError if it cannot start, CSDRankError if another optimizer rank is lost.
    """
    host, port = parse_listen(address)
    if protocol == 4:
        return _serve_frames(devices, (host, port), timeout, key, accept, allow_save, max_model)
    if max_model is not None:
        raise CSDValueError("--max-model is for --protocol 4")
    if key or accept or allow_save:
        raise CSDValueError("keys are for --protocol 4: without it nobody is asked for one")
    if "RANK" in os.environ and not dist.is_initialized():
        dist.init_process_group("gloo")
    ranks = ranks_of(None)
    with all_ranks_or_none(ranks):
        specs = _durable(devices)
        try_to_open(specs)
    reach, port, store = _meet(host, port, ranks)
    owner = Owner(OPTIMIZERS, devices, ranks)
    service = Service(
        owner,
        ranks,
        lambda: connect(reach, port, CONNECT_TIMEOUT),
        # Other owners get the same --listen: bind to its host only if that is an address of this machine.
        host=host if not is_wildcard(host) and is_local_address(host) else "",
        timeout=timeout,
        print_line=_print_line,
    )

    def stop(*_: Any) -> None:
        service.stopping = True

    before = [(s, signal.signal(s, stop)) for s in (signal.SIGTERM, signal.SIGINT)]
    try:
        if owner.rank == 0:
            shown = f"{'[' + host + ']' if ':' in host else host}:{port}"
            _print_line(
                f"{owner.owners} optimizer rank{'s' * (owner.owners > 1)} with {', '.join(map(str, specs))}, at {shown}"
            )
        service.run()
    finally:
        for number, handler in before:
            signal.signal(number, handler)
        del store


def _serve_frames(
    devices: list[str],
    address: tuple[str, int],
    timeout: float,
    key: Path | None,
    accept: Sequence[tuple[Role, Path]],
    allow_save: Sequence[Path],
    max_model: int | None,
) -> None:
    """Serve trainers with `?protocol=4`: an engine over frames, see serve/owner_session.py."""
    raise_file_limit()
    specs = _durable(devices)
    try_to_open(specs)
    ownership = Ownership(specs, allow_save, max_model)
    owner = SessionOwner(ownership, timeout, _write_line)  # its lines are printable
    stopping, woken, reloads = threading.Event(), threading.Event(), threading.Event()
    listener = Listener(address, key=key, accept=accept, on_session=owner.serve, log=_print_line, timeout=timeout)

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
        _print_line(f"1 optimizer rank with {', '.join(map(str, specs))}, at {shown}")
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


def _meet(host: str, port: int, ranks: Ranks | None) -> tuple[str, int, Any]:
    """Start owner 0's rendezvous store. Returns the host and port where it is reached, and on owner 0 the store."""
    store: Any = None
    with all_ranks_or_none(ranks):
        if ranks is None or ranks.rank == 0:
            try:
                store, port = listen(host, port)
            except OSError as e:
                raise CSDOSError(e.errno, f"cannot listen on {host or '*'}:{port}: {e.strerror}") from e
    reach = host
    if is_wildcard(host):
        reach = os.environ.get("MASTER_ADDR", "127.0.0.1") if ranks else "127.0.0.1"
    if ranks:
        reach, port = ranks.gather_objects((reach, port))[0]
    return reach, port, store


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

"""What trainers and owners send each other: messages of JSON and blocks of tensors, over a gloo group of their own.

Owner 0 has a TCPStore at the address that trainers know. Trainers ask there for a *session*; once it is granted, all
trainers and all owners join one process group, trainers first. Nothing that is received is ever unpickled.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import socket
import struct
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, urlsplit

import torch
from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore  # type: ignore[attr-defined]

from ..errors import CSDError, CSDRankError, CSDUnavailableError, CSDValueError

SCHEME = "serve://"
PROTOCOL = 3  # of what is said below, in owner.py and flow.py: both sides have the same
MAGIC = 0x6373645F73657276  # begins each message
HEAD = struct.Struct("=3q")  # MAGIC, number of the session, bytes of JSON that follow
# What travels, each apart: none is ever taken for another, and nobody sends the last one.
MESSAGE, BULK, NOTHING = 0, 1, 2
PUSH, PUSHED = 3, 4  # the same of gradients that leave before the step: see arrivals.py
# Connections between two processes: of messages, and of tensors each way. gloo sends a tensor when it is told that
# there is room for it, which on one connection would wait behind all tensors that go the other way.
CONNECTIONS = 3
SHORT_BYTES = 16 << 10  # of a message with its head that goes at once: the rest of a longer one follows
MESSAGE_BYTES = 64 << 20  # of JSON at most
USER_STATE_BYTES = MESSAGE_BYTES // 2  # of all trainers: a message has other things to say, too
REQUEST_BYTES = 7 << 20  # the same of a request: a TCPStore takes 8 MiB
DEFAULT_TIMEOUT = 600.0  # seconds that the other side may be silent within a step
CONNECT_TIMEOUT = 60.0  # to reach owner 0
LAST_WORDS = 2.0  # to hear why a session is over
JOIN_TIMEOUT = 60.0  # seconds to connect to each other when all are known to be there
# A trainer computes as long as it likes, and an owner reads as much as it has. If the other side's machine vanishes
# without a word, what waits for it is given up by the next session; a thread of it may stay so long.
PATIENCE = 24 * 3600.0
LOOK = 0.05  # seconds between looks at the store

ROUTES = ("kept", "slices", "star", "auto")  # of gradients: see docs/optimizer-ranks.md

COUNTER = "sessions"  # how many were asked for


def request_key(session: int) -> str:
    return f"request/{session}"


def answer_key(session: int) -> str:
    return f"answer/{session}"


def ready_key(session: int, trainer: int) -> str:
    return f"ready/{session}/{trainer}"


def saved_key(session: int, snapshot: int, owner: int) -> str:
    return f"saved/{session}/{snapshot}/{owner}"


class Address(NamedTuple):
    """Where owners are, as a device string says it."""

    text: str
    host: str
    port: int
    timeout: float  # seconds
    route: str  # one of ROUTES; what takes the hook has it only once that is registered

    def __str__(self) -> str:
        return self.text


def parse_address(text: str) -> Address:
    """`serve://host:port` or `serve://host:port?timeout=60&route=star`. Raises CSDValueError."""
    try:
        parts = urlsplit(text)
        host, port = parts.hostname, parts.port
        options = dict(parse_qsl(parts.query, keep_blank_values=True))
        timeout = float(options.pop("timeout", DEFAULT_TIMEOUT))
        route = options.pop("route", "auto")
    except ValueError as e:
        raise CSDValueError(f"Invalid device: {text!r}; {e}") from None
    if not host or not port or parts.path or parts.username or parts.fragment:
        raise CSDValueError(f"Invalid device: {text!r}; write serve://host:port")
    if options:
        raise CSDValueError(
            f"Invalid device: {text!r}; unknown option {next(iter(options))!r}, there are timeout and route"
        )
    if route not in ROUTES:
        raise CSDValueError(f"Invalid device: {text!r}; there is no route {route!r}, but {', '.join(ROUTES)}")
    if not 0.1 <= timeout <= PATIENCE:
        raise CSDValueError(f"Invalid device: {text!r}; timeout is a number of seconds from 0.1 to {PATIENCE:.0f}")
    return Address(text, host, port, timeout, route)


def connect(host: str, port: int, timeout: float) -> TCPStore:
    """A client of the store at an address. Raises CSDUnavailableError."""
    try:
        return TCPStore(host, port, is_master=False, timeout=timedelta(seconds=timeout))
    except RuntimeError as e:  # torch's DistError
        raise CSDUnavailableError(
            111, f"no optimizer ranks answer at {host}:{port}: is `csd-optim serve` running there? ({_first_line(e)})"
        ) from e


def listen(host: str, port: int) -> tuple[TCPStore, int]:
    """The store of owner 0, and its port; `port` 0: any that is free. Raises OSError."""
    # The store would listen on all addresses of the machine.
    host = "" if is_wildcard(host) else host
    sock = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    port = sock.getsockname()[1]
    fd = sock.detach()
    return TCPStore(host or "127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=fd), port


def gloo_group(store: Any, name: str, rank: int, size: int, host: str, timeout: float) -> Any:
    """A process group that is nobody's default. `host`: the address of this machine to use, "" for gloo's own choice.

    Raises CSDRankError if the others do not come.
    """
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = timedelta(seconds=timeout)
    make = ProcessGroupGloo.create_default_device
    if host:
        make = functools.partial(ProcessGroupGloo.create_device, hostname=host)
    # One for each: those that share one cannot connect with TORCH_GLOO_LAZY_INIT=1.
    options._devices = [make() for _ in range(CONNECTIONS)]  # type: ignore[attr-defined]
    store.set_timeout(timedelta(seconds=JOIN_TIMEOUT))
    with lost("trainers and optimizer ranks do not reach each other (is GLOO_SOCKET_IFNAME their network?)"):
        return ProcessGroupGloo(PrefixStore(name, store), rank, size, options)


def is_here(host: str) -> bool:
    """Is this an address of this machine?"""
    try:
        socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET).close()
    except OSError:
        return False
    return True


def is_wildcard(host: str) -> bool:
    """Does this name all addresses of the machine?"""
    return host in ("", "0.0.0.0", "::", "*")


def is_loopback(host: str) -> bool:
    return host == "localhost" or host == "::1" or host.startswith("127.")


class Lost(CSDRankError):
    """The other side is gone, or silent; whoever else knows why, knows more."""


class Session:
    """One of the processes of a session: trainers are ranks 0 to `trainers` - 1, owners follow."""

    def __init__(self, group: Any, number: int, trainers: int, owners: int, timeout: float) -> None:
        self._group = group
        self._is_owner: bool = group.rank() >= trainers
        self._under_way: dict[int, tuple[Any, torch.Tensor]] = {}  # memory that gloo may use: until wait() has returned
        self.number: int = number
        self.trainers: int = trainers
        self.owners: int = owners
        self.timeout: float = timeout

    def close(self) -> None:
        """Ends the connections, as soon as nothing waits for them; whoever still holds this object."""
        self._group = None
        self._under_way.clear()  # which would keep them open

    def owner(self, k: int) -> int:
        return self.trainers + k

    @property
    def _open(self) -> Any:
        if self._group is None:
            raise Lost(f"session {self.number} is over")
        return self._group

    def send(self, tensor: torch.Tensor, to: int, tag: int = BULK) -> Any:
        """Begins to send a dense CPU tensor (uint8, 1-D), to be left as it is until wait() has returned."""
        with lost(f"rank {to} is gone"):
            return self._begun(self._open.send([tensor], to, _tag(tag, self._is_owner)), tensor)

    def receive(self, tensor: torch.Tensor, source: int, tag: int = BULK) -> Any:
        with lost(f"rank {source} is gone"):
            return self._begun(self._open.recv([tensor], source, _tag(tag, not self._is_owner)), tensor)

    def _begun(self, work: Any, tensor: torch.Tensor) -> Any:
        self._under_way[id(work)] = work, tensor
        return work

    def wait(self, work: Any, timeout: float | None = None) -> None:
        """Raises CSDRankError if the other side is gone, or silent for so many seconds."""
        with lost("the other side is gone"):
            work.wait(timedelta(seconds=self.timeout if timeout is None else timeout))
        self._under_way.pop(id(work), None)

    def abort(self) -> None:
        """Of a trainer: ends the connections whoever waits for them, and so the session. The others notice at once."""
        group, self._group = self._group, None
        if group is None:
            return
        # gloo has one way: whoever waits too long closes all of the connections that are numbered so.
        for k, connection in itertools.product(range(self.owners), range(CONNECTIONS)):
            with contextlib.suppress(RuntimeError):
                nothing = group.recv([torch.empty(1)], self.owner(k), CONNECTIONS * NOTHING + connection)
                nothing.wait(timedelta(milliseconds=1))

    def say(self, message: dict[str, Any], *to: int, timeout: float | None = None, tag: int = MESSAGE) -> None:
        """Sends a message, and waits until it is heard. Raises CSDValueError if it is too long."""
        for work in self.begin_saying(message, *to, tag=tag):
            self.wait(work, timeout)

    def begin_saying(self, message: dict[str, Any], *to: int, tag: int = MESSAGE) -> list[Any]:
        """The same without waiting, which is to follow."""
        data = json.dumps(message).encode()
        if len(data) > MESSAGE_BYTES:
            raise CSDValueError(
                f"a message to the optimizer ranks has {len(data)} bytes; {MESSAGE_BYTES} are the limit"
            )
        data = HEAD.pack(MAGIC, self.number, len(data)) + data
        pieces = torch.frombuffer(bytearray(data), dtype=torch.uint8).tensor_split([SHORT_BYTES])
        return [self.send(piece, rank, tag) for rank in to for piece in pieces if len(piece)]

    def hear(self, source: int, timeout: float | None = None, tag: int = MESSAGE) -> dict[str, Any]:
        """The next message of a rank. Raises CSDRankError also if it is none of this session."""
        piece = torch.zeros(SHORT_BYTES, dtype=torch.uint8, device="cpu")
        self.wait(self.receive(piece, source, tag), timeout)  # gloo takes less than there is room for
        magic, session, n = HEAD.unpack_from(piece.numpy().data)
        if magic != MAGIC or session != self.number or not 0 < n <= MESSAGE_BYTES:
            raise CSDRankError(f"rank {source} of session {self.number} has sent what is no message")
        data = piece.numpy().tobytes()[HEAD.size :][:n]
        if len(data) < n:
            rest = torch.empty(n - len(data), dtype=torch.uint8, device="cpu")
            self.wait(self.receive(rest, source, tag))
            data += rest.numpy().tobytes()
        return parse(data)


def parse(data: bytes) -> dict[str, Any]:
    """A message. Raises CSDRankError if it is none."""
    try:
        message = json.loads(data)
    except (ValueError, RecursionError) as e:
        raise CSDRankError(f"what was received is no JSON: {e}") from None
    if not isinstance(message, dict):
        raise CSDRankError("what was received is no message")
    return message


def _tag(kind: int, from_owner: bool) -> int:
    """gloo's, of a kind of what travels: divided by the number of connections it leaves that of the connection."""
    return CONNECTIONS * kind + (0 if kind in (MESSAGE, PUSH) else 1 + from_owner)


@contextlib.contextmanager
def lost(what: str) -> Iterator[None]:
    """torch's errors of a store or a group become Lost: `what` is gone. Others pass."""
    try:
        yield
    except RuntimeError as e:
        if isinstance(e, CSDError):
            raise
        raise Lost(f"{what}: {_first_line(e)}") from e


def _first_line(e: BaseException) -> str:
    """torch appends where in its own code that was."""
    text = str(e).partition("\n")[0].partition(" Exception raised from")[0]
    return text.partition(". This is typically")[0][:300]

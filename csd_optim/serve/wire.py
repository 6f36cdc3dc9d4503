"""The transport between trainers and owners: JSON messages and blocks of tensors over a gloo process group.

Owner 0 hosts a TCPStore at the address that trainers know. Trainers request a *session* there. Once it is granted, all
trainers and all owners join one process group; the trainers have the first ranks. Received data is never unpickled.
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

from .. import settings
from ..errors import CSDError, CSDRankError, CSDUnavailableError, CSDValueError

SCHEME = "serve://"
PROTOCOL = 4  # version of the messages in this file, owner.py and flow.py: must be the same on both sides
MAGIC = 0x6373645F73657276  # begins each message
HEADER = struct.Struct("=3q")  # MAGIC, session number, length of the JSON that follows (bytes)
# Kinds of traffic. Each has a tag of its own, so that one is never received as another. NOTHING is never sent.
MESSAGE, BULK, NOTHING = 0, 1, 2
PUSH, PUSHED = 3, 4  # messages and tensors of gradients that leave before the step: see arrivals.py
# Connections between two processes: one for messages, one for tensors in each direction. gloo sends a tensor only after
# the receiver has announced a buffer. On a shared connection that announcement would queue behind all tensors that
# travel the other way.
CONNECTIONS = 3
SHORT_BYTES = 16 << 10  # size of a message's first piece, header included; a longer message has a second piece
MESSAGE_BYTES = 64 << 20  # maximum length of the JSON
USER_STATE_BYTES = MESSAGE_BYTES // 2  # maximum for all trainers together: a message contains other fields, too
REQUEST_BYTES = 7 << 20  # maximum length of a request: a TCPStore value is limited to 8 MiB
DEFAULT_TIMEOUT = 600.0  # seconds that the other side may be silent within a step
CONNECT_TIMEOUT = 60.0  # seconds to reach owner 0
REASON_TIMEOUT = 2.0  # seconds to wait for the reason why a session is over
END_TIMEOUT = 10.0  # seconds for a thread to end once its session was aborted; it takes milliseconds
JOIN_TIMEOUT = 60.0  # seconds to form the process group once all members are known to be running
# Timeout in seconds where no limit makes sense: a trainer may compute, and an owner may read its store, for any length
# of time. If the other side's machine vanishes silently, the next session supersedes this one; a thread that still
# waits may stay this long.
LONG_TIMEOUT = 24 * 3600.0
POLL_SECONDS = 0.05  # seconds between polls of the store

ROUTES = ("kept", "slices", "star", "auto")  # how gradients reach the owners: see docs/optimizer-ranks.md

COUNTER = "sessions"  # store key: number of sessions requested so far


def request_key(session: int) -> str:
    return f"request/{session}"


def answer_key(session: int) -> str:
    return f"answer/{session}"


def ready_key(session: int, trainer: int) -> str:
    return f"ready/{session}/{trainer}"


def saved_key(session: int, snapshot: int, owner: int) -> str:
    return f"saved/{session}/{snapshot}/{owner}"


class Address(NamedTuple):
    """The address of the owners, parsed from a device string."""

    text: str
    host: str
    port: int
    timeout: float  # seconds
    route: str  # one of ROUTES; those that need DDP's communication hook take effect once it is registered
    protocol: int  # 4: an engine over frames, see remote_engine.py
    key: str | None  # with protocol 4: the trainer's key file; None: see keys.resolve()
    owner: str | None  # and the owner's fingerprint

    def __str__(self) -> str:
        return self.text


def parse_address(text: str) -> Address:
    """Parse `serve://host:port` or `serve://host:port?timeout=60&route=star`. Raises CSDValueError."""
    try:
        parts = urlsplit(text)
        host, port = parts.hostname, parts.port
        options = dict(parse_qsl(parts.query, keep_blank_values=True))
        timeout = float(options.pop("timeout", DEFAULT_TIMEOUT))
        route = options.pop("route", "auto")
        protocol = options.pop("protocol", "3")
        key, owner = (options.pop(name, None) if protocol == "4" else None for name in ("key", "owner"))
    except ValueError as e:
        raise CSDValueError(f"Invalid device: {text!r}; {e}") from None
    if not host or not port or parts.path or parts.username or parts.fragment:
        raise CSDValueError(f"Invalid device: {text!r}; write serve://host:port")
    if options:
        raise CSDValueError(
            f"Invalid device: {text!r}; unknown option {next(iter(options))!r}, the options are timeout and route"
        )
    if route not in ROUTES:
        raise CSDValueError(f"Invalid device: {text!r}; unknown route {route!r}, the routes are {', '.join(ROUTES)}")
    if not 0.1 <= timeout <= LONG_TIMEOUT:
        raise CSDValueError(f"Invalid device: {text!r}; timeout is a number of seconds from 0.1 to {LONG_TIMEOUT:.0f}")
    if protocol not in ("3", "4"):
        raise CSDValueError(f"Invalid device: {text!r}; the protocols are 3 and 4")
    if protocol == "3" and settings.key() is not None:
        raise CSDValueError(
            "CSD_OPTIM_KEY is set, but serve:// goes without keys and encryption: unset it to use serve://"
        )
    return Address(text, host, port, timeout, route, int(protocol), key, owner)


def connect(host: str, port: int, timeout: float) -> TCPStore:
    """Connect to the TCPStore at this address, as a client; `timeout` in seconds. Raises CSDUnavailableError."""
    try:
        return TCPStore(host, port, is_master=False, timeout=timedelta(seconds=timeout))
    except RuntimeError as e:  # torch's DistError
        raise CSDUnavailableError(
            111, f"no optimizer ranks answer at {host}:{port}: is `csd-optim serve` running there? ({_first_line(e)})"
        ) from e


def listen(host: str, port: int) -> tuple[TCPStore, int]:
    """Create owner 0's TCPStore. Returns it and its port; `port` 0 picks any free one. Raises OSError."""
    # The socket is made here because a TCPStore on its own would listen on all addresses of the machine.
    host = "" if is_wildcard(host) else host
    sock = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    port = sock.getsockname()[1]
    fd = sock.detach()
    return TCPStore(host or "127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=fd), port


def gloo_group(store: Any, name: str, rank: int, size: int, host: str, timeout: float) -> Any:
    """Create a gloo process group apart from the default one.

    `host`: the address of this machine to use, "" for gloo's own choice. Raises CSDRankError if a member does not join.
    """
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = timedelta(seconds=timeout)
    make = ProcessGroupGloo.create_default_device
    if host:
        make = functools.partial(ProcessGroupGloo.create_device, hostname=host)
    # With TORCH_GLOO_LAZY_INIT=1, gloo confuses connections that share a device, so each has its own.
    options._devices = [make() for _ in range(CONNECTIONS)]  # type: ignore[attr-defined]
    store.set_timeout(timedelta(seconds=JOIN_TIMEOUT))
    with lost("trainers and optimizer ranks cannot reach each other (does GLOO_SOCKET_IFNAME name their network?)"):
        return ProcessGroupGloo(PrefixStore(name, store), rank, size, options)


def is_local_address(host: str) -> bool:
    """Return whether this is an address of this machine."""
    try:
        socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET).close()
    except OSError:
        return False
    return True


def is_wildcard(host: str) -> bool:
    """Return whether this stands for all addresses of the machine."""
    return host in ("", "0.0.0.0", "::", "*")


def is_loopback(host: str) -> bool:
    return host == "localhost" or host == "::1" or host.startswith("127.")


class Lost(CSDRankError):
    """The other side is gone or silent. Any other error of the same session explains more, and takes precedence."""


class Session:
    """This process's end of a session. Trainers are ranks 0 to `trainers` - 1 of its process group, owners follow."""

    def __init__(self, group: Any, number: int, trainers: int, owners: int, timeout: float) -> None:
        self._group = group
        self._is_owner: bool = group.rank() >= trainers
        # Transfers that were begun: gloo may use their memory until wait() has returned.
        self._under_way: dict[int, tuple[Any, torch.Tensor]] = {}
        self.number: int = number
        self.trainers: int = trainers
        self.owners: int = owners
        self.timeout: float = timeout

    def close(self) -> None:
        """Close the connections once no thread waits on them, even while references to this object remain."""
        self._group = None
        self._under_way.clear()  # works in flight would keep the connections open

    def owner(self, k: int) -> int:
        return self.trainers + k

    @property
    def _live_group(self) -> Any:
        if self._group is None:
            raise Lost(f"session {self.number} is over")
        return self._group

    def send(self, tensor: torch.Tensor, to: int, tag: int = BULK) -> Any:
        """Begin to send a dense CPU tensor (uint8, 1-D); the caller must not modify it until wait() has returned."""
        with lost(f"rank {to} is gone"):
            return self._track(self._live_group.send([tensor], to, _tag(tag, self._is_owner)), tensor)

    def receive(self, tensor: torch.Tensor, source: int, tag: int = BULK) -> Any:
        with lost(f"rank {source} is gone"):
            return self._track(self._live_group.recv([tensor], source, _tag(tag, not self._is_owner)), tensor)

    def _track(self, work: Any, tensor: torch.Tensor) -> Any:
        self._under_way[id(work)] = work, tensor
        return work

    def wait(self, work: Any, timeout: float | None = None) -> None:
        """Wait for a transfer. Raises CSDRankError if the other side is gone, or silent for `timeout` seconds."""
        with lost("the other side is gone"):
            work.wait(timedelta(seconds=self.timeout if timeout is None else timeout))
        self._under_way.pop(id(work), None)

    def abort(self) -> None:
        """End the session at once from a trainer, even while threads wait on its connections. All members notice."""
        group, self._group = self._group, None
        if group is None:
            return
        # gloo offers one way to do this: a receive that times out closes all connections of the number in its tag.
        for k, connection in itertools.product(range(self.owners), range(CONNECTIONS)):
            with contextlib.suppress(RuntimeError):
                nothing = group.recv([torch.empty(1)], self.owner(k), CONNECTIONS * NOTHING + connection)
                nothing.wait(timedelta(milliseconds=1))

    def send_message(self, message: dict[str, Any], *to: int, timeout: float | None = None, tag: int = MESSAGE) -> None:
        """Send a message, and wait until it is sent. Raises CSDValueError if it is too long."""
        for work in self.begin_send_message(message, *to, tag=tag):
            self.wait(work, timeout)

    def begin_send_message(self, message: dict[str, Any], *to: int, tag: int = MESSAGE) -> list[Any]:
        """Begin to send a message; the caller waits for the returned works. Raises CSDValueError if it is too long."""
        data = json.dumps(message).encode()
        if len(data) > MESSAGE_BYTES:
            raise CSDValueError(
                f"a message to the optimizer ranks has {len(data)} bytes; {MESSAGE_BYTES} are the limit"
            )
        data = HEADER.pack(MAGIC, self.number, len(data)) + data
        pieces = torch.frombuffer(bytearray(data), dtype=torch.uint8).tensor_split([SHORT_BYTES])
        return [self.send(piece, rank, tag) for rank in to for piece in pieces if len(piece)]

    def receive_message(self, source: int, timeout: float | None = None, tag: int = MESSAGE) -> dict[str, Any]:
        """Receive the next message of a rank. Raises CSDRankError, also if the message is not of this session."""
        piece = torch.zeros(SHORT_BYTES, dtype=torch.uint8, device="cpu")
        self.wait(self.receive(piece, source, tag), timeout)  # a gloo receive accepts less than the buffer's size
        magic, session, n = HEADER.unpack_from(piece.numpy().data)
        if magic != MAGIC or session != self.number or not 0 < n <= MESSAGE_BYTES:
            raise CSDRankError(f"rank {source} of session {self.number} has sent something other than a message")
        data = piece.numpy().tobytes()[HEADER.size :][:n]
        if len(data) < n:
            rest = torch.empty(n - len(data), dtype=torch.uint8, device="cpu")
            self.wait(self.receive(rest, source, tag))
            data += rest.numpy().tobytes()
        return parse(data)


def parse(data: bytes) -> dict[str, Any]:
    """Decode a message. Raises CSDRankError if the data is not one."""
    try:
        message = json.loads(data)
    except (ValueError, RecursionError) as e:
        raise CSDRankError(f"received data is no JSON: {e}") from None
    if not isinstance(message, dict):
        raise CSDRankError("received data is no message: it is not a JSON object")
    return message


def _tag(kind: int, from_owner: bool) -> int:
    """Return gloo's tag for a kind of traffic. Modulo CONNECTIONS it is the number of the connection."""
    return CONNECTIONS * kind + (0 if kind in (MESSAGE, PUSH) else 1 + from_owner)


@contextlib.contextmanager
def lost(what: str) -> Iterator[None]:
    """Turn errors of torch's stores and process groups into Lost, with `what` as the text; pass on all others."""
    try:
        yield
    except RuntimeError as e:
        if isinstance(e, CSDError):
            raise
        raise Lost(f"{what}: {_first_line(e)}") from e


def _first_line(e: BaseException) -> str:
    """Return the message of a torch error without the location in torch's own code, at most 300 characters."""
    text = str(e).partition("\n")[0].partition(" Exception raised from")[0]
    return text.partition(". This is typically")[0][:300]

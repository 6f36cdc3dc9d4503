"""Whoever has no accepted key is not let in, whatever is changed or cut on the way; and nothing is left behind."""

import random
import time

import pytest
from support.wires import KINDS, files, meddling, nothing_left, pair

from csd_optim.serve import handshake, listener
from csd_optim.serve.limits import LOG_SECONDS

__all__ = ["files"]

# Bytes of the messages on each connection and direction, without TLS. Connection 1 is the data connection.
CONTROL, DATA = {"sends": 28 + 28, "gets": 12 + 60}, {"sends": 60 + 32, "gets": 64 + 12}
IN_CLEAR = {
    "frames": {0: {"sends": 28, "gets": 12}, 1: DATA},
    "ssl": {0: {"sends": 28, "gets": 12}, 1: {"sends": 28, "gets": 12}},
    "plain": {0: CONTROL, 1: DATA},
    "readers": {0: {"sends": 28, "gets": 12}},
}
IN_TLS = {  # TLS connection 0 is the control connection
    "frames": {0: {"sends": 28, "gets": 60}},
    "ssl": {1: DATA},
    "readers": {0: {"sends": 28, "gets": 12}},  # session and ticket are not used
}


@pytest.fixture(autouse=True)
def short_deadlines(monkeypatch):
    monkeypatch.setattr(handshake, "DEADLINE", 1.0)
    monkeypatch.setattr(listener, "TICK", 0.02)


@pytest.mark.filterwarnings("ignore:data is encrypted by")
@pytest.mark.parametrize("kind", KINDS)
def test_admitted(kind, files):
    with nothing_left(), pair(kind, files) as to:
        for _ in range(3):
            assert to.admitted()
        with meddling() as carried:
            assert to.admitted()
        assert len(carried) == {"frames": 6, "ssl": 8, "plain": 4, "readers": 4}[kind]


def changes(layout, step=1, of_tls=None):
    """All changes of one byte, and cuts before one byte, of these bytes of these connections: plans of Meddler."""
    for connection, sizes in layout.items():
        for direction, size in sizes.items():
            for offset in range(0, size, step):
                for bits in (1 << offset % 8, 0):
                    yield ("tls", connection) if of_tls else connection, direction, offset, bits


def none_admitted(to, plans):
    began, before = time.monotonic(), len(to.owner.lines)
    for plan in plans:
        with meddling(plan):
            assert not to.admitted(), plan
    assert to.admitted()
    refused = [line for line in to.owner.lines[before:] if line.startswith("refused")]
    assert len(refused) <= 1 + (time.monotonic() - began) / LOG_SECONDS


@pytest.mark.filterwarnings("ignore:data is encrypted by")
@pytest.mark.parametrize("kind", KINDS)
def test_every_byte_in_clear(kind, files):
    """Each byte of the messages changed, and each length cut."""
    with nothing_left(), pair(kind, files) as to:
        none_admitted(to, [*changes(IN_CLEAR[kind])])


@pytest.mark.filterwarnings("ignore:data is encrypted by")
@pytest.mark.parametrize(
    ("kind", "step"), [("frames", 1), ("readers", 1), ("ssl", 8), pytest.param("ssl", 1, marks=pytest.mark.ci)]
)
def test_every_byte_within_tls(kind, step, files):
    """Somebody with an accepted key says something else there."""
    with nothing_left(), pair(kind, files) as to:
        none_admitted(to, [*changes(IN_TLS[kind], step, of_tls=True)])


def tls_bytes(kind, files, step, seed):
    """Change every `step`-th byte of TLS itself, message 3 and those within it, and cut there.

    A change of the version in the head of a record in the clear may be without effect: receivers must ignore it.
    """
    with nothing_left(), pair(kind, files) as to:
        with meddling() as carried:
            assert to.admitted()
        generator = random.Random(seed)
        for (connection, direction), data in carried.items():
            clear = IN_CLEAR[kind].get(connection)
            if clear is None or clear[direction] > 28:  # not of TLS
                continue
            heads = heads_of(data[clear[direction] :])
            plans = [
                (connection, direction, clear[direction] + at, bits)
                for at in range(generator.randrange(step), len(data) - clear[direction] - 100, step)
                for bits in (1 << generator.randrange(8), 0)
                if not (bits and at in heads)
            ]
            none_admitted(to, plans)


def heads_of(data):
    """Return where the versions in the heads of TLS records are."""
    at, found = 0, set()
    while at < len(data):
        found |= {at + 1, at + 2}
        at += 5 + int.from_bytes(data[at + 3 : at + 5], "big")
    return found


@pytest.mark.filterwarnings("ignore:data is encrypted by")
@pytest.mark.parametrize("kind", [*IN_TLS])
def test_some_bytes_of_tls(kind, files):
    tls_bytes(kind, files, 97, seed=1)


@pytest.mark.soak
@pytest.mark.filterwarnings("ignore:data is encrypted by")
@pytest.mark.parametrize("kind", [*IN_TLS])
def test_every_byte_of_tls(kind, files):
    tls_bytes(kind, files, 1, seed=2)

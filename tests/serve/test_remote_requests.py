"""Whatever is said to an owner, it answers or ends the session, and goes on."""

import copy
import random

import pytest
import torch
from support.nets import Net
from support.owner_here import OwnerHere
from support.wire_ends import fields_of, hear, say
from support.wires import HELLO, nothing_left, until

from csd_optim import CSDError, CSDRankError, CSDStoreError
from csd_optim.bindings import AS_PUSHED, SAME_ORDER, TO_AND_FRO
from csd_optim.serve.trainer.link import Link
from csd_optim.serve.wire.connection import ConnectionClosed
from csd_optim.serve.wire.dial import connect

STRANGE = (
    None,
    True,
    -1,
    0,
    1,
    2**31,
    2**63,
    2**80,
    0.5,
    1e308,
    "",
    "x",
    "\x1b[2J\n",
    [],
    [0],
    [-1],
    [[]],
    {},
    {"a": 1},
)


@pytest.fixture
def owner(tmp_path):
    with OwnerHere(tmp_path / "owner", timeout=10) as there:
        yield there


def session_with(owner, **changes):
    """Connect, say HELLO with these changes, and return the session; raise if it is refused."""
    session = connect(("127.0.0.1", owner.port), key=None, timeout=10, streams=2)
    say(session.control, {**HELLO, **changes})
    try:
        answer, _ = hear(session.control)
    except ConnectionClosed:
        session.close()
        raise
    if answer["answer"] == "failed":
        session.close()
        raise CSDRankError(answer["text"])
    return session


def ask(session, message, *arrays):
    """Send a request, and return the answer; None: the session has ended."""
    try:
        say(session.control, {"n": 7, **message}, *arrays)
        return hear(session.control)[0]
    except (ConnectionClosed, OSError):
        return None


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"protocol": 3}, "unknown fields"),
        ({"trainers": 2}, "another number of trainers"),
        ({"trainer": 1}, "trainer"),
        ({"mode": "erase"}, "unknown fields or values"),
        ({"store": "0" * 31}, "`$.store`"),
        ({"store": "x" * 32}, "`$.store`"),
        ({"mode": "attach", "store": "0" * 32, "step": 1}, "another store"),
        ({"tile_elems": -1}, "`$.tile_elems`"),
        ({"who": None}, "`$.who`"),
        ({"mode": "new"}, "resume=True"),
        ({"model": "0" * 64}, "another model"),
        ({"op": "begin"}, "unknown fields or values"),
    ],
    ids=str,
)
def test_a_refused_hello_ends_no_session(owner, changes, why):
    net = Net(owner.address).steps(2)
    with pytest.raises(CSDRankError):
        session_with(owner, **changes)
    until(lambda: any(why in line for line in owner.lines))
    net.steps(1)
    assert net.opt.stats()["params"]
    assert net.opt.committed_step >= 0
    net.opt.close()


def test_another_model_is_refused_while_one_trains(owner):
    net = Net(owner.address).steps(2)
    with pytest.raises(CSDStoreError, match="another model"):
        Net(owner.address, torch.bfloat16, resume=True)
    net.step()
    net.opt.close()


def recorded(owner, monkeypatch):
    """Return all requests of a training, with their arrays."""
    requests, real = [], Link._exchange

    def exchange(self, session, request, arrays):
        requests.append((fields_of(request), [bytes(a) for a in arrays]))
        return real(self, session, request, arrays)

    with monkeypatch.context() as patch:
        patch.setattr(Link, "_exchange", exchange)
        net = Net(owner.address, overwrite=True)
        net.opt.state_dict()
        net.steps(2)
        net.opt.state[next(net.model.parameters())]["exp_avg"].mul_(2)
        net.step()
        net.opt.load_state_dict(copy.deepcopy(net.opt.state_dict()))
        net.opt.stats()
        net.opt.synchronize()
        image = net.image()
        net.opt.close()
    return [(m, a) for m, a in requests if m["op"] not in ("hello", "close")], image


def mutated(chance, message, arrays):
    """Return a request with one thing changed."""
    message, arrays = copy.deepcopy(message), [*arrays]
    kind = chance.randrange(4 if arrays else 2)
    if kind == 0:
        message[chance.choice([key for key in message if key != "n"])] = chance.choice(STRANGE)
    elif kind == 1 and len(message) > 2:
        del message[chance.choice([key for key in message if key not in ("op", "n")])]
    elif kind == 2:
        i = chance.randrange(len(arrays))
        data = bytearray(arrays[i] or b"\0")
        for _ in range(chance.randint(1, 4)):
            data[chance.randrange(len(data))] = chance.randrange(256)
        arrays[i] = bytes(data)
    else:
        i = chance.randrange(len(arrays)) if arrays else 0
        arrays[i : i + 1] = chance.choice([[], [b""], [b"\0" * 5], [b"\xff" * 1000], [b"", b""]])
    return message, arrays


def attack(owner, monkeypatch, times, seed):
    requests, image = recorded(owner, monkeypatch)
    chance = random.Random(seed)
    session, answered, ended = None, 0, 0
    for _ in range(times):
        if session is None:
            session = session_with(owner)
        message, arrays = mutated(chance, *chance.choice(requests))
        if chance.random() < 0.1:
            with pytest.MonkeyPatch.context(), suppressed():
                fields = {"tile": chance.choice([0, 1, 10**9]), "begin": chance.choice([1, 7, -1, "x"])}
                say(chance.choice([*session.up, *session.down]), fields, b"abcd")
        if ask(session, message, *arrays) is None:
            session.close()
            session, ended = None, ended + 1
        else:
            answered += 1
    if session:
        session.close()
    assert answered
    assert ended
    return image


class suppressed:
    def __enter__(self):
        return self

    def __exit__(self, kind, *_):
        return kind is not None and issubclass(kind, (CSDError, OSError))


def survive(owner, monkeypatch, times, seed):
    """Attack an owner, then have it erased and trained again: it has the bits of a training that nobody attacks."""
    recorded(owner, monkeypatch)  # the engine, which the owner keeps, has threads
    with nothing_left():
        image = attack(owner, monkeypatch, times, seed)
    requests, again = recorded(owner, monkeypatch)
    assert requests
    assert all(torch.equal(a, b) for a, b in zip(image, again, strict=True))


def test_changed_requests_are_answered_or_end_the_session(owner, monkeypatch):
    survive(owner, monkeypatch, 300, 1)


@pytest.mark.soak
def test_20000_changed_requests(owner, monkeypatch):
    survive(owner, monkeypatch, 20_000, 2)


def test_the_numbers_of_orders_on_the_wire_are_those_of_the_engine():
    assert (TO_AND_FRO, SAME_ORDER, AS_PUSHED) == (0, 1, 2)

"""Requests and frames of a real training in a wrong order: an owner, in a process of its own, outlives them all."""

import copy
import os
import random

import pytest
import torch
from support.nets import Net
from support.owners import Owner
from support.wire_ends import fields_of, hear, say
from support.wires import HELLO

from csd_optim import CSDError
from csd_optim.serve.requests import REQUESTS, TileGradients
from csd_optim.serve.trainer.link import Link
from csd_optim.serve.wire.connection import Connection
from csd_optim.serve.wire.dial import connect

OTHERS = ("confirm", "confirmed", "discard_newer", "wait", "stats", "reserve", "written", "take_back", "saved")


def recorded(owner, monkeypatch):
    """Train, and return what was sent, in its order: requests with their arrays, and frames; and the image."""
    sent, exchange, send = [], Link._exchange, Connection.send

    def exchanges(self, session, request, arrays):
        sent.append((fields_of(request), [bytes(a) for a in arrays]))
        return exchange(self, session, request, arrays)

    def sends(self, message, *views):
        if isinstance(message, TileGradients):
            sent.append((message, [bytes(v) for v in views]))
        return send(self, message, *views)

    with monkeypatch.context() as patch:
        patch.setattr(Link, "_exchange", exchanges)
        patch.setattr(Connection, "send", sends)
        net = Net(owner.address, overwrite=True).steps(2)
        net.opt.state[next(net.model.parameters())]["exp_avg"].mul_(2)
        net.step()
        net.opt.load_state_dict(copy.deepcopy(net.opt.state_dict()))
        net.step()
        image = net.image()
        net.opt.close()
    return [
        item for item in sent if isinstance(item[0], TileGradients) or item[0]["op"] not in ("hello", "close")
    ], image


def disordered(chance, sent):
    """Return a part of what was sent, with some things left out, sent twice, moved, or added."""
    items = sent[: chance.randint(2, len(sent))]
    for _ in range(chance.randint(1, 5)):
        i, j = chance.randrange(len(items)), chance.randrange(len(items))
        kind = chance.randrange(5)
        if kind == 0 and len(items) > 1:
            del items[i]
        elif kind == 1:
            items.insert(j, items[i])
        elif kind == 2:
            items[i], items[j] = items[j], items[i]
        elif kind == 3:
            op = chance.choice(OTHERS)
            fields = {"begin": j, "step": chance.randrange(4), "record_bytes": 100}
            known = {name: value for name, value in fields.items() if name in REQUESTS[op].__struct_fields__}
            items.insert(i, ({"op": op, **known}, []))
        else:
            items[i:] = items[i + chance.randint(1, 4) :] or items[i:]
    return items


def play(owner, trainers, items):
    """Send this in a session of its own, until the owner ends it. Returns the number of requests that were executed."""
    session = connect(("127.0.0.1", owner.port), key=None, timeout=30, streams=2)
    token = os.urandom(16).hex()
    say(session.control, {**HELLO, "mode": "overwrite", "trainers": trainers, "here": trainers, "token": token})
    executed = 0
    try:
        if hear(session.control)[0]["answer"] == "failed":
            return executed
        for item, data in items:
            if isinstance(item, TileGradients):
                session.up[item.tile % 2].send(item, *data)
                continue
            say(session.control, {**item, "n": 7}, *data)
            while (answer := hear(session.control)[0])["answer"] == "working":
                pass
            executed += answer["answer"] != "failed"
    except (CSDError, OSError):
        pass
    finally:
        session.close()
    return executed


def outlive(tmp_path, monkeypatch, times, seed):
    chance, executed = random.Random(seed), 0
    for trainers in (1, 2):
        place = tmp_path / str(trainers)
        place.mkdir()
        with Owner(place, timeout=30) as owner:
            (tmp_path / f"alone-{trainers}").mkdir()
            with Owner(tmp_path / f"alone-{trainers}") as undisturbed:
                sent, image = recorded(undisturbed, monkeypatch)
            for _ in range(times):
                executed += play(owner, trainers, disordered(chance, sent))
                assert owner.pid
            if trainers == 1:
                _, again = recorded(owner, monkeypatch)
                assert all(torch.equal(a, b) for a, b in zip(image, again, strict=True))
            owner.stop()
    assert executed > 5 * times


@pytest.mark.ci
def test_requests_in_a_wrong_order(tmp_path, monkeypatch):
    outlive(tmp_path, monkeypatch, 60, 1)


@pytest.mark.soak
def test_3000_times_in_a_wrong_order(tmp_path, monkeypatch):
    outlive(tmp_path, monkeypatch, 3000, 2)

"""Requests and frames of a real training in a wrong order: an owner, in a process of its own, outlives them all."""

import copy
import os
import random

import pytest
import torch
from support.nets import Net
from support.owners import Owner
from support.wires import HELLO

from csd_optim import CSDError
from csd_optim.serve.dial import connect
from csd_optim.serve.frames import DataConnection, Header
from csd_optim.serve.link import Link

OTHERS = ("confirm", "confirmed", "discard_newer", "wait", "stats", "reserve", "written", "take_back", "saved")


def recorded(owner, monkeypatch):
    """Train, and return what was sent, in its order: requests with their arrays, and frames; and the image."""
    sent, exchange, send = [], Link._exchange, DataConnection.send

    def exchanges(self, session, message, arrays, **how):
        sent.append((copy.deepcopy(message), [bytes(a) for a in arrays]))
        return exchange(self, session, message, arrays, **how)

    def sends(self, header, views):
        sent.append((header, [bytes(v) for v in views]))
        return send(self, header, views)

    with monkeypatch.context() as patch:
        patch.setattr(Link, "_exchange", exchanges)
        patch.setattr(DataConnection, "send", sends)
        net = Net(owner.address, overwrite=True).steps(2)
        net.opt.state[next(net.model.parameters())]["exp_avg"].mul_(2)
        net.step()
        net.opt.load_state_dict(copy.deepcopy(net.opt.state_dict()))
        net.step()
        image = net.image()
        net.opt.close()
    return [item for item in sent if isinstance(item[0], Header) or item[0]["op"] not in ("hello", "close")], image


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
            items.insert(i, ({"op": op, "begin": j, "step": chance.randrange(4), "record_bytes": 100, "n": 7}, []))
        else:
            items[i:] = items[i + chance.randint(1, 4) :] or items[i:]
    return items


def play(owner, trainers, items):
    """Send this in a session of its own, until the owner ends it. Returns the number of requests that were executed."""
    session = connect(("127.0.0.1", owner.port), key=None, timeout=30, streams=2)
    token = os.urandom(16).hex()
    session.control.send({**HELLO, "mode": "overwrite", "trainers": trainers, "here": trainers, "token": token})
    executed = 0
    try:
        if "error" in session.control.receive(30)[0]:
            return executed
        for item, data in items:
            if isinstance(item, Header):
                session.data[item.tile % 2].send(item, data)
                continue
            session.control.send({"n": 7, **item}, *data)
            while "working" in (answer := session.control.receive(30)[0]):
                pass
            executed += "error" not in answer
    except CSDError:
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

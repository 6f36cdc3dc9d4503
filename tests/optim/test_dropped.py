"""An optimizer that is dropped, garbage-collected or has failed commits what it can and leaves nothing behind."""

import subprocess
import sys

import numpy as np
import pytest
import torch
from support.backends import named_devices, place
from support.forked import python
from support.training import (
    bf16,
    parameters,
    train,
)

from csd_optim import (
    CSDAdam,
)
from csd_optim.bindings import Native
from csd_optim.engine.engine import Engine
from csd_optim.engine.states import States
from csd_optim.store.format import CLEAN, FILE_NAME, read_contents

pytestmark = pytest.mark.cards


# ---- optimizers that are dropped -----------------------------------------------------------

CYCLES = """
import faulthandler, sys, threading, torch, warnings
from csd_optim import CSDAdam
faulthandler.dump_traceback_later(40, exit=True)
warnings.simplefilter("ignore")
def work(k):
    for i in range(12):
        p = torch.nn.Parameter(torch.ones(3000))
        opt = CSDAdam([p], devices=f"{sys.argv[1]}/{k}.{i}", tile_size=1024)
        opt.cycle = [opt, torch.optim.lr_scheduler.ConstantLR(opt)]
        for _ in range(3):
            p.grad = torch.ones(3000)
            opt.step()
            junk = [[] for _ in range(300)]
threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
import gc; gc.set_threshold(200)
[t.start() for t in threads]; [t.join() for t in threads]
"""


def test_many_dropped_in_cycles_while_others_step(tmp_path):
    process = python(CYCLES, tmp_path)
    assert process.returncode == 0, process.stderr
    for store in tmp_path.glob("*/" + FILE_NAME):
        block = read_contents(store).superblock
        assert block.step == 3
        assert block.flags & CLEAN
    assert len([*tmp_path.glob("*/" + FILE_NAME)]) == 48


COLLECTED = """
import faulthandler, gc, sys, torch
import torch._dynamo  # as the first optimizer would, which takes long on a busy machine
import csd_optim.finalize, csd_optim.engine.commit
from csd_optim import CSDAdam
faulthandler.dump_traceback_later(40, exit=True)
gc.disable()
def collecting(*arguments, plain=csd_optim.engine.commit.commit.pack_table):
    gc.collect()  # on the thread of the commit, when its optimizer is garbage
    return plain(*arguments)
csd_optim.finalize.CLOSE_SECONDS = 0.2
csd_optim.engine.commit.commit.pack_table = collecting
p = torch.nn.Parameter(torch.ones(3000))
p.grad = torch.ones(3000)
opt = CSDAdam([p], devices=sys.argv[1])
opt.cycle = opt
opt.step()
del opt
"""


@pytest.mark.ci
def test_collected_by_its_own_commit(tmp_path):
    process = subprocess.run(
        [sys.executable, "-c", COLLECTED, str(tmp_path)], capture_output=True, text=True, timeout=300
    )
    assert process.returncode == 0, process.stderr
    assert read_contents(tmp_path).superblock.step == 1


# ---- what failures leave behind ------------------------------------------------------


class Full(Exception):
    pass


def failing(monkeypatch, where, call=0, of=Engine):
    """Makes the engine's method `where` raise once, at its call number `call`, counted from 0."""
    calls = iter(range(1000))
    plain = getattr(of, where)

    def full(*arguments, **named):
        if next(calls) == call:
            raise Full
        return plain(*arguments, **named)

    monkeypatch.setattr(of, where, full)


@pytest.mark.parametrize("what", ["state", "parameter"])
@pytest.mark.parametrize("then", ["close", "steps without its gradient"])
@pytest.mark.fp32_states("what is written to states is rounded to codes")
def test_edits_survive_a_step_that_was_undone(tmp_path, monkeypatch, what, then):
    [device] = named_devices(tmp_path, 1)
    a, b = parameters((3000,), (3000,), dtype=bf16)
    with CSDAdam([a, b], devices=device, tile_size=1024) as opt:
        train(opt, 2)
        if what == "state":
            opt.state[b]["exp_avg"].fill_(7)
        else:
            with torch.no_grad():
                b.fill_(7)
        failing(monkeypatch, "finish")
        with pytest.raises(Full):
            train(opt, only=[a])
        if then != "close" or what == "parameter":  # only a step notices a write to a parameter
            train(opt, 2, only=[a])
    a, b = parameters((3000,), (3000,), dtype=bf16)
    with CSDAdam([a, b], devices=device, resume=True) as opt:
        assert ((b if what == "parameter" else opt.state[b]["exp_avg"]) == 7).all()


@pytest.mark.here("what fails is at the owner")
def test_a_resume_that_fails_half_way(tmp_path, monkeypatch):
    [device] = named_devices(tmp_path, 1)

    def groups():
        a, b = parameters((3000,), (3000,))
        return [{"params": [a]}, {"params": [b], "amsgrad": True}]

    with CSDAdam(groups(), devices=device) as opt:
        train(opt)
    made, closed = [], []
    create, close = Native.open, Native.close
    monkeypatch.setattr(Native, "open", lambda native, *a: create(native, *a) or made.append(native))
    monkeypatch.setattr(Native, "close", lambda native: closed.append(native) or close(native))
    failing(monkeypatch, "add", call=1, of=States)
    with pytest.raises(Full):
        CSDAdam(groups(), devices=device, resume=True)
    assert made == closed
    assert len(made) == 1
    with CSDAdam(groups(), devices=device, resume=True) as opt:
        assert opt.committed_step == 1
    assert made == closed


@pytest.mark.here("what fails is at the owner")
def test_a_join_that_fails_half_way(tmp_path, monkeypatch):
    [device] = named_devices(tmp_path, 1)

    def groups():
        a, b, c = parameters((300,), (2000,), (2000,))
        return [{"params": [a]}, {"params": [b]}, {"params": [c], "amsgrad": True}]

    with CSDAdam(first := groups(), devices=device) as opt:
        train(opt, 2, only=first[0]["params"])
        failing(monkeypatch, "extend", call=1)
        with pytest.raises(Full):
            train(opt)
    with CSDAdam(groups(), devices=device, resume=True) as opt:
        assert opt.committed_step == 2
        train(opt)
    assert read_contents(place(device)).superblock.step == 3


@pytest.mark.parametrize("then", ["close", "save", "load_state_dict"])
def test_a_group_that_joined_after_the_last_step(tmp_path, then):
    [device] = named_devices(tmp_path, 1)
    p, q = parameters((300,), (20,))
    with CSDAdam([p], devices=device) as opt:
        train(opt)
        opt.add_param_group({"params": [q]})
        if then == "save":
            opt.save(tmp_path / "snap")
        elif then == "load_state_dict":
            opt.load_state_dict(opt.state_dict())
    p, q = parameters((300,), (20,))
    known = [{"params": [p]}, {"params": [q]}] if then == "load_state_dict" else [p]
    with CSDAdam(known, devices=device, resume=True) as opt:
        assert opt.committed_step == 1


def test_numbers_of_numpy_are_kept(tmp_path):
    [device] = named_devices(tmp_path, 1)
    with CSDAdam(parameters((30,)), lr=np.float32(0.5), betas=(np.float64(0.5), 0.9), devices=device) as opt:
        train(opt)
        opt.param_groups[0]["lr"] = np.float32(0.25)
        train(opt)
    with CSDAdam(parameters((30,)), lr=0.5, betas=(0.5, 0.9), devices=device, resume=True) as opt:
        assert opt.param_groups[0]["lr"] == 0.25
        assert opt.param_groups[0]["betas"] == (0.5, 0.9)

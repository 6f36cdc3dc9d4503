"""Review of Owner: takeovers. In-process, without ranks."""
import secrets, threading, time, contextlib
from pathlib import Path
import pytest, torch
from support.owner_here import OwnerHere
from csd_optim import CSDAdam, CSDError, CSDRankError
from csd_optim.serve.dial import connect
from csd_optim.serve.link import Link
from csd_optim.serve.messages import Fields


def link(owner, trainer, trainers, token, streams=2, timeout=20):
    dial = lambda: connect(("127.0.0.1", owner.port), key=None, owner=None, timeout=timeout, streams=streams, within=10)
    return Link(dial, {"model": "", "trainer": trainer, "trainers": trainers, "token": token, "who": token, "tile_elems": 1024}, streams, timeout)

ID = "00" * 16

def grow(l, n=3000):
    import numpy as np
    from csd_optim.serve.messages import pack_counts
    l.request("extend", np.array([n], ">u8"), sections=["master", "exp_avg"], codec="fp32", param_dtype="", first_param=0, tile_elems=1024)

def test_another_number_kills(tmp_path):
    with OwnerHere(tmp_path / "o") as owner:
        a = [link(owner, k, 2, "A") for k in range(2)]
        for l in a:
            l.open(mode="new", store=ID)
            grow(l)
        b = link(owner, 2, 3, "B")
        try:
            b.open(mode="new", store=ID)
            print("B2 opened")
        except CSDError as e:
            print("B2", e)
        b0 = link(owner, 0, 3, "B")
        try:
            b0.open(mode="new", store=ID)
            print("B0 opened")
        except CSDError as e:
            print("B0", e)
        for l in a:
            try:
                l.request("stats")
                print("alive")
            except CSDError as e:
                print("A", e)
        print(*owner.lines, sep="\n")
        print(sorted(map(str, (tmp_path / "o").rglob("*"))))
        for l in (*a, b, b0): l.close()
    assert not any("is over" in line for line in owner.lines[:6])

def test_one_then_two(tmp_path):
    with OwnerHere(tmp_path / "o") as owner:
        opt = CSDAdam([torch.zeros(10, requires_grad=True)], devices=owner.address)
        opt.close()
        b = link(owner, 1, 2, "B")
        try:
            b.open(mode="new", store=ID)
            print("B opened")
        except CSDError as e:
            print("B", e)
        try:
            b.open(mode="overwrite", store=ID)
            print("B opened")
        except CSDError as e:
            print("B", e)
        b.close()
    assert any("trainer 1 of 2" in line for line in owner.lines)

def test_stale_hello_ends_newer_session(tmp_path):
    with OwnerHere(tmp_path / "o") as owner:
        choosing, go = threading.Event(), threading.Event()
        results = {}
        def choose(found):
            choosing.set(); go.wait(10)
            return None
        w = link(owner, 0, 2, "W")
        t0 = threading.Thread(target=lambda: results.__setitem__("w", attempt(w, choose)))
        t0.start(); choosing.wait(10)
        def attempt_(): pass
        a, b = link(owner, 0, 2, "A"), link(owner, 0, 2, "B")
        ta = threading.Thread(target=lambda: results.__setitem__("a", attempt(a, None, "new")))
        ta.start(); time.sleep(0.5)
        tb = threading.Thread(target=lambda: results.__setitem__("b", attempt(b, None, "new")))
        tb.start(); time.sleep(0.5)
        go.set()
        for t in (t0, ta, tb): t.join()
        print(results); print(*owner.lines, sep="\n")
        for l in (a, b, w): l.close()
    assert results["b"] == "opened"

def attempt(l, choose, mode="resume"):
    try:
        l.open(choose, mode=mode, store=ID)
        return "opened"
    except CSDError as e:
        return str(e)

def test_sigterm_while_choosing(tmp_path):
    owner = OwnerHere(tmp_path / "o", timeout=8)
    choosing, go = threading.Event(), threading.Event()
    results = {}
    def choose(found):
        choosing.set(); go.wait(30)
        return None
    w = link(owner, 0, 2, "W")
    t0 = threading.Thread(target=lambda: results.__setitem__("w", attempt(w, choose)))
    t0.start(); choosing.wait(10)
    begun = time.monotonic()
    owner.stop()
    assert time.monotonic() - begun < 3
    print("stop took", time.monotonic() - begun)
    go.set(); t0.join(); print(results); print(*owner.lines, sep="\n")
    w.close()


def test_old_training_attaches_while_new_is_granted(tmp_path):
    with OwnerHere(tmp_path / "o") as owner:
        a = link(owner, 0, 2, "A"); a.open(mode="new", store=ID)
        choosing, go, results = threading.Event(), threading.Event(), {}
        def choose(found):
            choosing.set(); go.wait(10)
            return None
        b = link(owner, 0, 2, "B")
        tb = threading.Thread(target=lambda: results.__setitem__("b", attempt(b, choose)))
        tb.start(); choosing.wait(10)
        a.reattach = (lambda: {"store": ID, "step": 0}), (lambda answer: None)
        def again():
            for _ in range(2):
                try:
                    a.request("stats"); results["a"] = "goes on"; break
                except CSDError as e:
                    results["a"] = str(e)
        ta = threading.Thread(target=again); ta.start(); time.sleep(1)
        go.set(); tb.join(); ta.join()
        print(results); print(*owner.lines, sep="\n")
        a.close(); b.close()
    assert results["b"] == "opened" and "another session" in results["a"]


"""Optimizers shut down cleanly: closed, garbage-collected, forked, at interpreter exit, after a failed constructor."""

import contextlib
import gc
import os

import pytest
import torch
from support.backends import TILE
from support.beside import (
    assert_close,
    gradients,
    leaf,
    run_script,
)

from csd_optim import CSDAdam, CSDError, CSDRuntimeError

OWN_OPTIONS = {"devices", "grad_dtype", "max_grad_norm", "overwrite", "tile_size"}


def test_a_closed_optimizer_says_so(devices):
    p = leaf(3)
    with CSDAdam([p], devices=devices) as optimizer:
        p.grad = torch.ones_like(p)
        optimizer.step()
    optimizer.close()  # idempotent
    before = p.detach().clone()
    for use in (optimizer.step, optimizer.stats):
        with pytest.raises(CSDRuntimeError, match="closed"):
            use()
    assert torch.equal(p.detach(), before)
    assert "closed" in repr(optimizer)


@pytest.mark.fp32_states("only fp32 states are mapped")
def test_a_tensor_of_the_state_outlives_the_optimizer(devices):
    p = leaf(TILE + 1)
    optimizer = CSDAdam([p], devices=devices)
    gradients([p], 0)
    optimizer.step()
    exp_avg = optimizer.state[p]["exp_avg"]
    expected = 0.1 * p.grad
    optimizer.close()
    del optimizer
    gc.collect()
    assert_close(exp_avg, expected)


def test_a_program_that_forks_and_drops(tmp_path):
    """Children get an error, also as they leave loading(), and touch no device. The parent goes on, all exit cleanly,
    and optimizers that are dropped, or left to the end of the interpreter, print nothing.
    """
    script = """
        import os, sys, torch, warnings
        from csd_optim import CSDAdam
        warnings.simplefilter("ignore", DeprecationWarning)  # from Python 3.12 on, of a fork beside threads

        def stepped(devices):
            p = torch.ones(10000, requires_grad=True)
            optimizer = CSDAdam([p], devices=devices)
            p.grad = torch.ones_like(p)
            optimizer.step()
            return p, optimizer

        p, optimizer = stepped(sys.argv[1])
        try:
            with optimizer.loading():
                optimizer.state[p]["exp_avg"].fill_(1)
                child = os.fork()
        except RuntimeError as e:
            print("child in loading:", e, flush=True)
        if not child:
            sys.exit()
        _, status = os.waitpid(child, 0)
        print("parent in loading:", status, optimizer.state[p]["exp_avg"][0].item())
        optimizer.close()

        those = [stepped(devices) for devices in ["ram:", "file:", [sys.argv[2], "file:"]]]
        sys.stdout.flush()
        child = os.fork()
        if not child:
            for _, optimizer in those:
                try:
                    optimizer.step()
                except RuntimeError as e:
                    print("child:", e, flush=True)
            sys.exit()
        _, status = os.waitpid(child, 0)
        for _, optimizer in those:
            optimizer.step()
        print("parent:", status, [optimizer.state[p]["step"].item() for p, optimizer in those])
        del those, optimizer

        kept = []
        for k, devices in enumerate([None, "ram:", ["ram:", "file:"], sys.argv[1], sys.argv[2]]):
            p = torch.ones(10000, requires_grad=True)
            optimizer = CSDAdam([p], devices=devices, overwrite=True)
            p.grad = torch.ones_like(p)
            optimizer.step()
            if k % 2:
                kept.append(optimizer)  # until the interpreter ends
            del optimizer
        try:
            CSDAdam([p], lr=-1)
        except ValueError:
            pass
    """
    out, err = run_script(script, tmp_path / "a", tmp_path / "b")
    in_loading, parent_in_loading, *children, parent = out.splitlines()
    assert in_loading.startswith("child in loading: this optimizer belongs to process")
    assert parent_in_loading == "parent in loading: 0 1.0"
    assert len(children) == 3
    assert all(line.startswith("child: this optimizer belongs to process") for line in children)
    assert parent == "parent: 0 [2.0, 2.0, 2.0]"
    assert err == ""
    assert {path.name for path in tmp_path.iterdir()} == {"a", "b"}  # scratch stores leave nothing


def test_every_error_of_ours_is_a_csd_error():
    for make in (lambda: CSDAdam([leaf(2)], devices="tape:"), lambda: CSDAdam([leaf(2, dtype=torch.float64)])):
        with pytest.raises(CSDError):
            make()


def test_a_failed_constructor_leaves_no_store(tmp_path):
    with contextlib.suppress(ValueError):
        CSDAdam([leaf(2)], devices=[str(tmp_path / "a"), str(tmp_path / "b")], lr=-1)
    assert os.listdir(tmp_path) == []

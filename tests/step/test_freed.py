"""What a step has used is free as soon as the program drops it, also between steps."""

import pytest
import torch
from support.ranks import on_ranks
from torch.multiprocessing.reductions import StorageWeakRef

from csd_optim import CSDAdam, CSDMuon
from csd_optim.step import two_passes


def assert_gradients_are_freed(kind, **options):
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 64, bias=False)
    with kind(model.parameters(), lr=1e-3, devices="ram:", **options) as opt:
        for _ in range(3):
            model(torch.ones(1, 64)).sum().backward()
            grads = [StorageWeakRef(p.grad.untyped_storage()) for p in model.parameters()]
            opt.step()
            opt.zero_grad()
            assert all(ref.expired() for ref in grads)


@pytest.mark.parametrize("kind", [CSDAdam, CSDMuon])
def test_gradients_are_freed_by_zero_grad(kind):
    assert_gradients_are_freed(kind)


def on_a_rank(_):
    assert_gradients_are_freed(CSDAdam)


def test_gradients_on_ranks_are_freed_by_zero_grad(tmp_path):
    on_ranks(2, on_a_rank, directory=tmp_path)


def test_matrices_of_the_last_step_are_freed(monkeypatch):
    seen, make = [], two_passes.TwoPasses._with_buffers

    def noting(*arguments):
        params = make(*arguments)
        seen.append([StorageWeakRef(p.x.untyped_storage()) for p in params.values()])
        return params

    monkeypatch.setattr(two_passes.TwoPasses, "_with_buffers", noting)
    model = torch.nn.Linear(64, 64, bias=False)
    with CSDMuon(model.parameters(), lr=1e-3, devices="ram:") as opt:
        model(torch.ones(1, 64)).sum().backward()
        opt.step()
        assert all(ref.expired() for ref in seen[0])

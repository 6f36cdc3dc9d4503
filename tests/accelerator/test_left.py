"""Parameters that leave the optimizer free the accelerator's memory: their states, or the copies of these."""

import gc
import weakref

import pytest
import torch
from support.comparing import assert_same
from support.on_accelerator import DEVICE
from support.training import give_gradients, parameters

from csd_optim import CSDAdam

pytestmark = pytest.mark.accelerator

DEVICES = [["gpu:"], ["gpu:?room=1GB", "file:"], ["gpu:?room=1GB", "named"]]


def on_accelerator(*shapes):
    return [torch.nn.Parameter(p.detach().to(DEVICE)) for p in parameters(*shapes)]


def gives_gradients(opt, step):
    params = [p for group in opt.param_groups for p in group["params"]]
    on_host = [torch.nn.Parameter(torch.zeros(p.shape)) for p in params]
    give_gradients(on_host, step)
    for p, host in zip(params, on_host, strict=True):
        p.grad = host.grad.to(DEVICE)


@pytest.mark.parametrize("devices", DEVICES, ids=str)
def test_memory_of_the_accelerator_is_freed(tmp_path, devices):
    devices = [str(tmp_path) if name == "named" else name for name in devices]
    opt = CSDAdam([{"params": on_accelerator((3000,))}, {"params": on_accelerator((5000,))}], devices=devices)
    sizes, old, kept = [], [], opt.param_groups[1]["params"][0]
    for step in range(6):
        gives_gradients(opt, step)
        opt.step()
        opt.synchronize()
        gc.collect()
        sizes.append(opt.stats()["devices"][0]["state_bytes"])
        assert [ref() for ref in old] == [None] * len(old)
        [p] = opt.param_groups.pop(0)["params"]
        entry = opt.state.pop(p)
        old = [weakref.ref(t) for t in (p, *entry.values()) if t.numel() > 1]
        opt.param_groups.insert(0, {**opt.param_groups[0], "params": on_accelerator((3000,))})
        p.grad = None
        del p, entry
    assert sizes[0] > 0
    assert sizes == [sizes[0]] * 6
    assert opt.state[kept]["step"] == 6
    opt.close()


def test_the_others_are_updated_as_if_alone():
    def others(leaving):
        torch.manual_seed(0)
        params = on_accelerator((3000,), (400,), (5000,))
        opt = CSDAdam([{"params": [p]} for p in params], devices=["gpu:", "file:"], lr=0.1)
        for step in range(4):
            if step == 2 and leaving:
                del opt.state[params[1]], opt.param_groups[1]
            for k, p in enumerate(params):
                p.grad = torch.full_like(p, step - k)
            opt.step()
        found = [t.detach().cpu().clone() for p in (params[0], params[2]) for t in (p, *opt.state[p].values())]
        opt.close()
        return found

    assert_same(others(True), others(False))

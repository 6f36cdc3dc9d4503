"""Gaussian splatting on an accelerator: moments that go to new parameters from wherever they are, as in the recipe."""

import pytest
import torch
from support.on_accelerator import DEVICE, GPU, SCRATCH

from csd_optim import CSDAdamL2

pytestmark = pytest.mark.accelerator
KEEP = torch.arange(40) % 3 != 0


WAYS = {  # before these steps: the new parameter from the old one, and a moment from the old one and the new parameter
    2: (lambda p: p[KEEP.to(p.device)], lambda m, new: m[KEEP.to(m.device)]),  # prune_optimizer
    4: (lambda p: torch.cat((p, 2 * p[:9])), lambda m, new: torch.cat((m, m.new_zeros(9, 3)))),  # cat_tensors_to_...
    6: (lambda p: p.clamp(max=-1.0), lambda m, new: torch.zeros_like(new)),  # replace_tensor_to_..., where `new` is
}


def replaced(make, device):
    torch.manual_seed(1)
    opt = make([{"params": [torch.nn.Parameter(torch.randn(40, 3).to(device))], "name": "xyz"}], lr=0.01, eps=1e-15)
    (group,) = opt.param_groups
    for step in range(9):
        if step in WAYS:
            tensor, moment = WAYS[step]
            old = group["params"][0]
            new, entry = torch.nn.Parameter(tensor(old.detach())), opt.state.pop(old)
            entry.update({key: moment(entry[key], new) for key in ("exp_avg", "exp_avg_sq")})
            group["params"][0], opt.state[new] = new, entry
        (p,) = group["params"]
        p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(step)).to(device)
        opt.step()
    return group["params"][0].detach().cpu()


@pytest.mark.parametrize("devices", [*SCRATCH, *GPU], ids=str)
def test_moments_from_wherever_they_are(devices):
    right = replaced(torch.optim.Adam, "cpu")
    ours = replaced(lambda groups, **named: CSDAdamL2(groups, devices=devices, **named), DEVICE)
    assert ours.shape == right.shape == (35, 3)
    assert (ours - right).norm() <= 1e-6 * right.norm()

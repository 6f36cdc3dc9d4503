"""Overlap on every kind of device, emulated cards among them."""

import pytest
import torch
from support import far
from torch import nn

from csd_optim import CSDAdam, CSDValueError

STEPS = 6
FREE = {"free_gradients": True}
TILE = 4096  # elements: the smallest tile of 8-bit states on a card


class Run:
    """A short training on these devices, and all its results. `overlap`: arguments of overlap(), or None."""

    def __init__(self, devices, overlap, state_dtype):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(64, 64, dtype=torch.bfloat16) for _ in range(4)))
        params, options = model.parameters(), {"tile_size": TILE, "state_dtype": state_dtype, "overwrite": True}
        self.losses, self.early = [], []  # early: elements updated before step()
        with CSDAdam(params, lr=1e-2, devices=devices, **options) as opt:
            if overlap is not None:
                opt.overlap(model, **overlap)
            for _ in range(STEPS):
                loss = model(torch.randn(3, 64, dtype=torch.bfloat16)).square().sum()
                opt.synchronize()  # so that a step can begin in backward
                halve = len(self.losses) == STEPS - 2
                if overlap is FREE:
                    (loss * 0.5 if halve else loss).backward()
                else:
                    loss.backward()
                    for p in model.parameters() if halve else ():  # undoes the step that began in backward
                        p.grad.mul_(0.5)
                opt.step()
                opt.zero_grad()
                self.losses.append(loss.item())
                self.early.append(overlap is not None and opt.stats()["overlap"]["early_params"])
            self.redone = overlap is not None and opt.stats()["overlap"]["redone"]
            self.params = [p.detach().clone() for p in model.parameters()]
            self.state = [t.clone() for p in model.parameters() for t in opt.state[p].values()]


@pytest.mark.parametrize("state_dtype", ["fp32", "8bit"])
def test_training(devices, state_dtype, monkeypatch):
    monkeypatch.setattr("csd_optim.engine.open_devices.SUM_ELEMS", TILE)
    plain = Run(devices, None, state_dtype)
    runs = [Run(devices, {}, state_dtype)]
    if devices == ["ram:"] and not far.assumed():  # which has a single copy of the states
        for overlap in {"backward": True}, FREE:
            with pytest.raises(CSDValueError, match="second copy"):
                Run(devices, overlap, state_dtype)
    else:
        runs += [Run(devices, {"backward": True}, state_dtype), Run(devices, FREE, state_dtype)]
        assert all(early == runs[2].early[0] > 0 for early in runs[2].early)
        *early, changed, last = [early > 0 for early in runs[1].early]
        assert [*early, last] == [False, False, True, True, True]
        # If a gradient was changed before the guess had copied it, the guess was right.
        assert runs[1].redone == ({} if changed else {"gradients": 1})
    for run in runs:
        assert run.losses == plain.losses
        assert all(map(torch.equal, run.params, plain.params))
        assert all(map(torch.equal, run.state, plain.state))

"""A least-squares regression that an optimizer solves, to compare where two of them go."""

import torch


def regression(make, lr):
    """Solve it with `make([weight], lr=lr)` as `lr` falls to zero. Returns the first loss, the last one, the weight."""
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(512, 64, generator=generator)
    y = x @ torch.randn(64, 32, generator=generator)
    weight = torch.nn.Parameter(torch.zeros(64, 32))
    opt = make([weight], lr=lr)
    for step in range(600):
        opt.param_groups[0]["lr"] = lr * (1 - step / 600)
        rows = torch.randint(0, 512, (64,), generator=torch.Generator().manual_seed(step))
        opt.zero_grad()
        (x[rows] @ weight - y[rows]).square().mean().backward()
        opt.step()
    return y.square().mean().item(), (x @ weight - y).square().mean().item(), weight.detach()


def assert_solved_alike(one, other):
    """Assert that two results of regression() are solutions, with weights close to each other."""
    (start, *losses), weights = (one[0], one[1], other[1]), (one[2], other[2])
    assert max(losses) < 1e-3 * start
    assert (weights[1] - weights[0]).norm() / weights[0].norm() < 0.02

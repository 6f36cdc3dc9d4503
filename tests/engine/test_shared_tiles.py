"""Threads without other work share the update of a tile, chunk by chunk: every bit is as if one thread did it alone."""

import pytest
import torch
from support.comparing import assert_same
from support.published import Published, weights

from csd_optim import CSDAdam, bindings
from csd_optim.store.layout import SUM_ELEMS

TILE = 8 * SUM_ELEMS  # one tile has all parameters, so that four threads can do nothing but share it
SIZES = (3 * SUM_ELEMS + 5, 77, TILE // 2 - 1000)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@pytest.fixture(autouse=True)
def restored():
    used = bindings.threads_used()
    yield
    bindings.threads_use(used)


def bits_with(threads, dtype, **options):
    """Return what a training has changed, and what it has counted."""
    bindings.threads_use(threads)
    generator = torch.Generator().manual_seed(1)
    params = [torch.randn(n, generator=generator).to(dtype).requires_grad_() for n in SIZES]
    with CSDAdam(params, devices="ram:", tile_size=TILE, lr=1e-2, **options) as opt:
        for step in range(4):
            for p in params:
                p.grad = torch.randn(p.shape, generator=generator).to(dtype)
                p.grad[:: 1000 + step] = float("inf") if step == 3 else 0.0
            opt.step()
        states = [{key: t.clone() for key, t in opt.state[p].items()} for p in params]
        images = [{"param": p.detach(), **state} for p, state in zip(params, states, strict=True)]
        bits = [{key: t.clone().view(torch.uint8) for key, t in image.items() if t.dim()} for image in images]
        stats = opt.stats()
    return bits, [stats[key] for key in ("params", "push_bytes", "pull_bytes", "nonfinite_grads")]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("options", [{}, {"state_dtype": "8bit"}, {"topk": 0.03}], ids=["fp32", "8bit", "topk"])
def test_bits_are_those_of_one_thread(dtype, options):
    assert_same(bits_with(4, dtype, **options), bits_with(1, dtype, **options))


@pytest.mark.parametrize("options", [{}, {"state_dtype": "8bit"}], ids=["fp32", "8bit"])
def test_what_is_published_is_complete(tmp_path, options):
    """Each thread records the changes of its chunks; the replica has the weights after each step."""
    found = []
    for threads in (1, 4):
        bindings.threads_use(threads)
        torch.manual_seed(0)
        model = torch.nn.Linear(700, 700, dtype=torch.bfloat16)
        training = Published(tmp_path / str(threads), "ram:", model=model, tile_size=TILE, **options)
        for _ in range(3):
            training.step()
            training.check()
        training.opt.close()
        found.append(weights(model))
    assert all((found[0][name] == found[1][name]).all() for name in found[0])

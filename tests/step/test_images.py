"""Top-K in tiles that travel as images: the step selects there what the engine selects elsewhere.

This needs no GPU: a dense gradient that is pushed in a lower precision than it has makes its whole tile travel as an
image. Oracle: the engine's own selection. Every bit is compared.
"""

import pytest
import torch
from support.backends import TILE, device_strings
from support.comparing import assert_same
from support.inside import idle_engine_of, steps_of
from support.replacing import failing

from csd_optim import CSDAdam, CSDOSError
from csd_optim.bindings import Native
from csd_optim.engine.commit.durable import DurableCommitter
from csd_optim.engine.engine import Engine

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
HALVES = [torch.float16, torch.bfloat16]


class Run:
    """An optimizer whose sparse parameters have small dense ones in between, in fp32 if `by_image`."""

    def __init__(self, devices, by_image, *, grad_dtype=torch.bfloat16, sizes=(1500,) * 5, tile_size=TILE, **kwargs):
        self.generator = torch.Generator().manual_seed(1)
        beside = torch.float32 if by_image else grad_dtype
        self.sparse, self.dense, groups = [], [], []
        for i, n in enumerate(sizes):
            self.sparse.append(self.random(n, DTYPES[i % 3]).requires_grad_())
            self.dense.append(self.random(16, torch.float32).to(beside).requires_grad_())
            # `topk` of its own group makes it sparse even if it is small.
            groups.append({"params": [self.sparse[-1]], "topk": kwargs.get("topk", 0.01), "maximize": i == 1})
            groups.append({"params": [self.dense[-1]], "topk": None})
        kwargs = {"topk": 0.01, "lr": 1e-2, **kwargs}
        self.opt = CSDAdam(groups, devices=devices, grad_dtype=grad_dtype, tile_size=tile_size, **kwargs)

    def random(self, n, dtype):
        return torch.randn(n, generator=self.generator).to(dtype)

    def set_grads(self, scale=1.0):
        for p in self.sparse:
            p.grad = self.random(len(p), p.dtype) * scale
        for p in self.dense:
            p.grad = self.random(len(p), torch.bfloat16).to(p.dtype) * scale

    def step(self, scale=1.0):
        self.set_grads(scale)
        self.opt.grad_scale = torch.tensor(scale)
        self.opt.step()

    def bits(self):
        """The bits of everything that a step changes, except for the dense parameters."""
        states = [{"param": p, **self.opt.state[p]} for p in self.sparse]
        return [{key: t.detach().flatten().clone().view(torch.uint8) for key, t in s.items()} for s in states]


@pytest.fixture
def runs(backend, tmp_path):
    """Makes two equal runs: in one the engine selects entries, in the other the gradients travel as images."""

    def make(**kwargs):
        pair = []
        for name in ("engine", "images"):
            (tmp_path / name).mkdir()
            pair.append(Run(device_strings(backend, tmp_path / name), name == "images", **kwargs))
        return pair

    return make


@pytest.fixture
def travelled(monkeypatch):
    """The tile and the number of words of entries, for each image that was pushed."""
    images = []
    push = Native.push

    def spy(self, tile, how=None):
        if how:
            images.append((tile, how.entries[1]))
        push(self, tile, how)

    monkeypatch.setattr(Native, "push", spy)
    return images


@pytest.mark.sampled(together=2)
@pytest.mark.parametrize("grad_dtype", HALVES)
@pytest.mark.parametrize("feedback", [True, False], ids=["feedback", "no feedback"])
@pytest.mark.parametrize("topk", [0.001, 0.01, 0.3])
@pytest.mark.fp32_states("counts tiles, bytes or elements of fp32 states")
@pytest.mark.at_hand("compares images with gradients that the engine reads")
def test_the_same_bits(runs, travelled, topk, feedback, grad_dtype):
    runs = runs(topk=topk, error_feedback=feedback, grad_dtype=grad_dtype)
    for scale in (1.0, 1024.0, 2.0**16, 0.37, 1.0):
        for run in runs:
            travelled.clear()
            run.step(scale)
            assert len(travelled) == (0 if run is runs[0] else len(idle_engine_of(run.opt).tiles))
        assert all(n for _, n in travelled)
        assert_same(*(run.bits() for run in runs))
        assert runs[0].opt.stats()["push_bytes"] == runs[1].opt.stats()["push_bytes"]
    assert ("residual" in runs[1].opt.state[runs[1].sparse[0]]) == feedback


@pytest.mark.fp32_states("counts tiles, bytes or elements of fp32 states")
@pytest.mark.at_hand("compares images with gradients that the engine reads")
def test_tiles_of_several_blocks(runs, travelled):
    """Tiles large enough for the filter, with block boundaries in the middle of a parameter."""
    runs = runs(sizes=(5, 100_000, 70_000, 65_536, 40_000), tile_size=1 << 18)
    for run in runs:
        run.step()
        run.step()
    assert len(travelled) == 2 * len(idle_engine_of(runs[1].opt).tiles) == 4
    assert_same(*(run.bits() for run in runs))


@pytest.mark.fp32_states("counts tiles, bytes or elements of fp32 states")
@pytest.mark.at_hand("compares images with gradients that the engine reads")
def test_more_tiles_than_slots(runs, travelled):
    """Parts of parameters, tiles without a dense parameter, and reuse of every slot."""
    runs = runs(sizes=(40 * TILE, 7, 9 * TILE + 5, TILE - 1), topk=0.05)
    for run in runs:
        run.step()
        run.step()
    assert 0 < len(travelled) < 2 * len(idle_engine_of(runs[1].opt).tiles)
    assert_same(*(run.bits() for run in runs))


@pytest.mark.fp32_states("counts tiles, bytes or elements of fp32 states")
def test_what_is_owed_is_sent_when_it_goes_dense_again(runs, travelled):
    runs = runs()
    for run in runs:
        run.step()
        for group in run.opt.param_groups:
            group["topk"] = None
        travelled.clear()
        run.step()
    assert sum(n for _, n in travelled) > 0.99 * sum(map(len, runs[1].sparse))
    assert_same(*(run.bits() for run in runs))
    travelled.clear()
    for run in runs:
        run.step()
    assert not any(n for _, n in travelled)
    assert_same(*(run.bits() for run in runs))


@pytest.mark.here("residuals are in no store")
@pytest.mark.parametrize("topk", [0.01, 0.3])
@pytest.mark.parametrize("when", ["in the middle", "at the end"])
@pytest.mark.fp32_states("counts tiles, bytes or elements of fp32 states")
def test_an_undone_step_leaves_what_is_owed(runs, backend, monkeypatch, when, topk):
    if backend == "ram":
        pytest.skip("states in memory alone are updated in place")
    runs = runs(topk=topk)
    for run in runs:
        run.step()
    before = runs[1].bits()
    run = runs[1]
    generator = run.generator.get_state()
    with monkeypatch.context() as patch:
        if when == "at the end":
            patch.setattr(Engine, "finish", interrupted(Engine.finish, 1))
        else:
            patch.setattr(Native, "pull", interrupted(Native.pull, 3))
        with pytest.raises(KeyboardInterrupt):
            run.step()
    assert_same(run.bits(), before)
    run.generator.set_state(generator)
    for run in runs:
        run.step()
    assert_same(*(run.bits() for run in runs))


def interrupted(method, call):
    """`method`, but its `call`-th call raises KeyboardInterrupt."""
    calls = iter(range(1, call + 2))

    def interrupt(*args, **kwargs):
        if next(calls, 0) == call:
            raise KeyboardInterrupt
        return method(*args, **kwargs)

    return interrupt


def test_gradients_that_are_nothing_to_select_from(runs):
    """A gradient of zeros, one of nan, and no gradient."""
    runs = runs()
    for run in runs:
        run.step()
        run.set_grads()
        run.sparse[0].grad.zero_()
        run.sparse[1].grad.fill_(float("nan"))
        run.sparse[2].grad = None
        run.opt.step()
        run.step()
    for a, b in zip(*(run.sparse for run in runs), strict=True):
        for key, value in runs[0].opt.state[a].items():
            torch.testing.assert_close(value, runs[1].opt.state[b][key], rtol=0, atol=0, equal_nan=True)
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


def test_only_entries_travel(runs):
    """Only dense gradients are written to images."""
    run = runs()[1]
    run.step()
    for slot in steps_of(run.opt).resources.ring.slots:
        slot.grad.fill_(0xAB)
    run.step()
    written = sum(int((slot.grad != 0xAB).sum()) for slot in steps_of(run.opt).resources.ring.slots)
    assert 0 < written <= 2 * sum(map(len, run.dense))


@pytest.mark.at_hand("compares images with gradients that the engine reads")
def test_memory_is_that_of_the_entries(runs):
    runs = runs(topk=0.01, sizes=(50_000,), tile_size=1 << 16)
    for run in runs:
        run.step()
    ring = steps_of(runs[1].opt).resources.ring
    images = 8 * ring.tile_elems * len(ring.slots)
    assert images < ring.bytes <= images + 4096 * len(ring.slots)
    assert runs[1].opt.stats()["buffer_bytes"] == runs[0].opt.stats()["buffer_bytes"] + ring.bytes


def test_a_commit_that_fails_leaves_no_parameter_behind(tmp_path):
    """A strided parameter gets its new values at the end of a step, which is complete even if its commit fails."""
    p = torch.nn.Parameter(torch.ones(8, 6)[:, ::2])
    with CSDAdam([p], lr=0.1, devices=tmp_path) as opt:
        p.grad = torch.ones_like(p)
        with failing(DurableCommitter, "commit", 1, "no commit"), pytest.raises(CSDOSError, match="no commit"):
            opt.step()
        assert torch.equal(p, opt.state[p]["master"])
        assert (p < 1).all()

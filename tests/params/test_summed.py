"""A gradient that is the sum of several: bitwise the fp32 sum in their order, for all dtypes and encodings."""

import contextlib

import numpy as np
import pytest
import torch
from support.backends import on_cards
from support.comparing import assert_same
from support.gradients import any_bits
from support.inside import steps_of
from support.optimizers import PAIRS
from support.training import Training

from csd_optim import CSDValueError, bindings
from csd_optim.bindings import topk_count
from csd_optim.compression.selection import listed, pack, select
from csd_optim.params.strides import numel
from csd_optim.params.summed import Summand, table_of

pytestmark = pytest.mark.at_hand("an image has no summands")

bf16, fp16 = torch.bfloat16, torch.float16


def packed(values, k, run_elems):
    """The `k` largest values of each run as entries, and the same values as a dense tensor."""
    runs = [values[i : i + run_elems] for i in range(0, len(values), run_elems)]
    sent = [select(run, topk_count(k, len(run))) for run in runs]
    rows = [
        pack([listed(run[None], which[None], topk_count(k, len(run)), 0, len(run))], 1, len(run))[0]
        for run, which in zip(runs, sent, strict=True)
    ]
    words = torch.zeros(len(runs), len(rows[0]), dtype=torch.int32)
    for row, own in zip(words, rows, strict=True):
        row[: len(own)] = own
    dense = torch.where(torch.cat(sent), values, torch.zeros((), dtype=values.dtype))
    return Summand(words.view(-1), values.dtype, words.shape[1], run_elems), dense


def summed(terms):
    out = terms[0].float()
    for term in terms[1:]:
        out = out + term.float()
    return out


def same_bits(a, b):
    nan = a.isnan() & b.isnan()  # which nan's bits a sum of two takes is unspecified
    return torch.equal(a.masked_fill(nan, 0).view(torch.int32), b.masked_fill(nan, 0).view(torch.int32))


@pytest.mark.parametrize("isa", bindings.isas())
def test_the_sum_is_that_of_torch_in_their_order(isa):
    n = 150_001
    dense = [any_bits(n, dtype, seed) for seed, dtype in enumerate((bf16, torch.float32, fp16, bf16))]
    noise = torch.randn(n, generator=torch.Generator().manual_seed(0))
    sparse = [packed((noise * scale).to(dtype), k, 70_000) for scale, dtype, k in ((1, bf16, 0.1), (7, fp16, 0.001))]
    terms = [(Summand(t), t) for t in dense] + sparse
    for order in ([0], [4], [0, 1], [3, 2, 0], [5, 4], [4, 1, 5, 0], [0, 1, 2, 3, 4, 5]):
        expected = summed([terms[i][1] for i in order])
        table = table_of([terms[i][0] for i in order])
        for first, length in ((0, n), (1, 1), (65_500, 5000), (n - 3, 3), (5, 0)):
            out = torch.full((length,), 7.0)
            bindings.sum_up(table, isa, first, out)
            assert same_bits(out, expected[first : first + length]), (order, first)


def test_entries_that_are_malformed_harm_nobody():
    values = torch.randn(70_000).bfloat16()
    summand, _ = packed(values, 0.01, 70_000)
    out = torch.zeros(70_000)
    rng = np.random.default_rng(0)
    for _ in range(300):
        broken = Summand(summand.values.clone(), bf16, summand.run_words, summand.run_elems)
        at = rng.integers(len(broken.values), size=20)
        broken.values[at] = torch.from_numpy(rng.integers(1 << 32, size=20, dtype=np.uint32).view(np.int32))
        with contextlib.suppress(CSDValueError):  # entries that are well-formed by chance are summed
            bindings.sum_up(table_of([broken]), bindings.isa_used(), 0, out)
    broken.values[0] = -1
    with pytest.raises(CSDValueError, match="more entries than words"):
        bindings.sum_up(table_of([broken]), bindings.isa_used(), 0, out)
    for wrong in (
        Summand(summand.values, torch.float32, summand.run_words, summand.run_elems),
        Summand(summand.values, bf16, summand.run_words, 0),
    ):
        with pytest.raises(CSDValueError, match="a dtype that cannot be summed"):
            bindings.sum_up(table_of([wrong]), bindings.isa_used(), 0, out)


class Summing(Training):
    """A Training whose gradients are sums of `n`: 16 bits or fp32, dense or entries. `fed`: it gets the fp32 sums."""

    def __init__(self, devices, n, *, fed, **options):
        super().__init__(devices, **options)
        self.n, self.fed = n, fed

    def step(self):
        number = self.done + 1
        sums = {}
        for k, (name, p) in enumerate(self.params.items()):
            p.grad = None
            if name in ("never", "joined") or (name == "late" and number < 3):
                continue
            summands, terms = [], []
            for i in range(self.n):
                generator = torch.Generator().manual_seed(1000 * number + 10 * k + i)
                dtype = p.dtype if p.is_complex() else (bf16, fp16, torch.float32)[(i + k) % 3]
                dense = torch.empty_like(p.detach(), dtype=dtype)
                dense.copy_(torch.randn(p.shape, generator=generator, dtype=torch.float32).to(dtype))
                summand = Summand(dense)
                if dtype in (bf16, fp16) and (i + number) % 2 and numel(p):
                    flat = dense.as_strided((dense.numel(),), (1,))
                    summand, kept = packed(flat, 0.1, 900)
                    flat.copy_(kept)
                summands.append(summand)
                terms.append(dense if p.is_complex() else dense.float())
            if self.fed:
                p.grad_dtype = None
                p.grad = sum(terms[1:], terms[0])
            else:
                p.grad = p.detach()
                sums[id(p)] = summands
        steps_of(self.opt).sums = sums
        self.opt.grad_scale, self.opt.found_inf = torch.tensor(float(self.n)), torch.tensor(0.0)
        self.opt.step()
        self.done = number


def assert_as_fed(devices, **case):
    images = []
    for fed in (False, True):
        training = Summing(devices, fed=fed, overwrite=fed, **case).steps(3)
        images.append((training.image(), training.opt.stats().get("grad_norm")))
        training.opt.close()
    assert_same(images[0][0], images[1][0])
    assert images[0][1] == images[1][1]


NEEDS_GRAD_DTYPE = pytest.mark.skipif(
    not hasattr(torch.Tensor, "grad_dtype"), reason="this torch has no Tensor.grad_dtype: a sum in fp32 cannot be given"
)
NO_CARDS = pytest.mark.skipif(on_cards(), reason="tiles of codes are larger on cards than those of this model")
CASES = (
    pytest.param({"n": 4}, id="fp32"),
    pytest.param({"n": 2, "state_dtype": "8bit", "max_grad_norm": 0.5}, id="8bit", marks=NO_CARDS),
)


@NEEDS_GRAD_DTYPE
@pytest.mark.parametrize("case", CASES)
def test_a_step_has_the_bits_of_one_that_is_given_the_sum(devices, case):
    assert_as_fed(devices, **case)


@NEEDS_GRAD_DTYPE
@pytest.mark.fp32_states("codes are AdamW's alone")
@pytest.mark.parametrize("of", PAIRS[1:], ids=str)
def test_every_rule_takes_sums(of):
    assert_as_fed("ram:", n=1 + PAIRS.index(of) % 4, of=of, max_grad_norm=1.0)

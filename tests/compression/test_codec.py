"""The 8-bit codec of AdamW's states: guarantees for single elements, and statistics of stochastic rounding."""

import itertools

import numpy as np
import pytest
import torch
from support.gradients import of_all_magnitudes

from csd_optim.bindings import HYPER, ISAS, RULES, decode, encode, lib, update_codes

GROUP = 64
AVAILABLE = [name for name, isa in ISAS.items() if isa <= lib.csd_isa_best()]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
UINT32 = 1 << 32


def blank(n, dtype, amsgrad=False):
    """Codes of n elements, all zero, as in a new state."""
    groups = -(-n // GROUP)
    codes = [torch.zeros(groups * GROUP, dtype=dtype)]
    codes += [torch.zeros(groups * GROUP, dtype=torch.uint8) for _ in range(2 + (dtype != torch.float32))]
    codes.append(torch.zeros(groups, dtype=torch.uint8))
    if amsgrad:
        codes += [torch.zeros(groups * GROUP, dtype=torch.uint8), torch.zeros(groups, dtype=torch.uint8)]
    return codes


def encoded(master, exp_avg, exp_avg_sq, dtype, max_exp_avg_sq=None, isa="scalar"):
    codes = blank(len(master), dtype, max_exp_avg_sq is not None)
    if dtype != torch.float32:
        codes[0][: len(master)] = master.to(dtype)
    encode(isa, [master, exp_avg, exp_avg_sq, max_exp_avg_sq], dtype, codes)
    return codes


def decoded(codes, n, dtype, isa="scalar"):
    states = [torch.full((n,), torch.nan) for _ in range(3 + (len(codes) > 5 + (dtype != torch.float32)))]
    decode(isa, codes, dtype, states + [None] * (4 - len(states)))
    return states


def hyper(lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, step=1, rule="adamw"):
    b1, b2 = betas
    decay = weight_decay if rule.startswith("adam_") or rule == "adam" else 1 - lr * weight_decay
    constants = [decay, b1, 1 - b1, b2, 1 - b2, lr / (1 - b1**step), (1 - b2**step) ** -0.5, eps, 1]
    return np.array([(RULES[rule], constants)], HYPER)


def key_of(step, element=0):
    return (step * 0x9E3779B9 + element) % UINT32


def updated(codes, dtype, steps, grads, first=1, **options):
    """Takes steps on codes, with the best instruction set unless told otherwise; returns the parameter."""
    param = torch.empty(len(codes[0]), dtype=dtype)
    for step in range(first, first + steps):
        grad = grads(step) if callable(grads) else grads
        update_codes(hyper(step=step, **options), AVAILABLE[-1], grad, codes, param[: len(grad)], key_of(step))
    return param


# ---- single elements ----------------------------------------------------------------


def test_roots():
    """Test vectors, rounded to nearest: the group's exponent is that of its maximum, 1.875."""
    roots = torch.tensor([1.875, 1.0, 0.7, 2.0**-14, 5e-5, 1e-9, 0.0])
    codes = encoded(torch.zeros(7), torch.zeros(7), roots.square(), torch.float32)
    ratio, root, exponent = codes[1:]
    assert exponent.tolist() == [127]
    assert root[:7].tolist() == [254, 240, 230, 16, 13, 1, 0]
    assert not ratio.any()
    assert not root[7:].any()
    _, _, squares = decoded(codes, 7, torch.float32)
    assert squares.sqrt().tolist() == [1.875, 1.0, 0.6875, 2.0**-14, 13 * 2.0**-18, 2.0**-18, 0.0]


@pytest.mark.parametrize(("largest", "exponent"), [(1.875, 127), (1.876, 128), (3.2e-4, 115), (0.0, 90), (1e-18, 90)])
def test_the_exponent_of_a_group(largest, exponent):
    squares = torch.zeros(70)
    squares[3] = torch.tensor(largest).square()
    squares[66] = 1.0
    codes = encoded(torch.zeros(70), torch.zeros(70), squares, torch.float32)
    assert codes[3].tolist() == [exponent, 127]


def test_ratios():
    ratios = torch.tensor([3.1622777, -0.23, 0.06, 0.003, 100.0, -100.0, 0.0])
    codes = encoded(torch.zeros(7), ratios, torch.ones(7), torch.float32)
    assert codes[1][:7].tolist() == [0x59, 0x9D, 0x08, 0x00, 0x7F, 0xFF, 0x00]
    assert decoded(codes, 7, torch.float32)[1].tolist() == [3.125, -0.2265625, 0.0625, 0.0, 15.5, -15.5, 0.0]


@pytest.mark.parametrize(
    ("dtype", "master", "param", "correction"),
    [
        (torch.bfloat16, 0.1, 0x3DCD, 0xCD),
        (torch.bfloat16, 1.0019531, 0x3F80, 0x40),
        (torch.bfloat16, 3.1415927, 0x4049, 0x10),
        (torch.bfloat16, -0.1, 0xBDCD, 0xCD),
        (torch.float16, 0.1, 0x2E66, 0x66),
        (torch.float16, 3.1415927, 0x4248, 0x7F),
        (torch.float16, 1e-8, 0x0000, 0x2B),
        (torch.float16, 65519.0, 0x7BFF, 0x78),
    ],
)
def test_masters(dtype, master, param, correction):
    master = torch.tensor([master])
    codes = encoded(master, torch.zeros(1), torch.zeros(1), dtype)
    assert codes[0].view(torch.uint16)[0] == param
    assert codes[1][0] == correction
    torch.testing.assert_close(decoded(codes, 1, dtype)[0], master, rtol=2.0**-17, atol=2.0**-33)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("isa", AVAILABLE)
def test_every_code_is_kept(isa, dtype):
    """All codes survive decoding and encoding to nearest, so reading states changes nothing."""
    root, ratio = torch.meshgrid(torch.arange(256), torch.arange(256), indexing="ij")
    for exponent in (90, 91, 127, 190):
        codes = blank(1 << 16, dtype)
        codes[-2][:] = root.flatten().to(torch.uint8)
        codes[-3][:] = ratio.flatten().to(torch.uint8)
        codes[-1][:] = exponent
        if dtype != torch.float32:
            codes[0].view(torch.uint16)[:] = torch.arange(1 << 16).to(torch.uint16)
            codes[1][:] = ratio.flatten().to(torch.uint8)
        # Each group has the largest root, so that the exponent stays; but not 255, which only inf or nan moments have.
        codes[-2].view(-1, GROUP)[:, 0] = 254
        before = decoded(codes, 1 << 16, dtype, isa)
        again = blank(1 << 16, dtype)
        if dtype != torch.float32:
            again[0][:] = codes[0]
        encode(isa, [*before, None], dtype, again)
        finite = before[0].isfinite()
        after = decoded(again, 1 << 16, dtype, isa)
        assert torch.equal(after[1].nan_to_num(), before[1].nan_to_num())
        assert torch.equal(after[2], before[2])
        # Ties do not come back: their neighbour is stored instead. An inf or nan has no correction.
        ties = torch.zeros_like(finite) if dtype == torch.float32 else codes[1] == 128
        assert torch.equal(after[0][finite & ~ties], before[0][finite & ~ties])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_parameter_is_its_rounded_master(dtype):
    """The parameter is the master as torch rounds it, after encoding to nearest and after stochastic steps."""
    generator = torch.Generator().manual_seed(1)
    bits = torch.randint(0, 1 << 31, (1 << 20,), generator=generator, dtype=torch.int64).to(torch.int32)
    master = torch.where(torch.arange(1 << 20) % 2 == 0, 1, -1) * bits.view(torch.float32)
    master = master[
        master.isfinite() & (master.abs() > 1e-30) & (master.abs() < (6e4 if dtype == torch.float16 else 3e38))
    ]
    codes = blank(len(master), dtype)
    encode("scalar", [master, None, None, None], dtype, codes)
    assert torch.equal(codes[0][: len(master)], decoded(codes, len(master), dtype)[0].to(dtype))
    codes = encoded(master, torch.zeros_like(master), torch.ones_like(master), dtype)
    param = updated(codes, dtype, 3, torch.ones(len(master)), lr=1e-2)
    assert torch.equal(param[: len(master)], decoded(codes, len(master), dtype)[0].to(dtype))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_master_keeps_the_parameter_that_it_came_with(dtype):
    """Rounding the decoded master would sometimes give the parameter's neighbour."""
    generator = torch.Generator().manual_seed(2)
    master = torch.rand(1 << 18, generator=generator) * 2.0 ** torch.randint(-8, 8, (1 << 18,), generator=generator)
    codes = encoded(master, torch.zeros_like(master), torch.zeros_like(master), dtype)
    assert torch.equal(codes[0], master.to(dtype))
    assert not (codes[1] == 128).any()
    # The error is half a unit of the correction, plus one unit where rounding the code would give another parameter.
    unit = {torch.float16: 2.0**-18, torch.bfloat16: 2.0**-15}[dtype]
    found = decoded(codes, len(master), dtype)[0]
    torch.testing.assert_close(found, master, rtol=1.5 * unit, atol=1.5 * 2.0**-32)
    assert ((found - master).abs() > 0.51 * unit * master + 2.0**-33).float().mean() < 0.005
    # A master that does not fit the parameter changes it: the parameter becomes the rounded master.
    encode("scalar", [master * 1.5, None, None, None], dtype, codes)
    assert torch.equal(codes[0], decoded(codes, len(master), dtype)[0].to(dtype))
    torch.testing.assert_close(decoded(codes, len(master), dtype)[0], master * 1.5, rtol=1.5 * unit, atol=2.0**-31)


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_not_finite_stays_with_its_element(dtype):
    """As with AdamW, a non-finite element leaves its neighbours as they would have been."""
    grad = torch.linspace(-1, 1, 200)
    wild = grad.clone()
    wild[10], wild[70], wild[71] = torch.inf, torch.nan, 1e30
    results = []
    for g in grad, wild:
        codes = encoded(torch.linspace(-1, 1, 200), torch.zeros(200), torch.zeros(200), dtype)
        param = updated(codes, dtype, 3, g)
        results.append([param[:200].float(), *decoded(codes, 200, dtype)])
    struck = torch.zeros(200, dtype=torch.bool)
    struck[[10, 70, 71]] = True
    calm, after = results
    for a, b in zip(calm[:2], after[:2], strict=True):  # moments share an exponent with 1e30
        assert torch.equal(a[:64][~struck[:64]], b[:64][~struck[:64]])
        assert torch.equal(a[128:], b[128:])
    assert after[0][10].isnan()
    assert after[0][70].isnan()
    assert after[3][10] == torch.inf
    assert after[3][70] == torch.inf
    assert after[0][~struck].isfinite().all()


# ---- the same bits everywhere -----------------------------------------------------------


def random_codes(n, dtype, amsgrad, seed=3):
    generator = torch.Generator().manual_seed(seed)
    codes = blank(n, dtype, amsgrad)
    padded = len(codes[0])
    inside = torch.arange(padded) < n
    for section in codes:
        if section.dtype is torch.uint8:
            low, high = (90, 192) if len(section) != padded else (0, 256)
            section[:] = torch.randint(low, high, section.shape, generator=generator).to(torch.uint8)
    if dtype is torch.float32:
        codes[0][:] = torch.randn(padded, generator=generator)
    else:
        codes[0].view(torch.int16)[:] = torch.randint(-(1 << 15), 1 << 15, (padded,), generator=generator).to(
            torch.int16
        )
    for section in codes:
        if len(section) == padded:
            section[~inside] = 0
    return codes


@pytest.mark.parametrize(
    ("dtype", "grad_dtype", "rule"),
    [
        *itertools.product(DTYPES, DTYPES, ("adamw", "amsgrad")),
        *itertools.product((torch.bfloat16,), (torch.float32,), ("adam", "adam_amsgrad")),
    ],
)
def test_instruction_sets_agree(dtype, grad_dtype, rule):
    n = 10_000 - 7
    grads = of_all_magnitudes(n)
    results = []
    for isa in AVAILABLE:
        codes, param = random_codes(n, dtype, rule.endswith("amsgrad")), torch.zeros(n, dtype=dtype)
        for step in range(1, 6):
            constants = hyper(step=step, weight_decay=0.1, rule=rule)
            update_codes(constants, isa, grads.roll(step).to(grad_dtype), codes, param, key_of(step))
        results.append([param, *codes, *decoded(codes, n, dtype, isa)])
    for result in results[1:]:
        for a, b in zip(results[0], result, strict=True):
            integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[a.element_size()]
            assert torch.equal(a.view(integers), b.view(integers))


@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_do_not_depend_on_how_a_parameter_is_cut(dtype):
    """Cut into pieces of whole groups, each element is rounded with the same random bits."""
    n = 1000
    grad = torch.randn(n, generator=torch.Generator().manual_seed(5))
    whole, parts = (random_codes(n, dtype, False) for _ in range(2))
    update_codes(hyper(), "scalar", grad, whole, torch.empty(n, dtype=dtype), key_of(1))
    for first, last in [(0, 64), (64, 512), (512, n)]:
        part = [s[first:] if len(s) == len(parts[0]) else s[first // GROUP :] for s in parts]
        out = torch.empty(last - first, dtype=dtype)
        update_codes(hyper(), "scalar", grad[first:last], part, out, key_of(1, first))
    for a, b in zip(whole, parts, strict=True):
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@pytest.mark.parametrize("eps", [1e-8, 0.0])
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_a_group_has_beyond_its_parameter_stays_zero(dtype, eps):
    codes = encoded(torch.ones(70), torch.zeros(70), torch.zeros(70), dtype)
    updated(codes, dtype, 4, torch.ones(70), eps=eps, weight_decay=0.1)
    for section in codes:
        if len(section) == 128:
            assert not section[70:].any()


def test_max_exp_avg_sq_keeps_its_code_until_it_grows():
    n = 64
    codes = encoded(
        torch.ones(n), torch.zeros(n), torch.ones(n), torch.bfloat16, max_exp_avg_sq=torch.linspace(2, 9, n)
    )
    peak = [s.clone() for s in codes[5:]]
    updated(codes, torch.bfloat16, 200, torch.ones(n), rule="amsgrad")
    assert torch.equal(codes[5], peak[0])
    assert torch.equal(codes[6], peak[1])
    updated(codes, torch.bfloat16, 1, torch.full((n,), 200.0), first=201, rule="amsgrad")
    _, _, square, largest = decoded(codes, n, torch.bfloat16)
    torch.testing.assert_close(largest.sqrt(), square.sqrt(), rtol=0.1, atol=0)


# ---- stochastic rounding --------------------------------------------------------------


def test_chance_is_fair():
    """Stochastic rounding is unbiased for every element: its mean over the steps is the exact value."""
    steps, n = 4096, 64 * 4
    generator = torch.Generator().manual_seed(6)
    master = torch.rand(n, generator=generator) + 0.5
    exp_avg = torch.randn(n, generator=generator) * 0.3
    square = torch.rand(n, generator=generator) + 0.1
    total = [torch.zeros(n, dtype=torch.float64) for _ in range(3)]
    again = [torch.zeros(n, dtype=torch.float64) for _ in range(3)]
    start = encoded(master, exp_avg, square, torch.bfloat16)
    begin = decoded(start, n, torch.bfloat16)
    # One step that lets all states decay a little, off the grid; in fp32 the result is the same every time.
    constants = hyper(lr=1e-4, betas=(0.97, 0.99), weight_decay=0.3)
    b1, b2 = (np.float32(0.97), np.float32(0.99))
    wanted_root = (begin[2].double() * float(b2)).sqrt()
    wanted_avg = begin[1].double() * float(b1)
    wanted_master = begin[0].double() * float(np.float32(1 - 3e-5))
    wanted_master -= float(constants["c"][0, 5]) * wanted_avg / (wanted_root * float(constants["c"][0, 6]) + 1e-8)
    wanted = [wanted_master, wanted_avg / wanted_root, wanted_root]
    for step in range(steps):
        codes = [s.clone() for s in start]
        update_codes(
            constants, AVAILABLE[-1], torch.zeros(n), codes, torch.empty(n, dtype=torch.bfloat16), key_of(step)
        )
        w, m, v = (s.double() for s in decoded(codes, n, torch.bfloat16))
        # The ratio is rounded relative to the rounded root: their product, exp_avg, is what is unbiased.
        for i, value in enumerate([w, m, v.sqrt()]):
            total[i] += value
            again[i] += value.square()
    for i, right in enumerate([wanted_master, wanted_avg, wanted_root]):
        mean = total[i] / steps
        deviation = (again[i] / steps - mean.square()).clamp(min=0).sqrt()
        error = (mean - right).abs()
        bound = 4.5 * deviation / steps**0.5 + 1e-7 * right.abs()
        assert (error <= bound).all(), (i, (error / bound).max())
    assert len(wanted) == 3


def test_small_updates_add_up():
    """With rounding to nearest, a bf16 parameter would not move at all, and a 24-bit master not all the way."""
    n, lr = 4096, 3e-7
    generator = torch.Generator().manual_seed(7)
    master = (torch.rand(n, generator=generator) + 0.5).bfloat16().float()
    codes = encoded(master, torch.zeros(n), torch.zeros(n), torch.bfloat16)
    updated(codes, torch.bfloat16, 100, torch.ones(n), lr=lr)
    moved = (decoded(codes, n, torch.bfloat16)[0] - master).double()
    assert moved.mean() == pytest.approx(-100 * lr, rel=0.01)


@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.9, 0.95)])
def test_exp_avg_sq_falls_as_fast_as_gradients_do(betas):
    """With rounding to nearest it could not: a step is less than half a code."""
    n = 4096
    generator = torch.Generator().manual_seed(8)
    grads = [torch.randn(n, generator=generator) for _ in range(64)]
    codes = encoded(torch.zeros(n), torch.zeros(n), torch.zeros(n), torch.float32)
    square = torch.zeros(n, dtype=torch.float64)
    for step in range(1, 3001):
        grad = grads[step % 64] * (1.0 if step < 1000 else 0.1)
        update_codes(hyper(step=step, betas=betas), AVAILABLE[-1], grad, codes, torch.empty(n), key_of(step))
        square = betas[1] * square + (1 - betas[1]) * grad.double().square()
    ratio = (decoded(codes, n, torch.float32)[2].double() / square).sqrt()
    assert ratio.median() == pytest.approx(1, abs=0.05)


def test_a_weight_whose_gradient_stays_away_stands_still():
    """A root never becomes zero once there was a gradient: dividing by eps alone would move the weight very far."""
    n, lr, silent = 128, 1e-3, slice(20, 40)
    generator = torch.Generator().manual_seed(9)
    start = torch.rand(n, generator=generator)
    codes = encoded(start, torch.zeros(n), torch.zeros(n), torch.float32)
    reference = torch.nn.Parameter(start.clone())
    oracle = torch.optim.AdamW([reference], lr=lr, weight_decay=0.0)

    def grad_of(step):
        grad = torch.randn(n, generator=torch.Generator().manual_seed(step))
        grad[silent] *= 1e-7 if step < 20 else 0.0
        return grad

    for step in range(1, 400):
        updated(codes, torch.float32, 1, grad_of(step), first=step, lr=lr)
        reference.grad = grad_of(step)
        oracle.step()
    moved = (decoded(codes, n, torch.float32)[0] - start).abs()[silent]
    expected = (reference.detach() - start).abs()[silent]
    assert (moved <= expected + lr).all()


def test_unknown_codes_are_refused():
    with pytest.raises(ValueError, match="no such codes"):
        encode("scalar", [torch.ones(64), None, None, None], torch.bfloat16, blank(64, torch.float32))
    codes = blank(64, torch.float32)
    for rule in {*RULES} - {"adamw", "adam"}:  # those of amsgrad and others have other sections
        with pytest.raises(ValueError, match=r"no codes for update rule|no such codes"):
            update_codes(hyper(rule=rule), "scalar", torch.ones(64), codes, torch.empty(64), 0)

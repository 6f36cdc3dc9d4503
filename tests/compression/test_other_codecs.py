"""Codecs of rules other than AdamW: single elements, what stochastic rounding keeps, and the same bits everywhere."""

import numpy as np
import pytest
import torch
from support import code_oracle as oracle
from support.gradients import of_all_magnitudes

from csd_optim.bindings import HYPER, ISAS, PASS_RULES, RULES, decode, encode, lib, update_codes
from csd_optim.errors import CSDValueError
from csd_optim.store.sections import slot_of

AVAILABLE = [name for name, isa in ISAS.items() if isa <= lib.csd_isa_best()]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
STATES = {"adagrad": "sum", "rmsprop": "square_avg"}


def key_of(step, element=0):
    return (step * 0x9E3779B9 + element) % (1 << 32)


def passes(momentum=0.95, nesterov=True, decay=0.999, rate=0.02):
    """Return the constants of Muon's two passes."""
    first = (PASS_RULES["muon_momentum"], (1 - momentum, momentum, float(nesterov), *(0.0,) * 5, 1.0))
    return np.array([first], HYPER), np.array([(PASS_RULES["muon_apply"], (decay, rate, *(0.0,) * 7))], HYPER)


def hyper(rule, lr=0.01, eps=1e-10, weight_decay=0.0, alpha=0.99):
    constants = {
        "adagrad": (lr, weight_decay, eps, *(0.0,) * 5, 1.0),
        "rmsprop": (lr, weight_decay, alpha, 1 - alpha, 0.0, eps, 0.0, 0.0, 1.0),
    }
    return np.array([(RULES[rule], constants[rule])], HYPER)


def blank(n, dtype, codec="root"):
    """Codes of n elements, all zero, as in a new state."""
    padded = -(-n // 64) * 64
    sections = slot_of(padded, ("master", "state"), codec, dtype)
    codes = [torch.zeros(section.bytes_of(padded), dtype=torch.uint8) for section in sections]
    return [codes[0].view(dtype), *codes[1:]]


def decoded(codes, n, dtype, isa="scalar", codec="root"):
    states = [torch.full((n,), torch.nan) for _ in range(2)]
    decode(isa, codes, dtype, states, codec)
    return states


def random_codes(n, dtype, seed=3):
    generator = torch.Generator().manual_seed(seed)
    codes = blank(n, dtype)
    codes[0][:n] = torch.randn(n, generator=generator).to(dtype)
    for section in codes[1:-1]:
        section[:n] = torch.randint(0, 255, (n,), generator=generator).to(torch.uint8)
    codes[-1][:] = torch.randint(90, 192, codes[-1].shape, generator=generator).to(torch.uint8)
    return codes


def same_bits(a, b):
    return all(torch.equal(x.view(torch.uint8), y.view(torch.uint8)) for x, y in zip(a, b, strict=True))


def test_roots_to_nearest():
    """The vectors of AdamW's roots: it is the same code."""
    roots = torch.tensor([1.875, 1.0, 0.7, 2.0**-14, 5e-5, 1e-9, 0.0])
    codes = blank(7, torch.float32)
    encode("scalar", [None, roots.square()], torch.float32, codes, "root")
    assert codes[2].tolist() == [127]
    assert codes[1].tolist() == [254, 240, 230, 16, 13, 1, 0, *[0] * 57]
    squares = decoded(codes, 7, torch.float32)[1]
    assert squares.sqrt().tolist() == [1.875, 1.0, 0.6875, 2.0**-14, 13 * 2.0**-18, 2.0**-18, 0.0]


@pytest.mark.parametrize("isa", AVAILABLE)
def test_every_root_is_kept(isa):
    """All codes survive decoding and encoding to nearest, so reading states changes nothing."""
    for exponent in (90, 91, 127, 190):
        codes = blank(1 << 14, torch.float32)
        codes[1][:] = torch.arange(1 << 14).to(torch.uint8)
        codes[1].view(-1, 64)[:, 0] = 254  # so that the group keeps its exponent
        codes[2][:] = exponent
        again = blank(1 << 14, torch.float32)
        encode(isa, decoded(codes, 1 << 14, torch.float32, isa), torch.float32, again, "root")
        assert same_bits(codes, again)


def test_what_is_not_finite_stays_with_its_element():
    squares = torch.tensor([torch.inf, torch.nan, -1.0, 4.0])
    codes = blank(4, torch.float32)
    encode("scalar", [None, squares], torch.float32, codes, "root")
    assert decoded(codes, 4, torch.float32)[1].tolist() == [torch.inf] * 3 + [4.0]


@pytest.mark.parametrize("rule", STATES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_instruction_sets_agree(rule, dtype):
    n = 10_000 - 7
    grads = of_all_magnitudes(n)
    results = []
    for isa in AVAILABLE:
        codes, param = random_codes(n, dtype), torch.zeros(n, dtype=dtype)
        for step in range(1, 6):
            grad = grads.roll(step).to(torch.bfloat16 if step % 2 else torch.float32)
            update_codes(hyper(rule, weight_decay=0.1), isa, grad, codes, param, key_of(step))
        results.append([param, *codes, *decoded(codes, n, dtype, isa)])
    assert all(same_bits(results[0], other) for other in results[1:])


@pytest.mark.parametrize("rule", STATES)
def test_steps_have_the_bits_of_an_independent_implementation(rule):
    """In NumPy, from the definition of the codes; bf16 parameters."""
    n, f = 5000, np.float32
    generator = torch.Generator().manual_seed(1)
    value = torch.randn(n, generator=generator).bfloat16()
    codes, out = blank(n, torch.bfloat16), torch.empty(n, dtype=torch.bfloat16)
    codes[0][:n] = value
    param = codes[0][:n].view(torch.int16).numpy().view(np.uint16).copy()
    correction, root, exponents = np.zeros(n, np.uint8), np.zeros(n, np.uint8), np.zeros(-(-n // 64), np.uint8)
    (constants,) = hyper(rule, weight_decay=0.1)["c"]
    for step in range(1, 8):
        grad = torch.randn(n, generator=generator) * 10.0 ** torch.linspace(-6, 2, n)
        update_codes(hyper(rule, weight_decay=0.1), AVAILABLE[-1], grad, codes, out, key_of(step, 77))
        h = oracle.hashes(key_of(step, 77), n)
        master = oracle.decoded_masters(param, correction)
        u = oracle.decoded_roots(oracle.by_group(root), exponents)[:n]
        square = u * u
        g = grad.numpy() + constants[1] * master
        if rule == "adagrad":
            square = square + g * g
            master = master - constants[0] * g / (np.sqrt(square) + constants[2])
        else:
            square = square * constants[2] + constants[3] * g * g
            master = master - constants[0] * g / (np.sqrt(square) + constants[5])
        assert master.dtype == square.dtype == f
        root, exponents = oracle.encoded_roots(np.sqrt(square), h)
        root = root[:n]
        param, correction = oracle.encoded_masters(master, h)
        assert np.array_equal(codes[0][:n].view(torch.int16).numpy().view(np.uint16), param)
        assert np.array_equal(codes[1][:n].numpy(), correction)
        assert np.array_equal(codes[2][:n].numpy(), root)
        assert np.array_equal(codes[3].numpy(), exponents)
        assert torch.equal(out, codes[0][:n])


@pytest.mark.parametrize("rule", STATES)
def test_bits_do_not_depend_on_how_a_parameter_is_cut(rule):
    n = 1000
    grad = torch.randn(n, generator=torch.Generator().manual_seed(5))
    whole, parts = (random_codes(n, torch.bfloat16) for _ in range(2))
    update_codes(hyper(rule), "scalar", grad, whole, torch.empty(n, dtype=torch.bfloat16), key_of(1))
    for first, last in [(0, 64), (64, 512), (512, n)]:
        end = -(-last // 64) * 64
        part = [s[first // 64 : end // 64] if len(s) == len(parts[-1]) else s[first:end] for s in parts]
        out = torch.empty(last - first, dtype=torch.bfloat16)
        update_codes(hyper(rule), "scalar", grad[first:last], part, out, key_of(1, first))
    assert same_bits(whole, parts)


def test_a_sum_grows_by_what_is_smaller_than_a_code():
    """Rounded to nearest, it would stop growing; at random, it is right on average."""
    n, steps = 1 << 14, 400
    codes = blank(n, torch.float32)
    encode("scalar", [None, torch.ones(n)], torch.float32, codes, "root")
    for step in range(1, steps + 1):  # each adds 1/1000, and a code is 1/16 to 1/32
        grad = torch.full((n,), 1e-3**0.5)
        update_codes(hyper("adagrad"), AVAILABLE[-1], grad, codes, torch.empty(n), key_of(step))
    roots = decoded(codes, n, torch.float32)[1].sqrt()
    assert abs(roots.mean() / (1 + steps * 1e-3) ** 0.5 - 1) < 0.01
    assert roots.std() / roots.mean() < 0.1


def test_codes_of_another_rule_are_refused():
    codes = random_codes(64, torch.float32)
    for rule in ("rmsprop_centered", "rmsprop_momentum", "sgd_momentum", "lion", "adamw"):
        constants = np.array([(RULES[rule], (0.0,) * 9)], HYPER)
        with pytest.raises(CSDValueError, match=r"no (such )?codes"):
            update_codes(constants, "scalar", torch.ones(64), codes, torch.empty(64), 0)
    with pytest.raises(CSDValueError, match="no such codes: 4 sections"):
        decode("scalar", [*codes, codes[-1]], torch.float32, [torch.empty(64)], "root")


# ---- linear --------------------------------------------------------------------------------


def of_momenta(values, isa="scalar"):
    codes = blank(len(values), torch.float32, "linear")
    encode(isa, [None, values], torch.float32, codes, "linear")
    return codes


def test_momenta_to_nearest():
    """The unit is a power of two, and the largest takes 64 to 127 of them."""
    codes = of_momenta(torch.tensor([127.0, -64.0, 1.4, -0.6, 0.4, -0.0, 0.0]))
    assert codes[2].tolist() == [126]
    assert codes[1][:7].view(torch.int8).tolist() == [127, -64, 1, -1, 0, 0, 0]
    assert decoded(codes, 7, torch.float32, codec="linear")[1].tolist() == [127.0, -64.0, 1.0, -1.0, 0.0, 0.0, 0.0]
    assert of_momenta(torch.tensor([127.1, 3.0]))[1][:2].tolist() == [64, 2]  # now in units of 2
    assert of_momenta(torch.tensor([1e-3]))[2].tolist() == [126 - 16]


@pytest.mark.parametrize("isa", AVAILABLE)
def test_every_momentum_is_kept(isa):
    for exponent in (0, 1, 126, 246):
        codes = blank(1 << 14, torch.float32, "linear")
        codes[1][:] = torch.arange(1 << 14).to(torch.uint8)
        codes[1].view(-1, 64)[:, 0] = 127  # so that the group keeps its exponent
        codes[2][:] = exponent
        again = blank(1 << 14, torch.float32, "linear")
        encode(isa, decoded(codes, 1 << 14, torch.float32, isa, "linear"), torch.float32, again, "linear")
        assert same_bits(codes, again)


def test_a_momentum_that_is_not_finite_is_nan_and_stays_with_its_element():
    codes = of_momenta(torch.tensor([torch.inf, torch.nan, -torch.inf, 4.0]))
    found = decoded(codes, 4, torch.float32, codec="linear")[1]
    assert found.isnan().tolist() == [True, True, True, False]
    assert found[3] == 4.0
    largest = torch.tensor([torch.finfo(torch.float32).max, -1e38])
    found = decoded(of_momenta(largest), 2, torch.float32, codec="linear")[1]
    torch.testing.assert_close(found, largest, rtol=0.02, atol=0)


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_instruction_sets_agree_on_both_passes(dtype, nesterov):
    n = 10_000 - 7
    grads = of_all_magnitudes(n)
    results = []
    for isa in AVAILABLE:
        codes, param, x = blank(n, dtype, "linear"), torch.zeros(n, dtype=dtype), torch.zeros(n, dtype=torch.bfloat16)
        codes[0][:n] = torch.linspace(-2, 2, n).to(dtype)
        for step in range(1, 6):
            first, second = passes(nesterov=nesterov)
            update_codes(first, isa, grads.roll(step).to(dtype), codes, x, key_of(step))
            update_codes(second, isa, x.nan_to_num(0, 1, -1).clamp(-1, 1), codes, param, key_of(step))
        results.append([param, x, *codes, *decoded(codes, n, dtype, isa, "linear")])
    assert all(same_bits(results[0][2:-1], other[2:-1]) for other in results[1:])
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            assert torch.equal(a.nan_to_num(), b.nan_to_num())


@pytest.mark.parametrize("nesterov", [True, False])
def test_both_passes_have_the_bits_of_an_independent_implementation(nesterov):
    """In NumPy, from the definition of the codes; bf16 parameters."""
    n = 5000
    generator = torch.Generator().manual_seed(1)
    codes, out = blank(n, torch.bfloat16, "linear"), torch.empty(n, dtype=torch.bfloat16)
    codes[0][:n] = torch.randn(n, generator=generator).bfloat16()
    param = codes[0][:n].view(torch.int16).numpy().view(np.uint16).copy()
    correction, linear, exponents = np.zeros(n, np.uint8), np.zeros(n, np.uint8), np.zeros(-(-n // 64), np.uint8)
    first, second = passes(nesterov=nesterov)
    (one_minus, momentum, *_), (decay, rate, *_) = first["c"][0], second["c"][0]
    for step in range(1, 8):
        grad, x = torch.randn(n, generator=generator) * 10.0 ** torch.linspace(-6, 2, n), torch.empty_like(out)
        update_codes(first, AVAILABLE[-1], grad, codes, x, key_of(step, 77))
        h, g = oracle.hashes(key_of(step, 77), n), grad.numpy()
        m = oracle.decoded_momenta(oracle.by_group(linear), exponents)[:n]
        m = m + one_minus * (g - m)
        assert torch.equal(x, torch.from_numpy(g + momentum * (m - g) if nesterov else m).bfloat16())
        linear, exponents = oracle.encoded_momenta(m, h)
        linear = linear[:n]
        assert np.array_equal(codes[2][:n].numpy(), linear)
        assert np.array_equal(codes[3].numpy(), exponents)
        orthogonal = x.sign()  # what is between the passes does not matter here
        update_codes(second, AVAILABLE[-1], orthogonal, codes, out, key_of(step, 77))
        master = oracle.decoded_masters(param, correction) * decay - rate * orthogonal.float().numpy()
        param, correction = oracle.encoded_masters(master, h)
        assert np.array_equal(codes[0][:n].view(torch.int16).numpy().view(np.uint16), param)
        assert np.array_equal(codes[1][:n].numpy(), correction)
        assert torch.equal(out, codes[0][:n])
        assert np.array_equal(codes[2][:n].numpy(), linear)  # the second pass leaves the first one's half alone


def test_a_momentum_is_right_on_average():
    """Elements of a thousandth of a code, beside larger ones: each becomes 0 or 1 at random."""
    n, steps = 1 << 14, 60
    grad = torch.full((n,), 1e-3)
    grad[::64] = 100.0
    codes, x = blank(n, torch.float32, "linear"), torch.empty(n)
    total = torch.zeros(n)
    for step in range(1, steps + 1):
        update_codes(passes(momentum=0.0)[0], AVAILABLE[-1], grad, codes, x, key_of(step))
        total += decoded(codes, n, torch.float32, codec="linear")[1]
    found = (total / steps).view(-1, 64)[:, 1:]
    assert abs(found.mean() / 1e-3 - 1) < 4 * (1000 / (found.numel() * steps)) ** 0.5

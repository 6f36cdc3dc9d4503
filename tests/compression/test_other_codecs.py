"""Codecs of rules other than AdamW: single elements, what stochastic rounding keeps, and the same bits everywhere."""

import numpy as np
import pytest
import torch
from support import code_oracle as oracle

from csd_optim.bindings import HYPER, ISAS, RULES, decode, encode, lib, update_codes
from csd_optim.errors import CSDValueError
from csd_optim.store.sections import slot_of

AVAILABLE = [name for name, isa in ISAS.items() if isa <= lib.csd_isa_best()]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
STATES = {"adagrad": "sum", "rmsprop": "square_avg"}


def key_of(step, element=0):
    return (step * 0x9E3779B9 + element) % (1 << 32)


def hyper(rule, lr=0.01, eps=1e-10, weight_decay=0.0, alpha=0.99):
    constants = {
        "adagrad": (lr, weight_decay, eps, *(0.0,) * 5, 1.0),
        "rmsprop": (lr, weight_decay, alpha, 1 - alpha, 0.0, eps, 0.0, 0.0, 1.0),
    }
    return np.array([(RULES[rule], constants[rule])], HYPER)


def blank(n, dtype):
    """Codes of n elements, all zero, as in a new state."""
    padded = -(-n // 64) * 64
    sections = slot_of(padded, ("master", "state"), "root", dtype)
    codes = [torch.zeros(section.bytes_of(padded), dtype=torch.uint8) for section in sections]
    return [codes[0].view(dtype), *codes[1:]]


def decoded(codes, n, dtype, isa="scalar"):
    states = [torch.full((n,), torch.nan) for _ in range(2)]
    decode(isa, codes, dtype, states, "root")
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
    grads = torch.randn(n, generator=torch.Generator().manual_seed(4))
    grads *= 10.0 ** torch.linspace(-12, 3, n)
    grads[5], grads[77], grads[78], grads[400] = torch.inf, torch.nan, 0.0, 1e30
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

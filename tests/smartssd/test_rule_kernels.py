"""The kernels of all rules except AdamW in C-simulation: every variant, with each number of sections it may have.

Every run checks what support/kernels.py says.
"""

import itertools

import numpy as np
import pytest
import torch
from support.coded_kernels import random_coded_parts, random_tile, simulate_codes
from support.kernels import (
    BLOCK,
    DTYPES,
    HALVES,
    SIZES,
    TILE,
    Part,
    encode,
    hyper,
    random_parts,
    random_state,
    simulate,
    simulate_topk,
    sparse_gradients,
    special,
    words_for,
)

from csd_optim import bindings

CASES = [
    pytest.param(row.name, f"csd_{row.rule}_update", sections, id=f"{row.name} {sections}")
    for row in bindings.RULE_ROWS
    for sections in range(row.updated, row.most + 1)
    if row.rule != "adamw" and not row.of_pass
]


def constants(rule, rng):
    """Return random but plausible constants of a step, in the order of the headers, without the gradient scale."""
    lr, weight_decay, eps = 10 ** rng.uniform(-4, -1), rng.choice([0, 0.1]), rng.choice([1e-8, 1e-3])
    beta1, beta2 = rng.choice([0, 0.9]), rng.choice([0.5, 0.99])
    if rule.startswith("sgd"):
        return lr, weight_decay, beta1, rng.choice([1, 0.5])
    if rule == "adagrad":
        return lr, weight_decay, eps
    if rule.startswith("rmsprop"):
        return lr, weight_decay, beta2, 1 - beta2, beta1, eps
    assert rule == "lion"
    return 1 - lr * weight_decay, lr, beta1, 1 - beta1, beta2, 1 - beta2


def hyper_of(rule, rng, grad_scale=1.0):
    if rule.startswith("adam"):  # like AdamW's, except the first
        made = hyper(amsgrad=rule == "adam_amsgrad", grad_scale=grad_scale, betas=(rng.choice([0, 0.9]), 0.99))
        made["rule"], made["c"][0] = bindings.RULES[rule], rng.choice([0, 0.1])
        return made
    some = constants(rule, rng)
    return np.array((bindings.RULES[rule], (*some, *[0.0] * (8 - len(some)), grad_scale)), bindings.HYPER)


def state_for(rule, n_words, sections):
    """Return states with positive divisors: a negative variance would make every root NaN and prove nothing."""
    state = random_state(n_words, sections)
    if rule.startswith(("rmsprop", "adagrad")):
        state[1] = state[1] ** 2 + 1
    return state


@pytest.mark.parametrize(("rule", "kernel", "sections"), CASES)
def test_lengths(rule, kernel, sections):
    """Each length, in place or not, with some pairs of dtypes; `make soak` tests all combinations."""
    rng = np.random.default_rng(0)
    dtypes = itertools.cycle(itertools.product(DTYPES, DTYPES))
    for n, (grad_dtype, param_dtype) in zip(SIZES, dtypes, strict=False):
        part = Part(0, torch.randn(n).to(grad_dtype), param_dtype, hyper_of(rule, rng))
        state = state_for(rule, words_for(n), sections)
        simulate(state, [part], kernel=kernel, in_place=bool(n % 2))


@pytest.mark.soak
@pytest.mark.parametrize(("rule", "kernel", "sections"), CASES)
def test_each_length_of_each_dtype(rule, kernel, sections):
    rng = np.random.default_rng(1)
    for n, grad_dtype, param_dtype, in_place in itertools.product(SIZES, DTYPES, DTYPES, (False, True)):
        part = Part(0, torch.randn(n).to(grad_dtype), param_dtype, hyper_of(rule, rng))
        simulate(state_for(rule, words_for(n), sections), [part], kernel=kernel, in_place=in_place)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(1, 30))])
@pytest.mark.parametrize(("rule", "kernel", "sections"), CASES)
def test_many_segments_dense_and_sparse(rule, kernel, sections, seed):
    rng = np.random.default_rng(seed)
    scales = [1.0, -1.0, 2.0**-16, 0.37]
    n_words = int(rng.integers(60, 300))
    parts = random_parts(
        rng, n_words, sections, sparse=True, hypers=lambda rng, _: hyper_of(rule, rng, rng.choice(scales))
    )
    assert {p.sparse for p in parts} == {False, True}
    state = state_for(rule, n_words, sections)
    simulate_topk(
        state, parts, kernel=kernel, in_place=bool(seed % 2), isa=bindings.isas()[seed % len(bindings.isas())]
    )


@pytest.mark.parametrize(
    "grad_dtype", [torch.float16, *(pytest.param(dtype, marks=pytest.mark.soak) for dtype in DTYPES[::2])]
)
@pytest.mark.parametrize(("rule", "kernel", "sections"), CASES)
def test_special_values(rule, kernel, sections, grad_dtype):
    """Special values in gradients and in every state."""
    rng, n = np.random.default_rng(2), 1501
    for param_dtype, grad_scale in zip(DTYPES, (1.0, -0.3, 1e30), strict=True):
        state = torch.stack([special(16 * words_for(n)) for _ in range(sections)])
        part = Part(0, special(n, grad_dtype), param_dtype, hyper_of(rule, rng, grad_scale))
        simulate(state, [part], kernel=kernel)


@pytest.mark.parametrize("kernel", sorted({case.values[1] for case in CASES}))
def test_several_blocks_and_sums(kernel):
    """With as many sections as the kernel has ports, and several bursts, blocks of entries and chunks per tile."""
    rule, _, sections = next(case.values for case in reversed(CASES) if case.values[1] == kernel)
    n = BLOCK + 1000
    grad = torch.where(torch.rand(n) < 0.01, torch.randn(n), 0.0).half()
    part = Part(0, grad, torch.bfloat16, hyper_of(rule, np.random.default_rng(3)), sparse=True)
    simulate_topk(state_for(rule, words_for(n) + 7, sections), [part], kernel=kernel, sum_words=8192)
    simulate(state_for(rule, TILE, sections), [], kernel=kernel)


ALL_OF_ADAM = ["adam", "adamw", "adam", "adam_amsgrad", "amsgrad"]


def hyper_of_an_adam(rng, amsgrad):
    """Return the constants of a parameter of Adam, in which some groups decay like AdamW."""
    made = hyper(weight_decay=rng.choice([0, 0.1]), grad_scale=rng.choice([1.0, 0.37]))
    rule = ALL_OF_ADAM[rng.integers(5 if amsgrad else 3)]
    made["rule"] = bindings.RULES[rule]
    if rule.startswith("adam_") or rule == "adam":
        made["c"][0] = rng.choice([0, 0.1])
    return made


@pytest.mark.parametrize("seed", range(6))
def test_adam_beside_adamw_in_a_tile(seed):
    rng = np.random.default_rng(seed)
    n_words, sections = int(rng.integers(200, 300)), 3 + seed % 2
    parts = random_parts(rng, n_words, sections, sparse=True, hypers=hyper_of_an_adam)
    simulate_topk(random_state(n_words, sections), parts, kernel="csd_adam_update")


@pytest.mark.parametrize("seed", range(6))
def test_adams_codes(seed):
    rng = np.random.default_rng(seed)
    dtype, amsgrad = [torch.float32, *HALVES][seed % 3], bool(seed % 2)
    tile = random_tile(rng, 256 * int(rng.integers(1, 3)), dtype, amsgrad)
    parts = random_coded_parts(rng, tile, sparse=True, hypers=hyper_of_an_adam)
    tile.clear_tails(parts)
    entries = encode(sparse_gradients(parts, tile.n_words), tile.n_words)
    simulate_codes(tile, parts, kernel="csd_adam_8bit_update", in_place=bool(seed % 2), entries=entries)

"""Cases for update kernels: what the native engine makes of them, and whether kernels make the same."""

import numpy as np
import torch

from csd_optim import bindings
from csd_optim.bindings import GRAD_SCALE, HYPER, RULE_ROWS, RULES
from csd_optim.kernels import update
from csd_optim.kernels.update import UpdateRow

from .floats import at_the_edge, awkward, bits

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
SIZES = [1, 3, 4, 5, 1023, 1025, 4095, 4097, 8195]  # about the 4 elements of a thread and the 4096 of a block
ROWS = [row for row in RULE_ROWS if row.name in RULES]


def random_rows(row, generator, sizes):
    """Yield parameters of these sizes, in all dtypes of gradient, link and parameter; some are their own masters."""
    for i, n in enumerate(sizes):
        for grad_dtype in DTYPES:
            constants = torch.rand(9, generator=generator).tolist()
            constants[GRAD_SCALE] = [1.0, 1 - 2.0**-24, 1024.0][i % 3]
            if i % 4 == 1:
                constants[:2] = [0.0, 0.0]  # without weight decay, whatever its index
            states = [awkward(n, generator, positive=k > 1) for k in range(row.most)]
            param = None if i % 4 == 3 else torch.zeros(n, dtype=DTYPES[(i // 3) % 3])
            yield UpdateRow(awkward(n, generator).to(grad_dtype), DTYPES[(i + 1) % 3], states, param, constants)


def edge_rows(row, seeds):
    """Yield parameters with products and quotients just below 2^-126."""
    for seed in seeds:
        for constants, states, grad in at_the_edge(row, seed):
            yield UpdateRow(grad, torch.float32, states, None, constants.tolist())


def moved(row, device, shift):
    """Return a copy on `device` that begins `shift` elements after an aligned address, among other elements."""

    def copied(t):
        return torch.full((len(t) + 16,), 7.0, dtype=t.dtype, device=device)[shift : shift + len(t)].copy_(t)

    param = None if row.param is None else copied(row.param)
    return row._replace(grad=copied(row.grad), states=[copied(t) for t in row.states], param=param)


def surroundings(row):
    """Return the elements around all tensors of a row, which nothing may have changed."""
    tensors = [row.grad, *row.states, *([] if row.param is None else [row.param])]
    for t in tensors:
        whole = t.as_strided((len(t) + 16,), (1,), 0).cpu()
        yield torch.cat([whole[: t.storage_offset()], whole[t.storage_offset() + len(t) :]])


def differing(library, defines, row, cases):
    """Return how many of `cases` kernels update otherwise than the native engine, and the number of elements compared.

    `row`: the rule's row of RULE_ROWS.
    """
    device, number = library.device, RULES[row.name]
    nonfinite = torch.zeros((), dtype=torch.int64, device=device)
    cases = [*cases]
    there = [moved(case, device, shift=[0, 1, 4, 8, 3][i % 5]) for i, case in enumerate(cases)]
    for some in update.in_launches(there):
        update.launch_update(library, number, some, nonfinite, defines)
    wrong = compared = expected = 0
    for ours, case in zip(there, cases, strict=True):
        hyper = np.array([(number, case.constants)], HYPER)
        grad = case.grad.to(case.link_dtype)
        expected += int((~grad.isfinite()).sum())
        bindings.update(hyper, "scalar", grad, case.states[: row.updated], case.param)
        pairs = [*zip(ours.states, case.states, strict=True)]
        pairs += [] if case.param is None else [(ours.param, case.param)]
        wrong += any(not torch.equal(bits(a.cpu()), bits(b)) for a, b in pairs)
        wrong += any((t != 7.0).any().item() for t in surroundings(ours))
        compared += len(pairs) * len(grad)
    return wrong + (int(nonfinite) != expected), compared

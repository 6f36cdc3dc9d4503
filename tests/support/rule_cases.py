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


def moved(row, device, odd):
    """Return a copy on `device` whose tensors lie among infinities. All are aligned but tensor number `odd`."""
    tensors = [row.grad, *row.states, *([] if row.param is None else [row.param])]
    copies = []
    for k, t in enumerate(tensors):
        first = 5 if k == odd else 8
        room = torch.full((len(t) + 16,), torch.inf, dtype=t.dtype, device=device)
        copies.append(room[first : first + len(t)].copy_(t))
    return row._replace(
        grad=copies[0], states=copies[1 : 1 + len(row.states)], param=None if row.param is None else copies[-1]
    )


def is_alone(t):
    """Return whether nothing was written beside the elements of a tensor that moved() has made."""
    room, first = t.as_strided((len(t) + 16,), (1,), 0).cpu(), t.storage_offset()
    return bool(room[:first].isinf().all() and room[first + len(t) :].isinf().all())


def differing(library, defines, row, cases):
    """Return how many of `cases` kernels update otherwise than the native engine, and the number of elements compared.

    `row`: the rule's row of RULE_ROWS.
    """
    device, number = library.device, RULES[row.name]
    nonfinite = torch.zeros((), dtype=torch.int64, device=device)
    cases = [*cases]
    there = [moved(case, device, odd=i % 7) for i, case in enumerate(cases)]
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
        wrong += not all(is_alone(t) for t, _ in pairs)
        compared += len(pairs) * len(grad)
    return wrong + (int(nonfinite) != expected), compared

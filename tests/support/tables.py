"""The table of a step, for tests that drive an engine by themselves."""

import numpy as np

from csd_optim.bindings import DTYPE_CODES, PARAM


def step_table(grads, params):
    """A row for each parameter, which has its gradient in its own dtype; the first hyperparameters are for all."""
    table = np.zeros(len(params), PARAM)
    for row, grad, param in zip(table, grads, params, strict=True):
        row["grad"], row["param"] = grad.data_ptr(), param.data_ptr()
        row["grad_dtype"], row["param_dtype"] = DTYPE_CODES[grad.dtype], DTYPE_CODES[param.dtype]
    return table

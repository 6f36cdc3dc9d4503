"""Tables of a step, for tests that drive an engine directly."""

import numpy as np

from csd_optim.bindings import DTYPE_CODES, PARAM


def step_table(grads, params):
    """Return a table with a row per parameter. Gradients have the parameters' dtypes; hyperparameters are alike."""
    table = np.zeros(len(params), PARAM)
    for row, grad, param in zip(table, grads, params, strict=True):
        row["grad"], row["param"] = grad.data_ptr(), param.data_ptr()
        row["grad_dtype"], row["param_dtype"] = DTYPE_CODES[grad.dtype], DTYPE_CODES[param.dtype]
    return table

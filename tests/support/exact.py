"""A linear layer for tests that compare bits between runs in other threads, at other addresses, or on other ranks."""

import torch
from torch import nn


def sum_over(t, dim):
    """Return the sum over one dimension, in fp32 by elementwise additions: with the same bits on every device."""
    t, dtype = t.movedim(dim, 0).float(), t.dtype
    while len(t) > 1:
        half, odd = divmod(len(t), 2)
        rest, t = t[-1], t[:half] + t[half : 2 * half]
        if odd:
            t[0] += rest
    return t[0].to(dtype)


class Linear(nn.Linear):
    """The same function as torch's, by elementwise products and sums over one dimension.

    BLAS guarantees its bits only for the same number of threads and the same alignment. Of MKL on a Zen 4 both were
    seen: in a thread that is not the main one, where torch.set_num_threads() has no effect on MKL, it divided a product
    of 5 x 48 x 48 among two cores; and operands that are not aligned to 16 bytes, such as views of a bucket, had
    another kernel. A GPU adds in an order of its own.
    """

    def forward(self, x):
        return _Affine.apply(x, self.weight, self.bias)


class _Affine(torch.autograd.Function):
    """One node of the graph, as torch's has: backward reads what is saved before any gradient of the layer is final."""

    @staticmethod
    def forward(ctx, x, weight, bias):
        ctx.save_for_backward(x, weight)
        y = sum_over(x.unsqueeze(-2) * weight, -1)
        return y if bias is None else y + bias

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        x, rows = x.reshape(-1, x.shape[-1]), grad.reshape(-1, grad.shape[-1])
        of_x = sum_over(grad.unsqueeze(-1) * weight, -2) if ctx.needs_input_grad[0] else None
        of_weight = sum_over(rows.unsqueeze(-1) * x.unsqueeze(-2), 0) if ctx.needs_input_grad[1] else None
        return of_x, of_weight, sum_over(rows, 0) if ctx.needs_input_grad[2] else None

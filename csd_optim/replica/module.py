"""A torch module as the target of a replica. The only file here that needs torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ..errors import CSDValueError
from ..grad_modes import no_autograd, writable
from .versions import Tensor

Array = np.ndarray[Any, Any]
DTYPES = {torch.bfloat16: "BF16", torch.float16: "F16"}


class Module:
    """The parameters of a module, on any device. A parameter that is not contiguous is copied for each write."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._params = dict(module.named_parameters(remove_duplicate=False))

    def prepare(self, tensors: Sequence[Tensor]) -> None:
        names = {name for t in tensors for name in (t.name, *t.aliases)}
        if odd := names ^ self._params.keys():
            whose = "the model, and not in the version" if odd - names else "the version, and not in the model"
            raise CSDValueError(f"{len(odd)} parameters are in {whose}: {', '.join(sorted(odd)[:3])}")
        for t in tensors:
            p = self._params[t.name]
            if (DTYPES.get(p.dtype), tuple(p.shape)) != (t.dtype, t.shape):
                raise CSDValueError(
                    f"parameter {t.name} of the model is {p.dtype} {tuple(p.shape)}, that of the version {t.dtype} "
                    f"{t.shape}: make the model alike first, as by model.bfloat16()"
                )
            if any(self._params[alias] is not p for alias in t.aliases):
                raise CSDValueError(f"{t.name} and {', '.join(t.aliases)} are one parameter in the version: tie them")

    @no_autograd()
    def exchange(self, tensor: Tensor, indices: Array, values: Array) -> Array:
        p = writable(self._params[tensor.name])
        flat = p.contiguous().view(-1).view(torch.int16)
        at, new = torch.from_numpy(indices).to(p.device), _int16(values).to(p.device)
        before: Array = flat[at].cpu().numpy().view(np.uint16)
        flat[at] = new
        self._keep(p, flat)
        return before

    @no_autograd()
    def set(self, tensor: Tensor, first: int, values: Array) -> None:
        p = writable(self._params[tensor.name])
        flat = p.contiguous().view(-1).view(torch.int16)
        flat[first : first + len(values)] = _int16(values).to(p.device)
        self._keep(p, flat)

    def read(self, tensor: Tensor, first: int, n: int) -> Array:
        flat = self._params[tensor.name].detach().contiguous().view(-1).view(torch.int16)
        found: Array = flat[first : first + n].cpu().numpy().view(np.uint16)
        return found

    @staticmethod
    def _keep(p: torch.Tensor, flat: torch.Tensor) -> None:
        if not p.is_contiguous():
            p.copy_(flat.view(p.dtype).view(p.shape))


def _int16(values: Array) -> torch.Tensor:
    return torch.from_numpy(values.astype(np.int16) if not values.flags.writeable else values.view(np.int16))

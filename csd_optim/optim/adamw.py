"""CSDAdam, with the arguments of torch's AdamW, and CSDAdamL2, with those of torch's Adam."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import Adam, AdamW
from typing_extensions import Unpack

from ..errors import CSDValueError
from . import rules
from .optimizer import CSDOptimizer, takes_options
from .options import Options


class _AdamOrAdamW(AdamW):
    """AdamW with Adam's switch `decoupled_weight_decay`, which is kept in `defaults`."""

    def __init__(self, *args: Any, decoupled_weight_decay: bool, **kwargs: Any) -> None:
        Adam.__init__(self, *args, decoupled_weight_decay=decoupled_weight_decay, **kwargs)

    def __setstate__(self, state: dict[str, Any]) -> None:
        # Not AdamW's, which sets the switch in all groups: groups with Adam's rule have their own value.
        Adam.__setstate__(self, state)  # type: ignore[no-untyped-call]
        is_adamw = {**vars(self), **state}["defaults"].get("decoupled_weight_decay", True)
        own = rules.ADAMW if is_adamw else rules.ADAM
        for group in self.param_groups:
            if rules.rule_of(own, group) is not rules.ADAM:
                group["decoupled_weight_decay"] = True


class CSDAdam(CSDOptimizer, _AdamOrAdamW):
    """AdamW whose fp32 weights and moments live on computational storage devices.

    One step, three overlapped phases, tile by tile::

        push    gradients go to the device that owns the tile, in the parameter's precision
        update  the device reads the tile's state, applies AdamW's rule in fp32, writes the state to its other slot
        pull    the updated parameters come back

    Positional arguments, defaults and results are those of :class:`torch.optim.AdamW`; ``foreach`` and ``fused`` are
    accepted and ignored, ``capturable`` and ``differentiable`` are refused.

    Args:
        params: parameters of dtype float32, float16, bfloat16 or complex64, on the CPU or on the accelerator. A group
            may have another ``rule``, such as ``"lion"``: docs/optimizers.md.
        weight_decay: None means AdamW's default, 1e-2; or Adam's, 0, with ``decoupled_weight_decay=False``.
        decoupled_weight_decay: False makes it :class:`torch.optim.Adam`: weight decay is added to the gradient.
        devices: one device string or several: a directory (an emulated CSD, durable), ``"file:"`` (an emulated CSD in
            a nameless file that disappears with the process), ``"xrt:0"`` (a SmartSSD), ``"ram:"``, ``"null:"``. If
            ``"auto"`` is among them, the states are divided so that all devices finish a step at the same time. None
            takes ``CSD_OPTIM_DEVICES``, or ``"file:"`` if that is not set.
        grad_dtype: push gradients rounded to this dtype (float16, bfloat16 or float32) instead of their own. Its name
            will do, as in configuration files: "bfloat16", "torch.bfloat16" or "bf16".
        topk: send only this share of each gradient, the entries of largest magnitude (0.01 is 1 %); other entries count
            as zero. Parameters with less than two dimensions or 4096 elements are sent dense, unless their parameter
            group has its own ``topk``; from 0.5 on all are sent dense. None: all are sent dense.
        error_feedback: with `topk`, add the part of a gradient that is not sent to the next gradient. This residual is
            kept in bfloat16 beside the parameter, 2 bytes per element, and is in ``state[p]["residual"]``.
        topk_warmup: the first so many steps are dense; over as many steps again, the share falls from 1 to `topk`.
        max_grad_norm: scale gradients so that their global 2-norm, in fp32, is at most this.
        resume: go on from the last committed step of the store in these directories, with its parameters,
            hyperparameters, states and `user_state`. Where there is no store yet, a new one is created.
        resume_from: with ``resume=True``, the directories of all devices of all ranks of an earlier run, on any number
            of ranks, or a snapshot. Each rank makes its own stores from these, in its `devices`, and goes on from
            there. Old stores are only read. If the new stores exist already, the run continues from them.
        overwrite: erase a store that a named directory already holds.
        tile_size: elements per tile (unit of I/O and update), rounded up to whole pages; None: chosen automatically.
        process_group: the ranks that train together; None: all ranks of torch.distributed, if initialised. All ranks
            call step() alike, and their steps are committed together.
        sharded: divide parameters that the ranks hold in common (plain ones, as with DDP) among the ranks: each rank
            keeps and updates the states of its share, and receives the rest of the parameters from the others. False:
            each rank keeps and updates everything. The same goes for the local tensors that replicas of DTensors hold
            in common (HSDP). Shards of FSDP and DTensors that no other rank holds are always updated by their rank. If
            neither this argument nor ``resume=True`` is passed, rank 0 warns in its first step that it alone cannot
            save all states.
        state_dtype: "fp32", or "8bit" for states in 5 bytes per 16-bit parameter instead of 12 (6 per fp32 parameter).
            8-bit states are rounded stochastically at each step, by a hash of step and element: the same bits on every
            machine, but not AdamW's; see docs/8-bit-states.md. A parameter group may have its own ``state_dtype``. A
            store keeps the ``state_dtype`` with which it was created.

    The environment variable ``CSD_OPTIM_OPTIONS``, such as ``state_dtype=8bit,resume=1``, sets arguments from
    `grad_dtype` on that are not passed: docs/settings.md.

    Raises:
        CSDValueError, CSDTypeError: an argument is wrong (each is also the builtin).
        CSDStoreExistsError: a directory already holds a store.
        CSDStoreError: the store is damaged, incomplete, or of another model, and cannot be resumed.
        CSDBusyError: a store is in use. (With `resume` or `overwrite`, the new optimizer replaces an older one of the
            same model in this process: see docs/resume.md.)
        CSDOSError: from the constructor or step(): disk full, I/O error. The step is undone.
        CSDValueError, from step(): a hyperparameter is no finite number, or with `max_grad_norm` the norm of the
            gradients is NaN. Nothing has changed.

    ``state[p]`` holds ``step``, ``exp_avg``, ``exp_avg_sq`` (``max_exp_avg_sq`` with amsgrad) and ``master``, as plain
    CPU tensors that are memory-mapped from the devices: they cost no memory until read. Read ``optimizer.state`` again
    after a step rather than keeping a tensor from before. 8-bit states are decoded into memory when they are accessed,
    and that memory is freed by the next step; values written in between count, rounded to the nearest code.

    In named directories every step is committed in the background, while training goes on: `committed_step` is the last
    durable step. `user_state`, a small dict of plain values and tensors (epoch, position in the data, RNG state), is
    committed with the step() that follows its assignment. `resumed_user_states` is the list of resumed values: with
    `resume_from` all old ranks', by rank, until the first step; else this process's alone.

    A value that is written to a parameter from outside becomes its new master, if torch counts the write: write under
    ``torch.no_grad()``. Writes through ``p.data`` or NumPy are noticed for fp32 parameters in host memory only, and not
    if a device is a SmartSSD. For DTensors in host memory such writes are noticed with 16 bits, too, because torch does
    not count writes by ``torch._foreach_*`` to a DTensor. With 8-bit states they are noticed for all 16-bit parameters
    in host memory, unless `grad_dtype` is another dtype.

    Rules: Loshchilov & Hutter, "Decoupled Weight Decay Regularization", 2019, algorithm 2, see native/include/adamw.h;
    Kingma & Ba, "Adam", 2015, algorithm 1, with weight decay added to the gradient, see native/include/adam.h.
    """

    _rule = rules.ADAMW
    _sparse_alternatives = "SparseAdam"

    @takes_options
    def __init__(
        self,
        params: Any,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float | torch.Tensor, float | torch.Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float | None = None,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        decoupled_weight_decay: bool = True,
        **options: Unpack[Options],
    ) -> None:
        if not decoupled_weight_decay:
            self._rule = rules.ADAM
        if weight_decay is None:
            weight_decay = 1e-2 if decoupled_weight_decay else 0
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            amsgrad,
            maximize=maximize,
            foreach=foreach,
            capturable=capturable,
            differentiable=differentiable,
            fused=fused,
            decoupled_weight_decay=decoupled_weight_decay,
            **options,
        )

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "defaults" in state and not state["defaults"].get("decoupled_weight_decay", True):
            self._rule = rules.ADAM  # a copy or an unpickled optimizer, without __init__
        super().__setstate__(state)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        decoupled = "rule" in param_group or param_group.get("decoupled_weight_decay", True)
        if self._rule is rules.ADAMW and not decoupled:
            raise CSDValueError(
                "Invalid decoupled_weight_decay of a group: False; give it to CSDAdam, then groups may have their own, "
                'or give the group "rule": "adam"'
            )
        super().add_param_group(param_group)


class CSDAdamL2(CSDAdam):
    """Adam with L2 regularization, torch's Adam: weight decay, 0 by default, is added to the gradient.

    The same as ``CSDAdam(..., decoupled_weight_decay=False)``, for code that takes a class. Arguments, defaults and
    results are as with :class:`torch.optim.Adam`, plus the keyword arguments of :class:`CSDAdam` from `devices` on. The
    name is from Loshchilov & Hutter, 2019, algorithm 2, since ``CSDAdam`` is AdamW.
    """

    _rule = rules.ADAM

    @takes_options
    def __init__(
        self,
        params: Any,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float | torch.Tensor, float | torch.Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        amsgrad: bool = False,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        decoupled_weight_decay: bool = False,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            amsgrad,
            maximize=maximize,
            foreach=foreach,
            capturable=capturable,
            differentiable=differentiable,
            fused=fused,
            decoupled_weight_decay=decoupled_weight_decay,
            **options,
        )


CSDAdam.__module__ = CSDAdamL2.__module__ = "csd_optim"  # the module from which users import: for repr and pickles

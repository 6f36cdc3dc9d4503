"""torchtitan's container of optimizers, which also takes the optimizers of csd_optim by name.

torchtitan chooses from a closed list of names, in a static method of its container (0.3). Its configuration is Python:
one line of it can name the container below instead::

    optimizer=csd_adam(lr=3e-4, devices="/mnt/nvme0")
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..errors import CSDValueError
from ..optim.classes import OPTIMIZERS
from ..optim.options import Options

if TYPE_CHECKING:
    OptimizersContainer = object
    _Config = object
    ParamGroupConfig: Any
else:
    from torchtitan.components.optimizer import OptimizersContainer, ParamGroupConfig

    _Config = OptimizersContainer.Config

_OF_A_GROUP = ("topk", "state_dtype")  # the options that a parameter group may have


class CSDOptimizersContainer(OptimizersContainer):
    """OptimizersContainer whose `optimizer_name` may be a class of csd_optim, such as "CSDAdam".

    A group's `optimizer_kwargs` are hyperparameters; options of the optimizer, such as `devices`, belong in
    `optimizer_factory_kwargs_by_name`. Raises CSDValueError where they are mixed up, and for the implementation
    "fused_opt_states_bf16", which puts states of its own in the optimizer.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(_Config):
        """OptimizersContainer.Config, for this container."""

    def __init__(self, config: Any, *, model_parts: Any) -> None:
        ours = [group for group in config.param_groups if group.optimizer_name in OPTIMIZERS]
        for group in ours:
            if wrong := [k for k in group.optimizer_kwargs if k in Options.__annotations__ and k not in _OF_A_GROUP]:
                raise CSDValueError(
                    f"Invalid optimizer_kwargs: {wrong[0]!r} is an option of the optimizer, not of a group; write "
                    f"optimizer_factory_kwargs_by_name={{{group.optimizer_name!r}: {{{wrong[0]!r}: ...}}}}"
                )
        if ours and config.implementation == "fused_opt_states_bf16":
            raise CSDValueError(
                f"Invalid implementation: {config.implementation!r}; states of {ours[0].optimizer_name} are on its "
                "devices. For smaller ones use its option state_dtype='8bit', and implementation='for-loop'"
            )
        container: Any = super()
        container.__init__(config, model_parts=model_parts)

    @staticmethod
    def _resolve_optimizer_factory(name: str) -> Callable[..., Any]:
        closed: Any = OptimizersContainer
        factory: Callable[..., Any] = OPTIMIZERS.get(name) or closed._resolve_optimizer_factory(name)
        return factory


def csd_adam(
    *,
    lr: float = 3e-4,
    betas: tuple[float, float] = (0.9, 0.95),
    eps: float = 1e-8,
    weight_decay: float = 0.1,
    **options: Any,
) -> Any:
    """Return the configuration of CSDAdam for all parameters, in place of torchtitan's `default_adamw(lr=...)`.

    The defaults are those of `default_adamw`. `options`: the keyword arguments of CSDAdam from `devices` on.
    """
    hyper = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
    group = ParamGroupConfig(pattern=r".*", optimizer_name="CSDAdam", optimizer_kwargs=hyper)
    config: Any = CSDOptimizersContainer.Config
    return config(param_groups=[group], optimizer_factory_kwargs_by_name={"CSDAdam": options})

"""A plugin of Axolotl: with `plugins: [csd_optim.integrations.axolotl.CSDOptimPlugin]` a YAML file trains with CSDAdam.

Axolotl chooses among a closed list of optimizers, and never calls the `create_optimizer` of a plugin (0.19): training
would go on with AdamW, unsaid. What counts is the trainer's `optimizer_cls_and_kwargs`, from which it makes the
optimizer when training begins.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..errors import CSDRuntimeError, CSDValueError
from ..optim.adamw import CSDAdam

if TYPE_CHECKING:
    BasePlugin = object
    BaseModel = object
    TrainerCallback = object
else:
    from axolotl.integrations.base import BasePlugin
    from pydantic import BaseModel
    from transformers import TrainerCallback

# What `optimizer:` may say: AdamW, which Axolotl fills in. Any other name asks for something else than this plugin.
_ADAMW = (None, "adamw_torch", "adamw_torch_fused")


class CSDOptimArgs(BaseModel):
    """The key that the plugin adds to Axolotl's YAML file."""

    csd_optim: dict[str, Any] | None = None  # arguments of CSDAdam, such as devices and state_dtype


class CSDOptimPlugin(BasePlugin):
    """Makes Axolotl's trainer train with CSDAdam.

    Learning rate, betas, epsilon and weight decay are those of the YAML file. Arguments of CSDAdam, such as `devices`,
    are below its key `csd_optim`.
    """

    def get_input_args(self) -> str:
        """Return where Axolotl finds the keys that the plugin adds."""
        return f"{__name__}.{CSDOptimArgs.__name__}"

    def post_trainer_create(self, cfg: Any, trainer: Any) -> None:
        """Set the trainer's optimizer. `cfg`: Axolotl's configuration; `trainer`: a transformers.Trainer.

        Raises CSDValueError if the configuration asks for another optimizer, or for DeepSpeed, which has its own; and
        CSDRuntimeError if the trainer already has one.
        """
        if cfg.optimizer not in _ADAMW:
            raise CSDValueError(
                f"optimizer: {cfg.optimizer} and the plugin CSDOptimPlugin exclude each other: leave one of them out, "
                "or write optimizer: adamw_torch"
            )
        if cfg.deepspeed:
            raise CSDValueError("deepspeed: has an optimizer of its own; leave it or the plugin CSDOptimPlugin out")
        if trainer.optimizer is not None or trainer.optimizer_cls_and_kwargs is not None:
            raise CSDRuntimeError("CSDOptimPlugin: this trainer already has an optimizer, which it would go on with")
        args = trainer.args
        options = {"lr": args.learning_rate, "betas": (args.adam_beta1, args.adam_beta2), "eps": args.adam_epsilon}
        trainer.optimizer_cls_and_kwargs = (CSDAdam, {**options, **(cfg.csd_optim or {})})
        if not trainer.is_fsdp_enabled:  # with FSDP each rank saves its own part
            trainer.add_callback(_Consolidate())


class _Consolidate(TrainerCallback):
    """Gathers the states of all ranks before a checkpoint, which the trainer writes on rank 0."""

    def on_train_begin(self, args: Any, state: Any, control: Any, optimizer: Any, **_: Any) -> None:
        if args.world_size > 1:
            optimizer.optimizer.consolidate_state_dict(to=None)  # no warning is needed that somebody has to

    def on_step_end(self, args: Any, state: Any, control: Any, optimizer: Any, **_: Any) -> None:
        if control.should_save and not args.save_only_model and args.world_size > 1:
            optimizer.optimizer.consolidate_state_dict()

    on_epoch_end = on_step_end

"""An optimizer's step statistics in the log of a trainer: `log_stats(trainer)`.

A trainer's library is imported only when such a trainer is passed in.
"""

from __future__ import annotations

from typing import Any

from .errors import CSDTypeError
from .optim.optimizer import CSDOptimizer

_LOGGED = (
    "push_bytes",
    "pull_bytes",
    "flash_read_bytes",
    "flash_write_bytes",
    "written_bytes",
    "buffer_bytes",
    "nonfinite_grads",
    "grad_norm",
)


def scalars(stats: dict[str, Any], prefix: str = "csd_optim") -> dict[str, float]:
    """Return what is worth logging of an optimizer's stats(), by names such as "csd_optim/step_seconds".

    Bytes, and seconds on the busiest device, are those of the last step; `written_bytes` counts since the stores were
    made, and `days_left` is that of the device that wears out first. Joules are there if the machine counts them.
    """
    found = {name: stats[name] for name in _LOGGED if name in stats}
    found |= {f"{part}_seconds": seconds for part, seconds in stats["seconds"].items()}
    if overlap := stats.get("overlap"):
        found["waited_seconds"] = overlap["waited"]
    if joules := stats["energy"]["machine_joules"]:
        found |= {f"machine_{part}_joules": value for part, value in joules.items()}
    if left := [d["days_left"] for d in stats["devices"] if d["days_left"] is not None]:
        found["days_left"] = min(left)
    return {f"{prefix}/{name}": float(value) for name, value in found.items()}


def log_stats(trainer: Any) -> None:
    """Make a trainer add scalars() of its optimizers to everything it logs from now on.

    `trainer`: transformers.Trainer or a subclass, such as TRL's; or Lightning's Trainer. Each time it logs, it waits
    until the last step is on the devices: see stats(). Raises CSDTypeError for any other trainer; logging raises it
    later if the trainer has none of our optimizers.
    """
    if hasattr(trainer, "callback_handler"):
        # It goes first: callbacks that report to TensorBoard and the like send what the logs hold when they are called.
        trainer.callback_handler.callbacks.insert(0, _hugging_face())
    elif hasattr(trainer, "log_every_n_steps"):
        trainer.callbacks.append(_lightning(type(trainer)))
    else:
        raise CSDTypeError(
            f"log_stats() takes a Trainer of transformers or Lightning, not {type(trainer).__name__}; elsewhere log "
            "scalars(optimizer.stats()) yourself"
        )


def _unwrapped(optimizer: Any) -> CSDOptimizer:
    """Unwrap the optimizer of a trainer. Raises CSDTypeError if it is not one of csd_optim."""
    while not isinstance(optimizer, CSDOptimizer):
        if not hasattr(optimizer, "optimizer"):
            raise CSDTypeError(f"log_stats(): the trainer's optimizer is {type(optimizer).__name__}, none of csd_optim")
        optimizer = optimizer.optimizer
    return optimizer


def _hugging_face() -> Any:
    from transformers import TrainerCallback

    class LogStats(TrainerCallback):  # type: ignore[misc]
        def on_log(
            self, args: Any, state: Any, control: Any, logs: Any = None, optimizer: Any = None, **_: Any
        ) -> None:
            if logs is not None and optimizer is not None and "loss" in logs:  # not an evaluation or the final summary
                logs |= scalars(_unwrapped(optimizer).stats())

    return LogStats()


def _lightning(trainer: type) -> Any:
    """Return a callback of `lightning` or `pytorch_lightning`, whichever the trainer is from.

    Neither package accepts the other's callbacks.
    """
    import importlib

    library = "pytorch_lightning" if trainer.__module__.startswith("pytorch_lightning") else "lightning.pytorch"
    callback: Any = importlib.import_module(library).Callback

    class LogStats(callback):  # type: ignore[misc]
        def __init__(self) -> None:
            self._logged = 0  # the last step that was logged

        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            step = trainer.global_step
            if step == self._logged or step % trainer.log_every_n_steps:
                return
            self._logged = step
            several = len(trainer.optimizers) > 1
            for i, optimizer in enumerate(trainer.optimizers):
                found = scalars(_unwrapped(optimizer).stats(), f"csd_optim/{i}" if several else "csd_optim")
                for logger in trainer.loggers:
                    logger.log_metrics(found, step=step)

    return LogStats()

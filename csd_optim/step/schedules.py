"""Makes torch's learning-rate schedules continue from the restored rates between a resume and the first step."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import Any
from weakref import WeakKeyDictionary

from torch.optim.lr_scheduler import LRScheduler

from ..errors import CSDWarning, users_stacklevel
from ..params.groups import Groups, restore_hyperparameters

_CYCLED = ("betas", "momentum")  # what CyclicLR and OneCycleLR change besides the rate


@dataclass
class _Seen:
    """What is known of a schedule that was constructed after the resume."""

    left: list[float]  # the rates in the groups when the schedule last read them, at the end of its step
    epoch: int  # its `last_epoch` at that time
    is_told: bool = False  # the program passed the epoch to its constructor
    judged: object = None  # its `_last_lr` when it was last examined
    is_at_step: bool = False  # the schedule was loaded, or has left the restored rates in the groups


class ResumedSchedules:
    """Keeps the rates of a resumed optimizer right while a program constructs and loads its schedules.

    Many schedules compute the next rate from the one in the group. torch expects that the optimizer's state is loaded
    after the schedule was constructed, since the constructor sets the rate of the first epoch; but a store is resumed
    before. So the groups call note_read() whenever somebody reads them. A new schedule starts from `initial_lr`, as in
    a run from the beginning. Once its state was loaded (`_last_lr` is then not the rate that the schedule left in the
    groups), the groups get the rate from which the schedule continues.
    """

    def __init__(self, restored: Groups) -> None:
        """`restored`: the hyperparameters of each group in the store, as hyperparameters_of() returns them."""
        self._restored = restored
        self._rates = _numbers(group["lr"] for group in restored)
        self._seen: WeakKeyDictionary[LRScheduler, _Seen] = WeakKeyDictionary()  # in the order of construction
        self._has_begun = False  # one of several schedules has continued from the restored rates

    def note_read(self, groups: Groups, frame: FrameType | None) -> None:
        """Catch up with new and loaded schedules, before code in `frame` reads the groups."""
        acting = [*_acting(frame)]
        for schedule, epoch in acting:
            if schedule not in self._seen:
                if epoch == -1 and not self._seen and self._rates_of(groups) == self._rates:
                    self._set(groups, _numbers(group.get("initial_lr", group["lr"]) for group in self._restored))
                self._seen[schedule] = _Seen(self._rates_of(groups), _epoch(schedule), is_told=epoch != -1)
        outer = self._outer(acting[-1][0]) if acting else None
        self._follow_loads(groups, outer)
        if not acting:
            self._correct_told(groups)
        rates = self._rates_of(groups)
        for schedule in [*(schedule for schedule, _ in acting), *([outer] if outer else [])]:
            seen = self._seen[schedule]
            seen.left, seen.epoch = rates, _epoch(schedule)
            seen.is_at_step |= rates == self._rates

    def restore(self, groups: Groups) -> None:
        """Give the groups, which were just restored, the rates of a schedule that has continued since."""
        outermost = self._outermost()
        if len(outermost) == 1 and self._is_at_step(outermost[0]):
            self._go_on(groups, outermost[0])

    def end(self, groups: Groups) -> None:
        """At the first step, warn of schedules that do not continue from the store's rates."""
        now = self._rates_of(groups)
        for schedule in self._outermost() if any("initial_lr" in group for group in self._restored) else ():
            if not self._is_at_step(schedule):
                name = type(schedule).__name__
                k = next((k for k, (a, b) in enumerate(zip(now, self._rates, strict=True)) if a != b), 0)
                warnings.warn(
                    f"{name} begins anew, but the store was trained with a schedule: the learning rate of group {k} is "
                    f"{now[k]} now, and was {self._rates[k]} in the last step of the store. For {name} to go on, call "
                    "its load_state_dict() once it is made, as docs/resume.md shows, or its step() once for each step "
                    "that was taken",
                    CSDWarning,
                    users_stacklevel(),
                )

    def _follow_loads(self, groups: Groups, stepping: LRScheduler | None) -> None:
        """Set the rates from which newly loaded schedules continue. `stepping`: the schedule that is in its step()."""
        outermost = self._outermost()
        loaded = [schedule for schedule in outermost if self._is_loaded(schedule, steps=schedule is stepping)]
        if not loaded or (len(outermost) > 1 and stepping is None and len(loaded) < len(outermost)):
            return
        for schedule in loaded:
            seen = self._seen[schedule]
            seen.judged, seen.left, seen.is_at_step = vars(schedule)["_last_lr"], self._last_rates(schedule), True
        if len(outermost) > 1 and self._has_begun:
            return
        self._has_begun = True
        # It is unknown which of several schedules has set the rate last, but the store has that rate.
        if len(outermost) > 1 and (stepping or any(self._last_rates(schedule) == self._rates for schedule in loaded)):
            self._set(groups, self._rates)
        else:
            self._go_on(groups, loaded[-1], stepping)

    def _correct_told(self, groups: Groups) -> None:
        """Step the schedules that were constructed with the next step's epoch, but took the restored rate for its rate.

        In torch the restored rate is right if the optimizer's state was saved after the schedule's step().
        """
        for schedule, seen in self._seen.items():
            if seen.is_told and hasattr(schedule, "_get_closed_form_lr") and schedule in self._outermost():
                seen.is_told = False
                seen.is_at_step = _has_closed_form_rates(schedule, rates := self._rates_of(groups))
                if not seen.is_at_step:
                    schedule.last_epoch -= 1
                    seen.is_at_step = _has_closed_form_rates(schedule, rates)
                    schedule.last_epoch += 1
                    if seen.is_at_step:
                        _repeat_step(schedule)

    def _is_at_step(self, schedule: LRScheduler) -> bool:
        """Return whether the schedule is probably at the store's last step, or right after it."""
        seen = self._seen[schedule]
        is_told = seen.is_told and not any(_is_part(other, schedule) for other in self._seen)  # SequentialLR forgets it
        return seen.is_at_step or is_told or _epoch(schedule) != seen.epoch

    def _rates_of(self, groups: Groups) -> list[float]:
        """Return the rates of those groups that the store has, too."""
        return _numbers(group["lr"] for group in groups[: len(self._rates)])

    def _last_rates(self, schedule: LRScheduler) -> list[float]:
        return _numbers(vars(schedule)["_last_lr"][: len(self._rates)])

    def _is_loaded(self, schedule: LRScheduler, *, steps: bool) -> bool:
        """Return whether the schedule's state was loaded since the last call. `steps`: its step() is running."""
        seen, last = self._seen[schedule], vars(schedule).get("_last_lr")
        if last is None or last is seen.judged:
            return False
        if self._last_rates(schedule) != seen.left or _epoch(schedule) not in (seen.epoch, seen.epoch + steps):
            return True
        seen.judged = last
        return False

    def _go_on(self, groups: Groups, schedule: LRScheduler, stepping: LRScheduler | None = None) -> None:
        """Set the rates, and what a cycling schedule changes besides, as this schedule's last step did."""
        self._set(groups, self._last_rates(schedule))
        if _cycles(schedule) and not stepping:
            _repeat_step(schedule)

    def _set(self, groups: Groups, rates: Sequence[float]) -> None:
        cycled = _CYCLED if any(map(_cycles, self._seen)) else ()
        for group, kept, rate in zip(groups, self._restored, rates, strict=False):
            restore_hyperparameters(group, {"lr": rate, **{name: kept[name] for name in cycled if name in kept}})

    def _outer(self, schedule: LRScheduler) -> LRScheduler:
        """Return the outermost schedule that drives `schedule`, or `schedule` itself."""
        return next((self._outer(other) for other in self._seen if _is_part(schedule, other)), schedule)

    def _outermost(self) -> list[LRScheduler]:
        return [*dict.fromkeys(map(self._outer, self._seen))]


def _acting(frame: FrameType | None) -> Iterator[tuple[LRScheduler, int]]:
    """Yield torch's schedules whose methods run in this frame or further out, each with `last_epoch` or -1."""
    while frame:
        if frame.f_globals.get("__name__") == LRScheduler.__module__:
            found = frame.f_locals.get("self")
            if isinstance(found, LRScheduler):
                yield found, frame.f_locals.get("last_epoch", -1)
        frame = frame.f_back


def _is_part(schedule: LRScheduler, other: LRScheduler) -> bool:
    """Return whether an attribute of `other` is this schedule, or a list with it, as in ChainedScheduler."""
    values = vars(other).values()
    return any(v is schedule or (isinstance(v, (list, tuple)) and any(w is schedule for w in v)) for v in values)


def _epoch(schedule: LRScheduler) -> int:
    return int(getattr(schedule, "last_epoch", 0))  # ChainedScheduler has none


def _cycles(schedule: LRScheduler) -> bool:
    return bool(getattr(schedule, "cycle_momentum", False))


def _has_closed_form_rates(schedule: Any, rates: Sequence[float]) -> bool:
    """Return whether these are the rates of the schedule's epoch, up to rounding."""
    return all(map(partial(math.isclose, rel_tol=1e-6), _numbers(schedule._get_closed_form_lr()), rates))


def _repeat_step(schedule: Any) -> None:
    """Repeat the last step of a schedule that computes everything from the epoch."""
    count = schedule._step_count
    schedule.last_epoch -= 1
    schedule.step()
    schedule._step_count = count


def _numbers(rates: Iterable[Any]) -> list[float]:
    """Return learning rates as numbers; old stores have lists of one number."""
    return [float(rate[0] if isinstance(rate, list) else rate) for rate in rates]

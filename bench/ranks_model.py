"""A model of how long a step takes with optimizer ranks (owners), which update for trainers over a network.

    Fleet        the number of trainers and owners, and the rates of their links
    WAYS         the stages that a bucket of gradients passes in each way: collectives, links, drives
    simulate()   a discrete-event simulation of the buckets
    at_least()   bytes divided by rates: a lower bound of any simulation

All trainers do the same at the same time, and so do all owners. So one of each is simulated, with its own link, which
reaches its rate in both directions at once. docs/plan.md says what is left out. Sizes are in bytes, times in seconds.
"""

from __future__ import annotations

import heapq
import math
import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from csd_optim.devices.units import parse_rate
from csd_optim.distributed.buckets import TARGET_BUCKETS
from csd_optim.errors import CSDValueError
from csd_optim.planning.advice import PlanRequest, check, rates_of
from csd_optim.planning.model import ITEM_BYTES, Host, predict
from csd_optim.rates import Rates

BUCKET_BYTES = 25e6  # DDP's
MOST = 256  # buckets at most: more change nothing but the time of the simulation
MOST_OWNERS = 16  # of each trainer
HIDDEN = 1.05  # owners are enough if an iteration takes at most so many times what it takes with infinitely fast owners
MOST_DRIVES = 64  # the search for enough drives in a trainer ends here

TRAINER_OUT, TRAINER_IN = "trainer out", "trainer in"
OWNER_IN, OWNER_OUT = "owner in", "owner out"
DRIVES, CPU, COMPUTE = "drives", "update", "compute"
LINKS = (TRAINER_OUT, TRAINER_IN, OWNER_IN, OWNER_OUT)


@dataclass(frozen=True)
class Fleet:
    """How many trainers and owners there are, and how fast their links are."""

    trainers: int
    owners: int
    trainer_link: float  # bytes per second each way; math.inf: no bound
    owner_link: float

    @property
    def link(self) -> dict[str, float]:
        return {name: self.trainer_link if name.startswith("trainer") else self.owner_link for name in LINKS}

    @property
    def of_owner(self) -> float:
        """How many trainers' states the owner has that has most of them."""
        if self.owners <= self.trainers:
            return math.ceil(self.trainers / self.owners)
        return 1 / (self.owners // self.trainers)


@dataclass(frozen=True)
class Stage:
    """A stage of a way, with what all buckets together need there: bytes over links, seconds of other resources."""

    name: str
    bytes: dict[str, float]
    seconds: dict[str, float]
    after: int | None = None  # the earlier stage that all buckets must have passed before this one begins; None: none
    window: int | None = None  # how many buckets may be in this stage at the same time; None: any number

    def busy(self, fleet: Fleet) -> dict[str, float]:
        """Return the seconds that the stage keeps each resource busy."""
        return {**{name: n / fleet.link[name] for name, n in self.bytes.items()}, **self.seconds}


# ---- ways ------------------------------------------------------------------------
#
# Gradients are reduced while backward goes on. In step(), when all are reduced, each bucket proceeds as soon as it can.
ROUNDS = 3  # buckets that csd_optim.push reduces at the same time


def _collective(name: str, r: PlanRequest, fleet: Fleet, times: int) -> Stage:
    """Return a ring collective of N trainers, which moves `times` (N - 1) / N of all bytes.

    `times` is 1 for a reduce-scatter or an all-gather, 2 for an all-reduce.
    """
    n = times * size(r) * (fleet.trainers - 1) / fleet.trainers
    return Stage(name, {TRAINER_OUT: n, TRAINER_IN: n}, {})


def _update(r: PlanRequest, share: float, after: int | None = None) -> Stage:
    """Return the stage in which machines update, each a `share` of all parameters."""
    device: Rates = r.drive if r.on == "drive" else r.csd
    found = predict(
        "csdadam",
        r.params * share,
        r.devices,
        device,
        Host(update=r.host.update, link=r.host.link),
        item_bytes=ITEM_BYTES[r.dtype],
        state_dtype=r.state_dtype,
        sections=r.optimizer.sections,
    ).stages
    drives = max(seconds for name, seconds in found.items() if name != "update")
    return Stage("update", {}, {DRIVES: drives, CPU: found["update"]}, after)


def parse_link(text: str) -> float:
    """Parse `25Gb/s`, `400Mbit/s`, or with a large B `3GB/s`, into bytes per second. Raises CSDValueError."""
    match = re.fullmatch(r"\s*([0-9.]+ ?[kKMGT]?)(b|bit|B)/s\s*", text)
    try:
        return parse_rate(f"{match[1]}B/s") / (1 if match[2] == "B" else 8) if match else parse_rate("")
    except CSDValueError:
        raise CSDValueError(f"Invalid rate: {text!r}; write for example 25Gb/s, or 3GB/s for bytes") from None


def size(r: PlanRequest) -> float:
    """Return the bytes of all gradients, which are also those of all parameters."""
    return float(ITEM_BYTES[r.dtype] * r.params)


def _all_reduce(r: PlanRequest, fleet: Fleet) -> Stage:
    return _collective("all-reduce", r, fleet, 2)


def _reduce_scatter(r: PlanRequest, fleet: Fleet) -> Stage:
    return replace(_collective("reduce-scatter", r, fleet, 1), window=ROUNDS)


def _local(r: PlanRequest, fleet: Fleet) -> list[Stage]:
    return [_update(r, 1 / fleet.trainers, after=0), _collective("all-gather", r, fleet, 1)]


def _owners(r: PlanRequest, fleet: Fleet) -> list[Stage]:
    """Return what follows the reduction: each trainer pushes its rows to owners, and gets their parameters back."""
    rows, many = size(r) / fleet.trainers, fleet.of_owner
    push = Stage("push", {TRAINER_OUT: rows, OWNER_IN: many * rows}, {}, after=0)
    pull = Stage("pull", {OWNER_OUT: many * rows, TRAINER_IN: rows}, {})
    return [push, _update(r, many / fleet.trainers), pull, _collective("all-gather", r, fleet, 1)]


Way = Callable[[PlanRequest, Fleet], list[Stage]]
OWNERS: dict[str, Way] = {
    "owners": lambda r, fleet: [_all_reduce(r, fleet), *_owners(r, fleet)],
    "owners hook": lambda r, fleet: [_reduce_scatter(r, fleet), *_owners(r, fleet)],
}
BESIDE: dict[str, Way] = {
    "adamw": lambda r, fleet: [_all_reduce(r, fleet)],
    "local": lambda r, fleet: [_all_reduce(r, fleet), *_local(r, fleet)],
    "local hook": lambda r, fleet: [_reduce_scatter(r, fleet), *_local(r, fleet)],
}  # without owners
WAYS: dict[str, Way] = {**BESIDE, **OWNERS}
SHOWN: dict[str, str] = {
    "adamw": "AdamW in the trainers' memory",
    "local": "CSDAdam, drives in the trainers",
    "local hook": "the same, csd_optim.push reduces",
    "owners": "CSDAdam, owners",
    "owners hook": "the same, csd_optim.push reduces",
}
BOUNDS: dict[str, str] = {
    COMPUTE: "forward and backward",
    TRAINER_OUT: "the trainers' links, out",
    TRAINER_IN: "the trainers' links, in",
    OWNER_IN: "the owners' links, in",
    OWNER_OUT: "the owners' links, out",
    DRIVES: "the drives",
    CPU: "the update",
}


# ---- time ------------------------------------------------------------------------


def simulate(stages: Sequence[Stage], fleet: Fleet, arrivals: Sequence[float]) -> float:
    """Return when the last bucket leaves the last stage. `arrivals`: when backward finishes each bucket, in seconds.

    In a stage, a bucket uses all resources at once, and leaves when the slowest is done. A resource serves buckets one
    after another, in the order in which they arrive, whatever stage they are in.
    """
    buckets = len(arrivals)
    seconds = [{name: s / buckets for name, s in stage.busy(fleet).items()} for stage in stages]
    free: dict[str, float] = defaultdict(float)  # when each resource is free again
    through: list[list[float]] = [[] for _ in stages]  # when each bucket left each stage
    opens = {k: 0.0 for k, stage in enumerate(stages) if stage.after is None}
    room = [math.inf if stage.window is None else stage.window for stage in stages]
    waiting = [0] * len(stages)  # buckets before each stage
    # (time, stage, buckets that arrive there, room that becomes free there); both are 0 when the stage opens.
    events: list[tuple[float, int, int, int]] = [(arrival, 0, 1, 0) for arrival in arrivals]
    events += [(when, k, 0, 0) for k, when in opens.items()]
    heapq.heapify(events)
    while events:
        now, k, come, freed = heapq.heappop(events)
        waiting[k] += come
        room[k] += freed
        while waiting[k] and room[k] and opens.get(k, math.inf) <= now:
            waiting[k] -= 1
            room[k] -= 1
            done = now
            for name, s in seconds[k].items():
                free[name] = max(free[name], now) + s
                done = max(done, free[name])
            through[k].append(done)
            if k + 1 < len(stages):
                heapq.heappush(events, (done, k + 1, 1, 0))
            heapq.heappush(events, (done, k, 0, 1))
            if len(through[k]) == buckets:
                for j in (j for j, stage in enumerate(stages) if stage.after == k):
                    opens[j] = max(through[k])
                    heapq.heappush(events, (opens[j], j, 0, 0))
    return max(through[-1])


def arrivals(r: PlanRequest) -> list[float]:
    """Return when backward finishes each bucket, in the last batch that a step accumulates."""
    n = max(TARGET_BUCKETS, min(MOST, math.ceil(size(r) / BUCKET_BYTES)))
    before = r.accumulate * (r.forward + r.backward) - r.backward
    return [before + r.backward * (k + 1) / n for k in range(n)]


def busy(way: str, r: PlanRequest, fleet: Fleet) -> dict[str, float]:
    """Return the seconds of an iteration in which each resource is busy."""
    total = {COMPUTE: r.accumulate * (r.forward + r.backward)}
    for stage in WAYS[way](r, fleet):
        for name, s in stage.busy(fleet).items():
            total[name] = total.get(name, 0.0) + s
    return total


def at_least(way: str, r: PlanRequest, fleet: Fleet) -> float:
    """Return the seconds that the busiest resource needs: a lower bound of an iteration."""
    return max(busy(way, r, fleet).values())


def iteration(way: str, r: PlanRequest, fleet: Fleet) -> float:
    """Return the seconds from the beginning of a step's first batch until trainers have the new parameters."""
    return simulate(WAYS[way](r, fleet), fleet, arrivals(r))


# ---- a plan ----------------------------------------------------------------------


def plan_ranks(r: PlanRequest, fleet: Fleet) -> dict[str, Any]:
    """Return all that bench/ranks_plan.py shows as plain values; None stands for no bound.

    `r`: the model, the GPUs' times, and each owner's hardware: `r.devices` drives and a CPU that updates
    `r.host.update` parameters per second. Raises CSDValueError.
    """
    check(r)
    if not 1 <= fleet.trainers <= 10**6:
        raise CSDValueError(f"Invalid trainers: {fleet.trainers!r}; it is a number from 1 to 1000000")
    if not 1 <= fleet.owners <= 10**6:
        raise CSDValueError(f"Invalid owners: {fleet.owners!r}; it is a number from 1 to 1000000")
    for name in ("trainer_link", "owner_link"):
        if not getattr(fleet, name) > 0:
            raise CSDValueError(f"Invalid rate: {name} {getattr(fleet, name)!r}; it is more than 0")
    if r.topk is not None:
        raise CSDValueError(f"Invalid topk: {r.topk!r}; plans with optimizer ranks are for dense gradients only")
    computing = r.accumulate * (r.forward + r.backward)
    rows = []
    for way, build in WAYS.items():
        keeps_busy, seconds = busy(way, r, fleet), iteration(way, r, fleet)
        moved: dict[str, float] = defaultdict(float)
        for stage in build(r, fleet):
            for link, n in stage.bytes.items():
                moved[link] += n
        rows.append(
            {
                "way": way,
                "step": seconds - computing,  # from the end of backward until trainers have the parameters
                "iteration": seconds,
                "at_least": max(keeps_busy.values()),
                "bound": max(keeps_busy, key=lambda name: keeps_busy[name]),
                "busy": keeps_busy,
                "bytes": dict(moved),
            }
        )
    links = {name: rate if math.isfinite(rate) else None for name, rate in fleet.link.items()}
    return {
        "request": {
            **{k: v for k, v in r.to_dict().items() if k in ("params", "dtype", "state_dtype", "devices", "on")},
            **{k: getattr(r, k) for k in ("forward", "backward", "accumulate", "measured", "cpu_measured")},
            "optimizer": str(r.optimizer),
            "device": _finite(rates_of(r.drive if r.on == "drive" else r.csd)),
            "cpu": r.host.update,
            "trainers": fleet.trainers,
            "owners": fleet.owners,
            "trainer_link": links[TRAINER_OUT],
            "owner_link": links[OWNER_IN],
        },
        "ways": rows,
        "enough_owners": {way: enough_owners(way, r, fleet) for way in OWNERS},
        "drives_per_trainer": {way: drives_per_trainer(way, r, fleet) for way in OWNERS},
    }


def enough_owners(way: str, r: PlanRequest, fleet: Fleet) -> int | None:
    """Return the least number of owners that are enough: an iteration takes at most HIDDEN times what it takes with
    infinitely fast owners. None: not even MOST_OWNERS for each trainer.
    """
    alone = replace(r, host=Host(update=math.inf), on="csd", csd=Rates(math.inf, math.inf, math.inf))
    target = HIDDEN * iteration(way, alone, replace(fleet, owner_link=math.inf))
    return _first(MOST_OWNERS * fleet.trainers, lambda n: iteration(way, r, replace(fleet, owners=n)) <= target)


def drives_per_trainer(way: str, r: PlanRequest, fleet: Fleet) -> int | None:
    """Return the least number of drives in each trainer that is as fast as these owners, if gradients are reduced in
    the same way. None: more than MOST_DRIVES.
    """
    beside, ours = way.replace("owners", "local"), iteration(way, r, fleet)
    return _first(MOST_DRIVES, lambda n: iteration(beside, replace(r, devices=n), fleet) <= ours)


def _first(most: int, good: Callable[[int], bool]) -> int | None:
    """Return the least number from 1 to `most` that is `good`, or None. If n is good, n + 1 must be good, too."""
    if not good(most):
        return None
    low, high = 0, most
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if good(middle) else (middle, high)
    return high


def _finite(values: dict[str, Any]) -> dict[str, Any]:
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}

"""A model of how long a step takes with optimizer ranks (owners), which update for trainers over a network.

    Fleet        the number of trainers and owners, and the rates of their links
    ROUTES       the stages that a bucket of gradients passes on each route: collectives, links, drives
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
from csd_optim.planning.advice import Request, check, rates_of
from csd_optim.planning.model import ITEM_BYTES, Host, predict
from csd_optim.rates import Rates

BUCKET_BYTES = 25e6  # DDP's
MOST = 256  # buckets at most: more change nothing but the time of the simulation
HIDDEN = 1.05  # owners are enough if an iteration takes at most so many times what it takes with infinitely fast owners
MOST_OWNERS = 4096  # the search for enough owners ends here
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


@dataclass(frozen=True)
class Stage:
    """A stage of a route, with what all buckets together need there: bytes over links, seconds of other resources."""

    name: str
    bytes: dict[str, float]
    seconds: dict[str, float]
    # The earlier stage (its index, or BACKWARD) that all buckets must have passed before this one begins; None: none.
    after: int | None = None
    # How many buckets may be in this stage at the same time; None: any number.
    window: int | None = None

    def busy(self, fleet: Fleet) -> dict[str, float]:
        """Return the seconds that the stage keeps each resource busy."""
        return {**{name: n / fleet.link[name] for name, n in self.bytes.items()}, **self.seconds}


# ---- routes ----------------------------------------------------------------------
#
# In csd_optim, owners update each bucket as soon as its gradients have arrived, and parameters come back by buckets.
# But they come back only after trainers have reduced all buckets and called step(), because backward still reads the
# old parameters. With `flowing` they come back at once: what the links alone would allow.
BACKWARD = -1
ROUNDS = 3  # buckets that trainers reduce at the same time


def _collective(name: str, r: Request, fleet: Fleet, times: int) -> Stage:
    """Return a ring collective of N trainers, which moves `times` (N - 1) / N of all bytes.

    `times` is 1 for a reduce-scatter or an all-gather, 2 for an all-reduce.
    """
    n = times * size(r) * (fleet.trainers - 1) / fleet.trainers
    return Stage(name, {TRAINER_OUT: n, TRAINER_IN: n}, {})


def _push(fleet: Fleet, sent: float, after: int | None = None) -> Stage:
    """Return the stage that sends gradients to owners. `sent`: bytes of each trainer, to all owners together."""
    return Stage("push", {TRAINER_OUT: sent, OWNER_IN: sent * fleet.trainers / fleet.owners}, {}, after)


def _pull(fleet: Fleet, received: float, after: int | None = None) -> Stage:
    """Return the stage that brings parameters back. `received`: bytes of each trainer, from all owners together."""
    return Stage("pull", {OWNER_OUT: received * fleet.trainers / fleet.owners, TRAINER_IN: received}, {}, after)


def _update(r: Request, machines: int, after: int | None = None) -> Stage:
    """Return the stage that updates on the drives of `machines` machines."""
    device: Rates = r.drive if r.on == "drive" else r.csd
    found = predict(
        "csdadam",
        r.params / machines,
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


def size(r: Request) -> float:
    """Return the bytes of all gradients, which are also those of all parameters."""
    return float(ITEM_BYTES[r.dtype] * r.params)


def _adamw(r: Request, fleet: Fleet, flowing: bool) -> list[Stage]:
    return [_collective("all-reduce", r, fleet, 2)]


def _local(r: Request, fleet: Fleet, flowing: bool) -> list[Stage]:
    gather = _collective("all-gather", r, fleet, 1)
    return [*_adamw(r, fleet, flowing), _update(r, fleet.trainers, None if flowing else 0), gather]


def _kept(r: Request, fleet: Fleet, flowing: bool) -> list[Stage]:
    share, gather = size(r) / fleet.trainers, _collective("all-gather", r, fleet, 1)
    push, pull = _push(fleet, share, after=0), _pull(fleet, share)
    return [*_adamw(r, fleet, flowing), push, _update(r, fleet.owners), pull, gather]


def _slices(r: Request, fleet: Fleet, flowing: bool) -> list[Stage]:
    share = size(r) / fleet.trainers
    scatter = replace(_collective("reduce-scatter", r, fleet, 1), window=ROUNDS)
    gather = _collective("all-gather", r, fleet, 1)
    pull = _pull(fleet, share, None if flowing else 0)
    return [scatter, _push(fleet, share), _update(r, fleet.owners), pull, gather]


def _star(r: Request, fleet: Fleet, flowing: bool) -> list[Stage]:
    pull = _pull(fleet, size(r), None if flowing else BACKWARD)
    return [_push(fleet, size(r)), _update(r, fleet.owners), pull]


Way = Callable[[Request, Fleet, bool], list[Stage]]
ROUTES: dict[str, Way] = {"kept": _kept, "slices": _slices, "star": _star}
BESIDE: dict[str, Way] = {
    "adamw": _adamw,
    "local": _local,
}  # without owners: AdamW in memory, and drives in the trainers
WAYS: dict[str, Way] = {**BESIDE, **ROUTES}
SHOWN: dict[str, str] = {
    "adamw": "AdamW in the trainers' memory",
    "local": "CSDAdam, drives in the trainers",
    "kept": "owners, kept: slices, after all-reduce",
    "slices": "owners, slices: after reduce-scatter",
    "star": "owners, star: all from each trainer",
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
    opens = {
        k: max(arrivals) if s.after == BACKWARD else 0.0 for k, s in enumerate(stages) if s.after in (None, BACKWARD)
    }
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


def arrivals(r: Request) -> list[float]:
    """Return when backward finishes each bucket, in the last batch that a step accumulates."""
    n = max(TARGET_BUCKETS, min(MOST, math.ceil(size(r) / BUCKET_BYTES)))
    before = r.accumulate * (r.forward + r.backward) - r.backward
    return [before + r.backward * (k + 1) / n for k in range(n)]


def busy(way: str, r: Request, fleet: Fleet) -> dict[str, float]:
    """Return the seconds of an iteration in which each resource is busy."""
    total = {COMPUTE: r.accumulate * (r.forward + r.backward)}
    for stage in WAYS[way](r, fleet, False):
        for name, s in stage.busy(fleet).items():
            total[name] = total.get(name, 0.0) + s
    return total


def at_least(way: str, r: Request, fleet: Fleet) -> float:
    """Return the seconds that the busiest resource needs: a lower bound of an iteration."""
    return max(busy(way, r, fleet).values())


def iteration(way: str, r: Request, fleet: Fleet, flowing: bool = False) -> float:
    """Return the seconds from the beginning of a step's first batch until trainers have the new parameters."""
    return simulate(WAYS[way](r, fleet, flowing), fleet, arrivals(r))


# ---- a plan ----------------------------------------------------------------------


def plan_ranks(r: Request, fleet: Fleet, route: str = "auto") -> dict[str, Any]:
    """Return all that bench/ranks_plan.py shows as plain values; None stands for no bound.

    `r`: the model, the GPUs' times, and each owner's hardware: `r.devices` drives and a CPU that updates
    `r.host.update` parameters per second. `route`: one of ROUTES, or "auto": the one with the shortest iteration, of
    equal ones the first. Raises CSDValueError.
    """
    check(r)
    for name in ("trainers", "owners"):
        if not 1 <= getattr(fleet, name) <= 10**6:
            raise CSDValueError(f"Invalid {name}: {getattr(fleet, name)!r}; it is a number from 1 to 1000000")
    for name in ("trainer_link", "owner_link"):
        if not getattr(fleet, name) > 0:
            raise CSDValueError(f"Invalid rate: {name} {getattr(fleet, name)!r}; it is more than 0")
    if route not in (*ROUTES, "auto"):
        raise CSDValueError(f"Invalid route: {route!r}; there are auto, {', '.join(ROUTES)}")
    if r.topk is not None:
        raise CSDValueError(f"Invalid topk: {r.topk!r}; plans with optimizer ranks are for dense gradients only")
    times = {way: iteration(way, r, fleet) for way in WAYS}
    chosen = min(ROUTES, key=lambda way: times[way]) if route == "auto" else route
    computing = r.accumulate * (r.forward + r.backward)
    rows = []
    for way, build in WAYS.items():
        keeps_busy = busy(way, r, fleet)
        moved: dict[str, float] = defaultdict(float)
        for stage in build(r, fleet, False):
            for link, n in stage.bytes.items():
                moved[link] += n
        rows.append(
            {
                "way": way,
                "step": times[way] - computing,  # from the end of backward until trainers have the parameters
                "iteration": times[way],
                "iteration_flowing": iteration(way, r, fleet, flowing=True),
                "at_least": max(keeps_busy.values()),
                "bound": max(keeps_busy, key=lambda name: keeps_busy[name]),
                "busy": keeps_busy,
                "bytes": dict(moved),
                "chosen": way == chosen,
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
            "route": route,
        },
        "ways": rows,
        "enough_owners": {how: enough_owners(chosen, r, fleet, how == "flowing") for how in ("built", "flowing")},
        "break_even": break_even(chosen, r, fleet),
    }


def enough_owners(way: str, r: Request, fleet: Fleet, flowing: bool = False) -> int | None:
    """Return the least number of owners that are enough: an iteration takes at most HIDDEN times what it takes with
    infinitely fast owners. None: more than MOST_OWNERS.
    """
    alone = replace(r, host=Host(update=math.inf), on="csd", csd=Rates(math.inf, math.inf, math.inf))
    target = HIDDEN * iteration(way, alone, replace(fleet, owner_link=math.inf), flowing)
    return _first(MOST_OWNERS, lambda n: iteration(way, r, replace(fleet, owners=n), flowing) <= target)


def break_even(way: str, r: Request, fleet: Fleet) -> dict[str, int | None]:
    """Compare owners with drives in the trainers.

    `owners`: the least number with which an iteration takes no longer than with an owner's number of drives in each
    trainer. `drives_per_trainer`: the least number of drives in each trainer that is as fast as these owners. None if
    even the largest number that is tried is slower.
    """
    local, ours = (iteration(name, r, fleet) for name in ("local", way))
    return {
        "owners": _first(MOST_OWNERS, lambda n: iteration(way, r, replace(fleet, owners=n)) <= local),
        "drives_per_trainer": _first(MOST_DRIVES, lambda n: iteration("local", replace(r, devices=n), fleet) <= ours),
    }


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

"""How long a step takes with optimizer ranks: buckets of gradients pass links, drives and the collectives of trainers.

    Fleet        so many trainers and owners, their links and drives
    ROUTES       what a bucket passes, one stage after another, on each of the ways to use them
    simulate()   a discrete-event simulation of that
    at_least()   bytes divided by rates, which no simulation is below

All trainers do the same at the same time, and so do all owners: one of each stands for all of them, with its own link,
which is as fast in both directions at once. docs/plan.md says what is left out. Sizes are in bytes, times in seconds.
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from ..distributed.buckets import FEWEST
from ..errors import CSDValueError
from .advice import Request, check
from .model import ITEM_BYTES, Device, Host, predict

BUCKET_BYTES = 25e6  # DDP's
MOST = 256  # buckets that are worth simulating
HIDDEN = 1.05  # times an iteration whose owners take no time: who is that near is not worth another owner
MOST_OWNERS = 4096  # so far it is looked for how many are enough
MOST_DRIVES = 64  # the same of drives in a trainer

TRAINER_OUT, TRAINER_IN = "trainer out", "trainer in"
OWNER_IN, OWNER_OUT = "owner in", "owner out"
DRIVES, CPU, COMPUTE = "drives", "update", "compute"
LINKS = (TRAINER_OUT, TRAINER_IN, OWNER_IN, OWNER_OUT)


@dataclass(frozen=True)
class Fleet:
    trainers: int
    owners: int
    trainer_link: float  # bytes per second each way; math.inf: no bound
    owner_link: float

    @property
    def link(self) -> dict[str, float]:
        return {name: self.trainer_link if name.startswith("trainer") else self.owner_link for name in LINKS}


@dataclass(frozen=True)
class Stage:
    """What all buckets pass together: bytes over each link, and seconds of whatever is no link."""

    name: str
    bytes: dict[str, float]
    seconds: dict[str, float]
    # Begins when all buckets are through this one of the stages before, or BACKWARD; None: each goes on by itself.
    after: int | None = None
    # So many buckets at most are in it at the same time; None: any number.
    window: int | None = None

    def busy(self, fleet: Fleet) -> dict[str, float]:
        """Seconds that it keeps each resource busy."""
        return {**{name: n / fleet.link[name] for name, n in self.bytes.items()}, **self.seconds}


# ---- routes ----------------------------------------------------------------------
#
# As it is built, owners update each bucket when its gradients are there, and parameters come back by buckets; but not
# before trainers have reduced all and call step(), for backward still reads parameters. `flowing`: each bucket goes on
# as soon as it can.
BACKWARD = -1
ROUNDS = 3  # that trainers reduce at the same time


def _collective(name: str, r: Request, fleet: Fleet, times: int) -> Stage:
    """Of trainers, in a ring: a reduce-scatter or an all-gather is one time (N - 1) / N of all, an all-reduce two."""
    n = times * size(r) * (fleet.trainers - 1) / fleet.trainers
    return Stage(name, {TRAINER_OUT: n, TRAINER_IN: n}, {})


def _push(fleet: Fleet, sent: float, after: int | None = None) -> Stage:
    """`sent`: by each trainer, to all owners."""
    return Stage("push", {TRAINER_OUT: sent, OWNER_IN: sent * fleet.trainers / fleet.owners}, {}, after)


def _pull(fleet: Fleet, received: float, after: int | None = None) -> Stage:
    return Stage("pull", {OWNER_OUT: received * fleet.trainers / fleet.owners, TRAINER_IN: received}, {}, after)


def _update(r: Request, machines: int, after: int | None = None) -> Stage:
    """On the drives of so many machines."""
    device: Device = r.drive if r.on == "drive" else r.csd
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


def size(r: Request) -> float:
    """Bytes of all gradients, and of all parameters."""
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
    """When the last bucket is through the last stage. `arrivals`: when backward has each of them.

    A stage takes a bucket's share of each of its resources at once, and is done with the slowest. A resource serves
    buckets one after another, in the order in which they come to it, whatever stage they are in.
    """
    buckets = len(arrivals)
    seconds = [{name: s / buckets for name, s in stage.busy(fleet).items()} for stage in stages]
    free: dict[str, float] = defaultdict(float)  # when each resource is
    through: list[list[float]] = [[] for _ in stages]
    opens = {
        k: max(arrivals) if s.after == BACKWARD else 0.0 for k, s in enumerate(stages) if s.after in (None, BACKWARD)
    }
    room = [math.inf if stage.window is None else stage.window for stage in stages]
    waiting = [0] * len(stages)  # buckets before each stage
    # When, at which stage, and so much more of what: buckets that wait, and room. Or nothing, as it opens.
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
    """When backward has each bucket: of the last of the batches that a step accumulates."""
    n = max(FEWEST, min(MOST, math.ceil(size(r) / BUCKET_BYTES)))
    before = r.accumulate * (r.forward + r.backward) - r.backward
    return [before + r.backward * (k + 1) / n for k in range(n)]


def busy(way: str, r: Request, fleet: Fleet) -> dict[str, float]:
    """Seconds of an iteration in which each resource has something to do."""
    total = {COMPUTE: r.accumulate * (r.forward + r.backward)}
    for stage in WAYS[way](r, fleet, False):
        for name, s in stage.busy(fleet).items():
            total[name] = total.get(name, 0.0) + s
    return total


def at_least(way: str, r: Request, fleet: Fleet) -> float:
    """The most that one resource has to do: no iteration is shorter."""
    return max(busy(way, r, fleet).values())


def iteration(way: str, r: Request, fleet: Fleet, flowing: bool = False) -> float:
    """Seconds until trainers have their parameters, from when they began with the first batch of a step."""
    return simulate(WAYS[way](r, fleet, flowing), fleet, arrivals(r))


# ---- a plan ----------------------------------------------------------------------


def plan_ranks(r: Request, fleet: Fleet, route: str = "auto") -> dict[str, Any]:
    """What `csd-optim plan --trainers` shows, plain values only: None where something has no bound.

    `r`: the model, GPUs' times, and what each owner has: `r.devices` drives, and a CPU of `r.host.update`. `route`: one
    of ROUTES, or "auto": that with the shortest iteration, of equal ones the first. Raises CSDValueError.
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
        raise CSDValueError(f"Invalid topk: {r.topk!r}; what is planned of optimizer ranks has whole gradients")
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
                "step": times[way] - computing,  # from the end of backward until the parameters are there
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
            "device": _finite(asdict(r.drive if r.on == "drive" else r.csd)),
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
    """From how many on they hide: an iteration takes HIDDEN times what it would with owners that take no time."""
    alone = replace(r, host=Host(update=math.inf), on="csd", csd=Device(math.inf, math.inf, math.inf))
    target = HIDDEN * iteration(way, alone, replace(fleet, owner_link=math.inf), flowing)
    return _first(MOST_OWNERS, lambda n: iteration(way, r, replace(fleet, owners=n), flowing) <= target)


def break_even(way: str, r: Request, fleet: Fleet) -> dict[str, int | None]:
    """Against drives in the trainers.

    `owners`: from how many on an iteration takes no longer than with the same number of drives in each trainer as an
    owner has. `drives_per_trainer`: from how many drives in each trainer on they are as fast as these owners.
    """
    local, ours = (iteration(name, r, fleet) for name in ("local", way))
    return {
        "owners": _first(MOST_OWNERS, lambda n: iteration(way, r, replace(fleet, owners=n)) <= local),
        "drives_per_trainer": _first(MOST_DRIVES, lambda n: iteration("local", replace(r, devices=n), fleet) <= ours),
    }


def _first(most: int, good: Callable[[int], bool]) -> int | None:
    """The least number that is, of 1 to `most`; more of whatever it counts is never worse. None: not even `most`."""
    if not good(most):
        return None
    low, high = 0, most
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if good(middle) else (middle, high)
    return high


def _finite(values: dict[str, Any]) -> dict[str, Any]:
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}

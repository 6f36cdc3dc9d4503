"""pytest --served N: runs whole suites with named directories served by N optimizer ranks.

Each optimizer gets its own, on threads of its process, so that whatever tests replace in the engine is replaced at the
owner. The stores lie where the test has named them. If it names fewer than N, the other owners have theirs within the
first directory.
"""

import contextlib
import os
from dataclasses import replace
from pathlib import Path

from support.owner_here import OwnerHere

from csd_optim.engine import open_engine as opening
from csd_optim.optim import opening as of_optimizers
from csd_optim.serve.owner import ownership
from csd_optim.serve.trainer.address import Owners, parse_address
from csd_optim.serve.trainer.remote_engine import open_remote

VARIABLE = "CSD_OPTIM_TEST_SERVED"


def open_served(specs, *, mode="new", tile_elems=None, ranks=None, **options):
    """Do as open_engine(), but over loopback if all devices are named directories."""
    if not all(spec.durable and spec.backend == "file" for spec in specs):
        return opening.open_engine(specs, mode=mode, tile_elems=tile_elems, ranks=ranks, **options)
    n, (rank, size) = assumed(), (ranks.rank, ranks.size) if ranks else (0, 1)
    with contextlib.ExitStack() as stack:
        owners = []
        for k in range(n):
            owners.append(OwnerHere(specs=specs[k::n] or [within(specs[0], k)], allow_save=Path("/")))
            stack.callback(owners[-1].stop)
        addresses = [parse_address(owner.address) for owner in owners]
        shares = Owners(addresses, [n * rank + k for k in range(n)], n * size, [1] * n)
        engine = open_remote(shares, "", mode=mode, tile_elems=tile_elems, ranks=ranks)
        close, stop = engine.devices.close, stack.pop_all().close

    def end():
        close()
        stop()

    engine.devices.close = end
    return engine


def within(spec, owner):
    directory = spec.directory / f"owner-{owner}"
    directory.mkdir(parents=True, exist_ok=True)
    return replace(spec, directory=directory, text=spec.text.replace(str(spec.directory), str(directory), 1))


def assume(n):
    """Serve named directories by so many owners, or not, in this process and in those that support/forked.py starts."""
    os.environ[VARIABLE] = str(n)
    if n:
        of_optimizers.open_engine = open_served
        ownership.part_of = lambda spec, *_: spec
        ownership.check_others = lambda *_: None


def assumed():
    return int(os.environ.get(VARIABLE) or 0)

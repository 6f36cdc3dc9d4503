"""pytest --served: runs whole suites with named directories served by an optimizer rank.

Each optimizer gets one of its own, on threads of its process, so that whatever tests replace in the engine is replaced
at the owner. The store lies where the test has named it.
"""

import os
from pathlib import Path

from support.owner_here import OwnerHere

from csd_optim.engine import open_engine as opening
from csd_optim.optim import optimizer
from csd_optim.serve import ownership
from csd_optim.serve.address import parse_address
from csd_optim.serve.remote_engine import open_remote

VARIABLE = "CSD_OPTIM_TEST_SERVED"


def open_served(specs, *, mode="new", tile_elems=None, ranks=None, **options):
    """Do as open_engine(), but over loopback if all devices are named directories."""
    if not all(spec.durable and spec.backend == "file" for spec in specs):
        return opening.open_engine(specs, mode=mode, tile_elems=tile_elems, ranks=ranks, **options)
    owner = OwnerHere(specs=specs, allow_save=Path("/"))
    try:
        engine = open_remote(parse_address(owner.address), "", mode=mode, tile_elems=tile_elems, ranks=ranks)
    except BaseException:
        owner.stop()
        raise
    close = engine.devices.close

    def end():
        close()
        owner.stop()

    engine.devices.close = end
    return engine


def assume(is_served):
    """Serve named directories, or not, in this process and in those that support/forked.py starts."""
    os.environ[VARIABLE] = "1" if is_served else ""
    if is_served:
        optimizer.open_engine = open_served
        ownership.part_of = lambda spec, *_: spec
        ownership.check_others = lambda *_: None


def assumed():
    return bool(os.environ.get(VARIABLE))

"""Steps that fail and are undone make no version, and the next ones miss nothing. In a child with faults preloaded."""

import errno

import pytest
from faults import TILE_READ, TILE_WRITE
from support.faulty import child, fault, in_child  # noqa: F401
from support.published import Published

from csd_optim import CSDOSError


@pytest.mark.parametrize("state_dtype", ["fp32", "8bit"])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("calls", [TILE_READ, TILE_WRITE], ids=["reads", "writes"])
@in_child
def test_a_step_that_is_undone(calls, overlap, state_dtype, tmp_path):
    options = {"state_dtype": state_dtype, "tile_size": 4096, "lr": 1e-4}
    with Published(tmp_path / "policy", f"file:{tmp_path / 'store'}?cache=off", **options) as t:
        if overlap:
            t.opt.overlap(t.model)
        t.steps(2)
        for skip in (0, 3):
            version = t.pub.version
            with fault(calls, "csd_optim.store", errno.EIO, skip=skip, times=1), pytest.raises(CSDOSError):
                t.step_and_wait()
            t.done -= 1
            assert t.pub.version == version
            t.steps(2)

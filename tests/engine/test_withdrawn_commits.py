"""A round is withdrawn when its step is undone: nothing is left of the notes from the beginning of its commit."""

import contextlib
import os
import shutil

import pytest
from support.replacing import replaced
from support.rounds import Rounds

from csd_optim.store.file import StoreFile
from csd_optim.store.format import read_contents

LOST = OSError(5, "power failed")


CHANGES = ["nothing", "another_manifest", "another_residual", "no_residual", "loose_tiles"]


@pytest.mark.at_hand("drives the committer of devices of this process")
@pytest.mark.parametrize("reached", [True, False], ids=["copy 0 is durable", "copy 0 never got to the disk"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_withdrawn_round_puts_back_what_it_noted(change, reached, tmp_path):
    def publish(original, store, staged, copy):
        if not reached and staged.superblock.step == 4 and not done:
            raise LOST
        original(store, staged, copy)

    done = False
    with Rounds(tmp_path) as run:
        for _ in range(3):
            run.step()
        getattr(run, change)()
        before = run.noted()
        with replaced(StoreFile, "publish", publish), contextlib.suppress(OSError):
            run.step(confirm=False)
        run.undo()
        assert run.noted() == before
        done = True
        for _ in range(2):
            run.step()
            assert run.copies() == [[True, True]] * 2
        for place in run.places:
            assert read_contents(place).manifest["waiting"] == run.described["waiting"]


@pytest.mark.at_hand("drives the committer of devices of this process")
@pytest.mark.parametrize("device", [0, 1])
@pytest.mark.parametrize("change", CHANGES)
def test_a_crash_after_a_withdrawn_round_loses_nothing(change, device, tmp_path):
    """While the next round's copy 0 is half written, copy 1 is the only one that is left."""
    with Rounds(tmp_path / "run") as run:
        for _ in range(3):
            run.step()
        getattr(run, change)()
        run.step(confirm=False)
        run.undo()
        run.step()
        run.step()

        def torn(original, store, staged, copy):
            if staged.superblock.device == device:
                os.pwrite(store.fd, staged.table, staged.superblock.table.offset(copy))
                if not (tmp_path / "crashed").exists():
                    shutil.copytree(tmp_path / "run", tmp_path / "crashed")
                raise LOST
            original(store, staged, copy)

        with replaced(StoreFile, "publish", torn), pytest.raises(OSError, match="power failed"):
            run.step(confirm=False)
    with Rounds(tmp_path / "crashed", mode="resume") as run:
        assert run.engine.states.step == 5
        assert run.engine.states.record.user_state == b"5"
        assert len(run.engine.recovered[0].manifest["waiting"]) == (change == "another_manifest")

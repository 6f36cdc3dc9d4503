"""A round is withdrawn when its step is undone: everything that its commit noted as it began is as it was before."""

import contextlib
import os
import shutil


import numpy as np
import pytest
import torch
from support.replacing import replaced
from support.stores import whole_copies

from csd_optim.devices.spec import parse_devices
from csd_optim.distributed.ranks import RanksElsewhere
from csd_optim.engine.open_engine import open_engine
from csd_optim.store.file import StoreFile
from csd_optim.store.format import Record, read_contents

LOST = OSError(5, "power failed")


def param(name, n, position=0):
    """Return what a manifest says of a parameter."""
    return {"name": name, "group": 0, "position": position, "shape": [n], "dtype": "float32"}


class Rounds:
    """Rank 0 of two that meet elsewhere. Its steps update nothing, so that all that changes is what commits note."""

    def __init__(self, directory, mode="new"):
        directory.mkdir(exist_ok=True)
        self.places = [directory / f"device-{d}" for d in range(2)]
        self.engine = open_engine(
            parse_devices(self.places), mode=mode, tile_elems=1024, ranks=RanksElsewhere(0, 2), choose=self._last
        )
        self.committer = self.engine.committer
        self.residual = torch.zeros(3000, dtype=torch.bfloat16)
        if mode == "new":
            place = {"stride": [1], "extent": 0, "start": 0, "numel": 3000}
            self.described = {"params": [{**param("weight", 3000), **place}], "waiting": []}
            self.engine.extend([3000], ("master", "exp_avg", "exp_avg_sq"))
            self.committer.describe(self.described)
            self.engine.truth.filled()
            self.committer.keep_residual(0, self.residual)

    def _last(self, own):
        return max(own.steps)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.committer.background.discard()
        self.engine.abandon()

    def step(self, *, confirm=True):
        """Take a step, and commit it as a round, which all ranks then have or, without `confirm`, not yet."""
        self.committer.own_round()
        self.committer.note_confirmed()
        self.committer.background.wait()
        self.engine.begin_without_tiles()
        self.engine.end_without_tiles()
        self.committer.after_step()
        step = self.engine.states.step
        self.engine.states.steps[0][:] = step
        self.committer.commit(Record(user_state=b"%d" % step))
        self.committer.background.wait()
        if confirm:
            self.committer.note_confirmed()
            self.committer.background.wait()

    def undo(self):
        self.engine.undo_last(np.zeros(1, np.uint32), had_tiles=False)

    def noted(self):
        """Return what a commit notes as it begins, and a description of what the next one would write."""
        states, committer = self.engine.states, self.committer
        return {
            "record": states.record,
            "committed steps": committer.committed_steps.tolist(),
            "residuals to write": [*committer._residuals.changed(states.residuals)],
            "loose tiles": states.truth.loose.tolist(),
            "step and round": (states.step, committer.rounds.number, committer.rounds.step),
        }

    def copies(self):
        return [whole_copies(place) for place in self.places]

    # ---- what may change before a step --------------------------------------------

    def another_manifest(self):
        self.described = {**self.described, "waiting": [param("frozen", 5, 1)]}
        self.committer.describe(self.described)

    def another_residual(self):
        self.residual.add_(1)

    def no_residual(self):
        self.committer.drop_residual(0)

    def loose_tiles(self):
        self.engine.truth.loose[0] = True

    def nothing(self):
        pass


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

"""A rank that makes rounds of commits by hand, in this process: its ranks meet elsewhere."""

import numpy as np
import torch
from support.inside import committed_in
from support.stores import whole_copies

from csd_optim.devices.spec import parse_devices
from csd_optim.distributed.ranks import RanksElsewhere
from csd_optim.engine.open_engine import open_engine
from csd_optim.store.format import Record


def param(name, n, position=0):
    """Return what a manifest says of a parameter."""
    return {"name": name, "group": 0, "position": position, "shape": [n], "dtype": "float32"}


class Rounds:
    """One of two ranks that meet elsewhere. Its steps update nothing: all that changes is what commits note."""

    def __init__(self, directory, mode="new", rank=0, devices=2):
        directory.mkdir(exist_ok=True)
        self.places = [directory / f"device-{d}" for d in range(devices)]
        ranks = RanksElsewhere(rank, 2)
        self.engine = open_engine(
            parse_devices(self.places), mode=mode, tile_elems=1024, ranks=ranks, choose=lambda own: max(own.steps)
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
        self.committer.after_step(None)
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
            "manifests and residuals to write": committed_in(committer),
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

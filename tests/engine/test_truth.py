"""The truth about tiles (which copy of the states counts), event by event, without devices."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from csd_optim.bindings import FROM_PARAM, IN_PARAM, IN_SECTION, NEW, PARAM, SUPPLIED, UNCOMPARED, UNLESS_SET
from csd_optim.engine.accelerator_copies import AcceleratorCopies, AcceleratorCopy
from csd_optim.engine.decoded import Decoded
from csd_optim.engine.tiles import Tiles
from csd_optim.engine.truth import Authority, Truth
from csd_optim.engine.windows import Windows
from csd_optim.store.layout import plan_extent

pytestmark = pytest.mark.fp32_states("builds its extents itself")

ELEMS = 1024
EMPTY, EDITED, RESEEDED, COMMITTED, LOOSE = (
    Authority.EMPTY,
    Authority.EDITED,
    Authority.RESEEDED,
    Authority.COMMITTED,
    Authority.LOOSE,
)


PARAMS = st.sets(st.integers(0, 2))


class Device:
    """Stands for the native engine and its devices: notes what it is told, and decodes everything to zeros."""

    resident = True

    def __init__(self):
        self.told = []
        self.read = []  # the states that were read, by their sections

    def edited(self, tiles):
        self.told.append(tiles.tolist())

    def check_open(self):
        pass

    def decode(self, tile, first, n, states, param=0):
        wanted = {s: state for s, state in enumerate(states) if state is not None}
        self.read += wanted
        for state in wanted.values():
            state.zero_()


class Model:
    """Three parameters: two with windows, in tiles 0 and 1, and one of codes, in tiles 2 and 3 (4096 elements each)."""

    def __init__(self, durable=True):
        self.device, self.tiles = Device(), Tiles()
        self.windows, self.decoded = Windows(self.tiles), Decoded(self.device, self.device, self.tiles)
        self.windows.are_watched = durable
        self.truth = Truth(self.device, self.tiles, self.windows, self.decoded)
        self.extend([ELEMS, ELEMS], codec="fp32", tile_elems=ELEMS)
        self.extend([2 * 4096], codec="8bit", tile_elems=4096, param_dtype=torch.bfloat16)
        extent = self.tiles.extents[0]
        self.shown = [self.windows.window(extent, p, 0, torch.float32) for p in range(2)]

    def extend(self, numels, codec, **options):
        extent = plan_extent(
            numels, 1, first_param=self.tiles.n_params, first_tile=len(self.tiles), codec=codec, **options
        )
        self.tiles.add(extent)
        self.windows.add([bytearray(4 * ELEMS * extent.n_tiles)] * 3 if codec == "fp32" else [])
        self.truth.extend(extent, new=True, has_windows=codec == "fp32")

    def commit(self):
        """A first commit, which closes all windows."""
        self.truth.filled()
        self.truth.open[:] = False
        self.truth.commit_begins()
        return self

    def states(self):
        return [self.truth.authority_of(tile) for tile in range(len(self.tiles))]

    def step_begins(self, *grads):
        table = np.zeros(3, PARAM)
        table["grad"][[*grads]] = 1
        written = self.truth.note_written()
        self.truth.step_begins(np.union1d(self.tiles.of([*grads]), written))
        self.truth.enter(table)
        return table


class Events(RuleBasedStateMachine):
    """The events of tiles in any order. What was written counts until a step has started from it, or a flush wrote it.

    The model: what counts in each tile but for writes, `counts`; writes that were noted, EDITED or RESEEDED, `edits`;
    and the parameters that were written since anybody looked, `unseen`.
    """

    def __init__(self):
        super().__init__()
        self.model, self.tiles = Model(), {0: [0], 1: [1], 2: [2, 3]}  # by parameter
        self.truth, self.decoded = self.model.truth, self.model.decoded
        self.windows = dict(enumerate(self.model.shown))
        self.counts, self.is_open, self.edits, self.unseen = [EMPTY] * 4, {0, 1}, {}, set()

    def tiles_of(self, params):
        return {tile for param in params for tile in self.tiles[param]}

    @rule(param=st.integers(0, 5))
    def write(self, param):
        if param in self.tiles:
            (self.windows[param] if param in self.windows else self.decoded.states(2)["exp_avg"]).fill_(1)
            self.unseen.add(param)

    def seen(self):
        """Have what was written noted; return these tiles."""
        seen, self.unseen = self.tiles_of(self.unseen), set()
        self.edits.update(dict.fromkeys(seen - self.is_open, EDITED))
        return seen

    @rule()
    def look(self):
        windows = sorted(self.tiles_of(self.unseen - {2}))
        self.model.device.told.clear()
        assert self.truth.note_written().tolist() == sorted(self.seen() | {*self.edits})
        assert not windows or self.model.device.told == [windows]

    @rule(param=st.integers(0, 5))
    def reseed(self, param):
        """Write to a parameter's states what the program has set the parameter to."""
        self.seen()
        before = {tile for tile, edit in self.edits.items() if edit is EDITED}
        with self.truth.reseeding():
            self.write(param)
        self.seen()
        self.edits.update(dict.fromkeys(self.edits.keys() - before, RESEEDED))

    @rule(grads=st.sets(st.integers(0, 2)), end=st.sampled_from(["kept", "undone", "taken back"]), later=PARAMS)
    def step(self, grads, end, later):
        in_step = self.tiles_of(grads) | self.seen() | {*self.edits}
        is_written = 2 in self.edits  # this tile is of parameter 2
        table = self.model.step_begins(*grads)
        assert np.flatnonzero(table["edited"].any(1)).tolist() == [2] * is_written
        if end == "undone":
            return
        self.truth.kept()
        self.edits.clear()
        for tile in in_step:
            self.counts[tile] = LOOSE if self.counts[tile] is EMPTY else self.counts[tile]
        assert not self.decoded.written()
        if end == "taken back":
            for param in later:
                self.write(param)
            self.look()
            self.truth.taken_back()  # with what was written to its tiles since
            self.edits = {tile: edit for tile, edit in self.edits.items() if tile not in in_step}

    @rule(before=PARAMS)
    def flush(self, before):
        for param in before:
            self.write(param)
        self.seen()
        tiles = sorted(tile for tile, edit in self.edits.items() if edit is EDITED and tile not in self.is_open)
        assert self.truth.to_flush().tolist() == tiles
        self.truth.moved(np.array(tiles, np.uint32))
        for tile in tiles:
            del self.edits[tile]
            self.counts[tile] = EMPTY if self.counts[tile] is EMPTY else LOOSE

    @initialize(commits=st.booleans())
    def begin(self, commits):
        if commits:
            self.commit()

    @rule()
    def commit(self):
        """All tiles have states by now; no windows stay open."""
        self.look()
        self.model.commit()
        self.counts, self.is_open = [COMMITTED] * len(self.counts), set()

    @rule(later=PARAMS, flushes=st.booleans())
    def fail_to_load(self, later, flushes):
        self.look()
        saved, before = self.truth.saved(), (self.counts.copy(), self.edits.copy())
        for param in later:
            self.write(param)
        if flushes:
            self.flush(before=set())
        self.truth.put_back(saved)
        (self.counts, self.edits), self.unseen = before, set()

    @rule()
    def join(self):
        """A parameter with windows gets states."""
        param, tile = len(self.tiles), len(self.counts)
        self.model.extend([ELEMS], codec="fp32", tile_elems=ELEMS)
        self.windows[param] = self.model.windows.window(self.model.tiles.extents[-1], 0, 0, torch.float32)
        self.tiles[param] = [tile]
        self.counts.append(EMPTY)
        self.is_open.add(tile)

    @invariant()
    def what_counts(self):
        assert self.model.states() == [self.edits.get(tile, counts) for tile, counts in enumerate(self.counts)]
        assert self.truth.is_written == bool(self.edits or self.unseen)
        assert self.truth.would_be_lost == (EDITED in self.edits.values())


def test_events():
    run_state_machine_as_test(Events, settings=settings(stateful_step_count=15))


def test_only_states_that_are_looked_at_are_read():
    model = Model().commit()
    master = torch.ones(2 * 4096)
    model.decoded.replace(2, {"master": master})
    table = model.step_begins(2)
    assert not model.device.read
    assert [*map(bool, table["edited"][2])] == [True, False, False, False]
    model.truth.kept()
    assert not model.decoded.state(2, "master").any()
    assert model.device.read == [0, 0]  # in two tiles
    assert not model.decoded.states(2)["exp_avg_sq"].any()
    assert model.device.read == [0, 0, 1, 2, 1, 2]


def test_without_commits_nobody_asks():
    model = Model(durable=False)
    model.shown[0].fill_(1)
    assert not model.truth.is_written
    assert len(model.truth.note_written()) == 0


def test_copies_on_the_accelerator():
    model = Model().commit()
    copies = model.truth.copies = AcceleratorCopies(model.device, model.tiles)
    copies.by_param = {p: AcceleratorCopy([torch.zeros(ELEMS)], is_known=True) for p in range(2)}
    model.shown[0].fill_(1)
    model.truth.note_written()
    assert [copies.by_param[p].is_known for p in range(2)] == [False, True]
    model.truth.forget_copies()
    assert not copies.by_param[1].is_known
    table = np.zeros(3, PARAM)
    table["in_image"] = 1
    Truth.give(table, [1])
    assert (table["master"].tolist(), table["in_image"].tolist()) == ([IN_SECTION, SUPPLIED, IN_SECTION], [1, 0, 1])


@pytest.mark.parametrize(
    ("facts", "master"),
    [
        ({}, IN_SECTION),
        ({"master_source": FROM_PARAM}, FROM_PARAM),
        ({"master_source": IN_PARAM}, IN_PARAM),
        ({"master_source": UNLESS_SET}, UNLESS_SET),
        ({"is_dirty": True}, IN_SECTION),  # a write that is counted is copied to the master before the step
        ({"codes": True}, IN_SECTION),
        ({"codes": True, "is_dirty": True}, UNLESS_SET),
        ({"codes": True, "is_dirty": True, "reachable": False}, IN_SECTION),
        ({"codes": True, "master_source": FROM_PARAM}, FROM_PARAM),
        ({"codes": True, "master_source": FROM_PARAM, "master_written": True}, UNCOMPARED),
        ({"codes": True, "master_source": FROM_PARAM, "master_written": True, "is_dirty": True}, FROM_PARAM),
        ({"codes": True, "own": True, "master_written": True}, IN_PARAM),
    ],
)
def test_where_a_step_finds_the_master(facts, master):
    model = Model().commit()
    if facts.get("master_written"):
        model.decoded.masters_written.add(2)
    if facts.get("own"):
        model.decoded.set_location(2, torch.zeros(2 * 4096, dtype=torch.bfloat16), fresh=True)
    place = {"index": 2, "reachable": True, "master_source": IN_SECTION, "is_dirty": False}
    place = SimpleNamespace(**place | facts, is_coded=bool(facts.get("codes")))
    assert model.truth.master_of(place) == master
    assert model.truth.master_of(place, is_new=True) == NEW


@pytest.mark.parametrize("has_grad", [True, False])
def test_a_written_master_whose_section_is_the_parameter(has_grad):
    """Without a gradient the parameter must not change, so the tile gets a section until a step updates it."""
    model = Model().commit()
    model.decoded.set_location(2, torch.zeros(2 * 4096, dtype=torch.bfloat16), fresh=True)
    model.decoded.states(2)["master"].fill_(1)
    row = model.step_begins(*[2] * has_grad)[2]
    assert (row["master"], row["edited"][0] != 0) == (IN_PARAM if has_grad else FROM_PARAM, True)
    model.truth.kept()
    assert model.decoded.is_own_master(2) == has_grad
    assert model.decoded.masters_written == (set() if has_grad else {2})
    row = model.step_begins(2)[2]
    assert (row["master"], row["edited"][0]) == (IN_PARAM if has_grad else IN_SECTION, 0)  # else: as master_of() says
    model.truth.kept()
    assert model.decoded.is_own_master(2)
    assert not model.decoded.masters_written


def test_a_write_outlives_an_interrupt():
    """A signal may raise while the native engine is told of a write: the next call tells it."""
    model = Model()
    with torch.no_grad():
        model.shown[1].fill_(5)

    def interrupted(_):
        raise KeyboardInterrupt

    model.device.edited = interrupted
    with pytest.raises(KeyboardInterrupt):
        model.truth.note_written()
    del model.device.edited
    model.device.told.clear()
    assert model.truth.note_written().tolist() == [1]
    assert model.device.told == [[1]]

"""The reference automaton accepts what the code does, and refuses each mutant of it, by the line that is wrong.

These are the mutants of the model (test_model.py) that are caught there and have a line in the code. The others:
no_flush, no_proof                  flushes are no actions of a trace: tests/crash and test_lost_flushes.py find these
name_at_copy_0, named_at_finish, failed_share_not_told      publish/ names versions, and commits do not know them
withdraw_keeps_record, withdraw_keeps_work                  bytes; test_withdrawn_commits.py finds these
withdraw_keeps_number, trainer_reuses_number, owner_chooses_number      as number_reused and highest_not_exchanged
missing_is_no_commit                no action: test_missing_stores.py finds it
load_over_withdrawn_load, edit_over_withdrawn_load          as step_over_withdrawn_load
begin_before_copy_0                 as step_before_copy_0
left_keeps_name                     bytes; test_left_parameters_crash.py finds it
attach_after_restart                a message, and no commit: tests/serve
"""

import contextlib
import re
import threading
from unittest import mock

import numpy as np
import pytest
from model.automaton import Automaton, Refused
from support import commit_traces
from support.inside import forget_manifests
from support.replacing import replaced

from csd_optim import CSDError, commit_trace
from csd_optim.bindings import HYPER, PARAM
from csd_optim.devices.spec import parse_devices
from csd_optim.distributed.ranks import RanksElsewhere
from csd_optim.engine.ahead import Ahead
from csd_optim.engine.commit import resume
from csd_optim.engine.commit.commit import Background, Commit
from csd_optim.engine.commit.durable import DurableCommitter
from csd_optim.engine.open_engine import open_engine
from csd_optim.optim.states import StatesOnDevices
from csd_optim.store import file
from csd_optim.store.file import StoreFile
from csd_optim.store.format import FILE_NAME, PAGE, Record
from csd_optim.threads import Flag

N = 3000
FROZEN = {"name": "frozen", "group": 0, "position": 1, "shape": [5], "dtype": "float32"}


class Rank:
    """One of `size` ranks that meet elsewhere, with two devices. Its steps move all tiles, and change nothing."""

    def __init__(self, directory, rank, size, *, round=None):
        """`round`: resume that one."""
        self.places = [directory / f"rank-{rank}-device-{d}" for d in range(2)]
        ranks = RanksElsewhere(rank, size) if size > 1 else None
        mode = "new" if round is None else "resume"
        specs = parse_devices(self.places)
        self.engine = open_engine(specs, mode=mode, tile_elems=1024, ranks=ranks, choose=lambda own: round)
        self.committer, self.states = self.engine.committer, self.engine.states
        if round is None:
            self.committer.store_id = bytes(16)
            self.engine.extend([N], ("master", "exp_avg", "exp_avg_sq"))
            self.describe([])
            self.engine.truth.filled()
        else:
            self.committer.discard_newer()

    def describe(self, waiting):
        weight = {"name": "weight", "group": 0, "position": 0, "shape": [N], "dtype": "float32"}
        placed = {"stride": [1], "extent": 0, "start": 0, "numel": N}
        other = {**weight, "name": "other", "position": 1, "shape": [2000]}
        params = [{**weight, **placed}, {**other, **placed, "extent": 1, "numel": 2000}][: self.states.tiles.n_params]
        self.committer.describe({"params": params, "waiting": waiting})

    def join(self):
        """Add a parameter that no step updates, with two tiles."""
        self.engine.extend([2000], ("master", "exp_avg", "exp_avg_sq"))
        self.describe([])
        self.engine.truth.filled()

    def leave(self):
        """Let that parameter leave."""
        self.committer.before_joining_or_leaving()
        self.engine.free([1])
        self.describe([])

    def give_back(self):
        self.committer.devices.give_back(self.states.spaces_of(np.arange(3, 5, dtype=np.uint32)))

    def step(self):
        engine, n = self.engine, self.states.tiles.n_params
        for tile in engine.begin(np.zeros(n, PARAM), np.zeros(0, HYPER), np.arange(3, dtype=np.uint32)).tolist():
            engine.native.push(tile)
        engine.finish()
        self.states.steps[0][:] = self.states.step
        self.committer.commit(Record())

    def undo(self):
        self.engine.undo_last(np.zeros(1, np.uint32))

    def wait(self):
        self.committer.background.wait()

    def end(self):
        """End as a process that is killed when nothing is under way."""
        self.committer.background.discard()
        self.engine.abandon()


class TrainingHere:
    """Some ranks, and what they do together."""

    def __init__(self, directory, size=2):
        self.directory, self.size = directory, size
        self.ranks = [Rank(directory, rank, size) for rank in range(size)]

    def confirm(self):
        if self.size > 1:
            for rank in self.ranks:
                rank.committer.own_round()
            highest = max(rank.committer.highest_round for rank in self.ranks)
            for rank in self.ranks:
                rank.committer.note_confirmed(highest=highest)
        for rank in self.ranks:
            rank.wait()

    def steps(self, n):
        for _ in range(n):
            for rank in self.ranks:
                rank.step()
            self.confirm()

    def end(self):
        for rank in self.ranks:
            rank.end()

    def resume(self, *rounds):
        self.end()
        self.ranks = [Rank(self.directory, rank, self.size, round=round) for rank, round in enumerate(rounds)]


@contextlib.contextmanager
def traced(directory, size=2):
    """Yield a training of so many ranks. The automaton has to accept what it did."""
    (directory / "trace").mkdir()
    with commit_traces.accepted(directory / "trace"):
        training = TrainingHere(directory, size)
        try:
            yield training
        finally:
            training.end()


@contextlib.contextmanager
def refused(directory, why, size=2):
    """Yield a training after its first two steps. The automaton has to refuse what it does next."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(pytest.raises(Refused, match=why))
        training = stack.enter_context(traced(directory, size))
        training.steps(2)
        yield training


def actions(directory):
    return [line["do"] for line in commit_traces.lines_in(directory / "trace")]


# ---- what is right -------------------------------------------------------------------


def test_steps_of_one_process(tmp_path):
    with traced(tmp_path, size=1) as training:
        training.steps(3)
        training.resume(0)
        training.steps(1)
    did = actions(tmp_path)
    assert did.count("commit begins") == 4
    assert did.count("publish begins") == did.count("publish ends") == 2 * 2 * 5  # and what a resume writes again
    assert did.count("adopts a commit") == 1


def test_rounds_of_two_ranks(tmp_path):
    """A round is withdrawn, of which one rank has copy 0 and the other one has nothing, and the ranks are killed."""
    with traced(tmp_path) as training:
        training.steps(2)
        training.ranks[0].describe([FROZEN])
        training.ranks[0].step()
        training.ranks[0].wait()
        training.ranks[0].undo()
        training.confirm()
        training.steps(2)
        training.ranks[0].step()
        training.ranks[0].wait()
        training.resume(5, 5)
        training.steps(1)
    did = actions(tmp_path)
    assert did.count("withdraws") == 1
    assert did.count("confirms") == 2 * 5


def test_writes_between_steps(tmp_path):
    with traced(tmp_path, size=1) as training:
        training.steps(1)
        (rank,) = training.ranks
        with rank.engine.writing([0]):
            pass
        with rank.committer.loading(), rank.engine.writing([0]):
            pass
        with contextlib.suppress(KeyError), rank.committer.loading(), rank.engine.writing([0]):
            raise KeyError
        training.steps(1)
    did = actions(tmp_path)
    assert did.count("tiles move") == 3
    assert did.count("tiles go back") == 1


@pytest.mark.parametrize("size", [1, 2])
def test_a_parameter_leaves(tmp_path, size):
    with traced(tmp_path, size=size) as training:
        let_join(training)
        for rank in training.ranks:
            rank.leave()
        training.steps(1)
        given_back = actions(tmp_path).count("gives back")
        training.steps(1)
    assert given_back == actions(tmp_path).count("gives back") == 2 * size  # two tiles on each rank


def test_the_trace_of_a_process_that_was_killed_as_it_wrote(tmp_path):
    with traced(tmp_path, size=1) as training:
        training.steps(1)
    (trace,) = (tmp_path / "trace").iterdir()
    text = trace.read_bytes()
    trace.write_bytes(text[:-7])
    lines = commit_traces.lines_in(tmp_path / "trace")
    assert len(lines) == text.count(b"\n") - 1
    Automaton().accept(lines)


# ---- what is not a trace -------------------------------------------------------------


def test_an_action_that_it_does_not_know(tmp_path):
    with refused(tmp_path, "rejoices: an action that the automaton does not know"):
        commit_trace.note("rejoices")


def test_a_durable_step_without_a_trace(tmp_path):
    opt = mock.Mock(**{"_engine.states.committed_step": 1})
    (tmp_path / "trace").mkdir()
    with (
        pytest.raises(Refused, match="step 1 was reported as durable, and left no trace"),
        commit_traces.accepted(tmp_path / "trace"),
    ):
        StatesOnDevices.committed_step.fget(opt)


# ---- mutants: commits ----------------------------------------------------------------


def test_copy_1_before_the_ranks_have_met(tmp_path):  # copy_1_before_confirmation
    def prepare(original, committer, commit, in_parallel):
        original(committer, commit, in_parallel)
        commit.complete(in_parallel)

    why = "publish begins: copy 1 of a round that is not confirmed"
    with refused(tmp_path, why) as training, replaced(DurableCommitter, "_prepare", prepare):
        training.steps(1)


def test_copy_1_before_other_devices_have_copy_0(tmp_path):  # copy_1_before_devices
    def publish(original, store, staged, copy):
        original(store, staged, copy)
        if copy == 0:
            original(store, staged, 1)

    def one_by_one(_, background, calls):
        return [call() for call in calls]

    why = "publish begins: copy 1, and copy 0 is not on all devices"
    with (
        refused(tmp_path, why, size=1) as training,
        replaced(StoreFile, "publish", publish),
        replaced(Background, "_in_parallel", one_by_one),
    ):
        training.steps(1)


def test_copy_0_again_while_copy_1_is_half_written(tmp_path):  # copy_0_again
    def complete(original, commit, in_parallel):
        commit.prepared = Flag()
        commit.prepare(in_parallel)
        original(commit, in_parallel)

    def fails_once(original, fd, data, offset):
        if offset == PAGE and not failed:
            failed.append(offset)
            raise OSError(5, "unplugged")
        return original(fd, data, offset)

    failed = []
    with (
        refused(tmp_path, "copy 0 is overwritten, and copy 1 is not whole", size=1) as training,
        replaced(Commit, "complete", complete),
        replaced(file, "write", fails_once),
    ):
        training.steps(1)


def test_a_withdrawn_round_takes_its_manifest_with_it(tmp_path):  # withdraw_keeps_manifest
    with refused(tmp_path, "publish ends: copy 1 names a manifest that is not in its space") as training:
        training.ranks[0].describe([FROZEN])
        training.ranks[0].step()
        training.ranks[0].wait()
        training.ranks[0].undo()
        forget_manifests(training.ranks[0].committer)
        training.confirm()
        training.steps(1)


# ---- mutants: rounds -----------------------------------------------------------------


def test_a_round_that_a_rank_lacks(tmp_path):  # agree_without_round, confirmed_too_early
    with refused(tmp_path, "confirms: rank 1 does not have copy 0 of round 3 on all devices") as training:
        training.ranks[0].step()
        training.ranks[0].wait()
        training.ranks[0].committer.note_confirmed()


def test_a_number_is_used_again(tmp_path):  # number_reused
    with refused(tmp_path, "commit begins: round 3 has been used here before") as training:
        for rank in training.ranks:
            rank.step()
            rank.wait()
        for rank in training.ranks:
            rank.undo()
            rank.committer.rounds.highest -= 1
        training.steps(1)


def test_ranks_that_do_not_tell_each_other_the_number(tmp_path):  # highest_not_exchanged
    with refused(tmp_path, "rank 1, commit begins: round 3 was withdrawn on another rank") as training:
        training.ranks[0].step()
        training.ranks[0].wait()
        training.ranks[0].undo()
        training.steps(1)


def test_a_commit_of_its_own_before_the_round_is_confirmed(tmp_path):
    with refused(tmp_path, "commit begins: the last round is not confirmed") as training:
        training.ranks[0].step()
        training.ranks[0].wait()
        training.ranks[0].committer.rounds.unconfirmed = None
        training.ranks[0].committer.commit()


def test_a_step_before_the_round_is_confirmed(tmp_path):  # guess_before_confirmation, begin_without_confirm
    with refused(tmp_path, "step begins: slots are overwritten, and the last round is not confirmed") as training:
        training.ranks[0].step()
        training.ranks[0].wait()
        with contextlib.suppress(CSDError):  # its commit does not begin
            training.ranks[0].step()


# ---- mutants: slots ------------------------------------------------------------------


@contextlib.contextmanager
def held(copy):
    """Hold a commit inside before it writes this copy, and let nothing wait for it."""
    goes_on = threading.Event()

    def write(original, fd, data, offset):
        if offset == copy * PAGE:
            goes_on.wait(60)
        return original(fd, data, offset)

    def nothing(*_):
        pass

    with replaced(file, "write", write):
        try:
            with replaced(Background, "wait", nothing), replaced(Background, "wait_for_step", nothing):
                yield
        finally:
            goes_on.set()


def test_a_step_before_copy_0_is_there(tmp_path):  # step_before_copy_0
    with refused(tmp_path, "step begins: slots are overwritten, and copy 0 of the last commit", size=1) as training:
        (rank,) = training.ranks
        with held(0), contextlib.suppress(CSDError):
            rank.step()
            rank.engine.begin(np.zeros(1, PARAM), np.zeros(0, HYPER), np.arange(3, dtype=np.uint32))
        rank.engine.finish(keep=False)


def test_a_commit_before_copy_1_is_there(tmp_path):  # no mutant: the model waits here, too
    with refused(tmp_path, "commit begins: copy 1 of the last commit is not on all devices", size=1) as training:
        (rank,) = training.ranks
        with held(1):
            rank.step()
            rank.committer.commit()


def test_a_step_after_a_load_that_failed(tmp_path):  # step_over_withdrawn_load
    """The load's copy 0 is on one of two ranks, and names slots that the next step would write."""

    def flush_and_fail(original, committer, **options):
        original(committer, **options)
        raise KeyError

    def only_the_first(original, committer, *arguments, **options):
        if committer.load:
            original(committer, *arguments, **options)

    with refused(tmp_path, "step begins: slots are overwritten that a withdrawn commit names") as training:
        rank = training.ranks[0]
        with (
            contextlib.suppress(KeyError),
            replaced(DurableCommitter, "flush", flush_and_fail),
            replaced(DurableCommitter, "commit", only_the_first),
            rank.committer.loading(),
            rank.engine.writing([0]),
        ):
            pass
        rank.committer.ahead = Ahead.NOTHING
        rank.step()


def test_a_load_that_fails_and_does_not_go_back(tmp_path):  # load_leaves_tiles
    def nothing(*_):
        pass

    with refused(tmp_path, "commit begins: a load has failed, and its tiles have not gone back", size=1) as training:
        (rank,) = training.ranks
        with (
            contextlib.suppress(KeyError),
            replaced(DurableCommitter, "_go_back", nothing),
            rank.committer.loading(),
            rank.engine.writing([0]),
        ):
            raise KeyError
        rank.committer.load, rank.committer.ahead = None, Ahead.WRITTEN
        rank.step()


# ---- mutants: parameters that leave --------------------------------------------------


def let_join(training):
    """Let a parameter join on all ranks, and take a step with it."""
    for rank in training.ranks:
        rank.join()
    training.steps(1)


def test_space_is_given_back_at_once(tmp_path):  # gives_back_at_once
    with refused(tmp_path, "gives back: the last commit names that space", size=1) as training:
        let_join(training)
        training.ranks[0].leave()
        training.ranks[0].give_back()


@pytest.mark.parametrize("why", ["is not on all devices", "was withdrawn"])
def test_space_is_given_back_too_early(tmp_path, why):  # gives_back_at_copy_0: before the ranks have met
    with refused(tmp_path, f"gives back: the commit that does not name that space {why}") as training:
        let_join(training)
        rank = training.ranks[0]
        rank.leave()
        rank.step()
        rank.wait()
        if why == "was withdrawn":
            rank.undo()
        rank.give_back()


def test_a_withdrawn_commit_leaves_the_space_to_the_next_one(tmp_path):
    with traced(tmp_path) as training:
        training.steps(1)
        let_join(training)
        for rank in training.ranks:
            rank.leave()
        training.ranks[0].step()
        training.ranks[0].wait()
        training.ranks[0].undo()
        assert "gives back" not in actions(tmp_path)
        training.confirm()
        training.steps(1)
    assert actions(tmp_path).count("gives back") == 2 * 2


def test_a_parameter_leaves_before_the_last_commit_is_complete(tmp_path):  # leaves_before_commit
    why = "parameters leave: the last commit, which has them, is not on all devices"
    with refused(tmp_path, why, size=1) as training:
        let_join(training)
        with held(0):
            training.ranks[0].step()
            training.ranks[0].leave()


def test_a_parameter_leaves_before_the_round_is_confirmed(tmp_path):
    with refused(tmp_path, "parameters leave: the last round, which has them, is not confirmed") as training:
        let_join(training)
        training.ranks[0].step()
        training.ranks[0].leave()


# ---- mutants: a resume ---------------------------------------------------------------


def test_nothing_newer_is_discarded(tmp_path):  # no_discard_newer
    with refused(tmp_path, "copy [01] of the last commit is not on all devices", size=1) as training:
        with replaced(StoreFile, "discard_newer", lambda *_: None):
            training.resume(0)
        training.steps(1)


def test_newer_commits_are_discarded_in_the_other_order(tmp_path):  # discards_own_copy_first
    def publish(original, store, staged, copy):
        original(store, staged, 1 - copy)

    with refused(tmp_path, "publish begins: a copy is overwritten, and the other one may not be whole") as training:
        training.ranks[0].step()
        training.ranks[0].wait()
        with replaced(StoreFile, "publish", publish):
            training.resume(2, 2)


def test_each_rank_resumes_its_newest_round(tmp_path):  # newest_of_each_rank
    with refused(tmp_path, "adopts a commit: rank 1 cannot have round 3") as training:
        training.ranks[0].step()
        training.ranks[0].wait()
        training.resume(3, 2)


def test_a_durable_step_is_lost(tmp_path):
    with refused(tmp_path, "adopts a commit: copy 1 of .* cannot have that commit", size=1) as training:
        stores = [place / FILE_NAME for place in training.ranks[0].places]
        before = [store.read_bytes() for store in stores]
        training.steps(1)
        for store, content in zip(stores, before, strict=True):
            store.write_bytes(content)
        training.resume(0)


def test_an_older_commit_is_resumed(tmp_path):
    def fails(*_):
        raise OSError(5, "unplugged")

    def oldest(original, stores):
        return original(stores)[-1:]

    with refused(tmp_path, "adopts a commit: sequence 3 was durable", size=1) as training:
        with replaced(Commit, "complete", fails), contextlib.suppress(OSError):
            training.steps(1)
        with replaced(resume, "common_commits", oldest):
            training.resume(0)


# ---- lines that no simple mutant writes ----------------------------------------------


@pytest.fixture(scope="module")
def lines(tmp_path_factory):
    """A trace of three rounds of two ranks, of which rank 0 withdraws the last one."""
    directory = tmp_path_factory.mktemp("good")
    with traced(directory) as training:
        training.steps(2)
        training.ranks[0].step()
        training.ranks[0].wait()
        training.ranks[0].undo()
    return commit_traces.lines_in(directory / "trace")


# By reason: a line, how it is changed, and where it is added, before round 3, behind it or at the end; None: replaced.
EDITED = {
    "it frees space of parameters that have not left": (
        {"do": "commit begins", "round": 2},
        {"freed": [["a store", 4096, 4096]]},
        None,
    ),
    "its sequence does not follow the last one": ({"do": "commit begins", "round": 2}, {"sequence": 3}, None),
    "round 0 after round 1": ({"do": "commit begins", "round": 2}, {"round": 0}, None),
    "this rank is in round 1": ({"do": "commit begins", "round": 2}, {"is_round": False}, None),
    "rank 1 has step {5} in round 2, not 2": ({"do": "commit begins", "round": 2, "rank": 1}, {"step": 5}, None),
    "it is not the last commit": ({"do": "confirms", "round": 2}, {"sequence": 1}, None),
    "it is of sequence and round (5, 2)": ({"do": "publish begins", "round": 2}, {"sequence": 5}, None),
    "it is no round that waits": ({"do": "confirms", "round": 2}, {}, "round 3"),
    "all ranks have that round": ({"do": "confirms", "round": 2}, {"do": "withdraws"}, "round 3"),
    "it is there already": ({"do": "publish begins", "round": 2, "copy": 0}, {}, "round 3"),
    "it was withdrawn": ({"do": "publish begins", "round": 3}, {}, "end"),
    "that is no part of a resume": ({"do": "publish begins", "round": 3}, {"do": "discards newer"}, "end"),
}


@pytest.mark.parametrize("why", EDITED)
def test_a_line_that_is_wrong(why, lines):
    wanted, change, place = EDITED[why]
    there = next(n for n, line in enumerate(lines) if wanted.items() <= line.items())
    line = {**lines[there], **change}
    round_3 = next(n for n, line in enumerate(lines) if line.get("round") == 3)
    starts = {"round 3": round_3, "behind it": there + 1, "end": len(lines)}
    before, after = (there, there + 1) if place is None else (starts[place],) * 2
    Automaton().accept(lines)
    with pytest.raises(Refused, match=re.escape(why)):
        Automaton().accept([*lines[:before], line, *lines[after:]])

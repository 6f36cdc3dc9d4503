"""Overlap with several ranks: a step that fails on one rank is undone on all ranks when they meet next.

A rank whose step failed must not raise alone, because the others would wait for it in their next collective. It
continues with the parameters it has, like the ranks whose step is complete. Each rank votes in the background, once the
step has ended there, on whether the step is complete: one vote per rank and launched step. Ranks meet in their next
call that is a collective, and exchange something there only if some rank's vote was negative.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import threading
import time
import weakref
from collections.abc import Collection
from enum import Enum, auto

import torch
from torch.nn.parallel import DistributedDataParallel

from ..distributed.ranks import Ranks
from ..engine.committer import NO_BALLOT, Ballot
from ..engine.engine import Engine
from ..errors import CSDError, CSDRankError, CSDRuntimeError
from ..signals import defer_signals
from ..step.all_gather import ParamAllGather
from ..step.live import LiveStep, Phase
from ..threads import Flag
from .flight import Flight

NO_GATHER = ParamAllGather()
EXIT_SECONDS = 60.0  # how long the end of a program waits for votes: see _wait_at_exit()


def check_ranks(optimizer: object, model: torch.nn.Module, *, backward: bool, free_gradients: bool) -> None:
    """Raise CSDRuntimeError if overlap() does not support these options with several ranks."""
    if free_gradients and has_ddp(model):
        raise CSDRuntimeError(
            "overlap(free_gradients=True) does not work with DistributedDataParallel, whose buckets hold all gradients "
            "until backward ends: call overlap(model), or use fully_shard (FSDP2)"
        )
    if backward and not (all(_is_hooked(ddp, optimizer) for ddp in _ddps(model)) or has_other_hook(optimizer, model)):
        raise CSDRuntimeError(
            "overlap(backward=True) with DistributedDataParallel needs gradients as soon as they are reduced: call "
            "ddp.register_comm_hook(optimizer, csd_optim.push) before it (docs/distributed.md)"
        )


def has_other_hook(optimizer: object, model: torch.nn.Module) -> bool:
    """Return whether a communication hook of the user's reduces gradients, at a time unknown to us."""
    return any(getattr(ddp, "_comm_hooks", ()) and not _is_hooked(ddp, optimizer) for ddp in _ddps(model))


def _ddps(model: torch.nn.Module) -> list[DistributedDataParallel]:
    return [module for module in model.modules() if isinstance(module, DistributedDataParallel)]


def _is_hooked(ddp: DistributedDataParallel, optimizer: object) -> bool:
    """Return whether csd_optim.push, whose state is an optimizer or a trainer's wrapper of it, is DDP's hook."""
    return any(getattr(state, "optimizer", state) is optimizer for _, state in getattr(ddp, "_comm_hooks", ()))


def has_ddp(model: torch.nn.Module) -> bool:
    """Return whether DistributedDataParallel reduces gradients of the model, or of a part of it."""
    return bool(_ddps(model))


_voting: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


@functools.cache
def _wait_at_exit() -> None:
    """Let the interpreter wait at its end until other ranks have voted, too, or are gone.

    A thread that returns from gloo during interpreter shutdown ends the process by SIGABRT.
    """

    def wait() -> None:
        until = time.monotonic() + EXIT_SECONDS
        for thread in [*_voting]:
            thread.join(max(0.0, until - time.monotonic()))

    atexit.register(wait)


class VoteResult(Enum):
    """What the ranks' vote on a launched step has led to."""

    VOTING = auto()  # under way here, or some rank has not voted yet
    KEPT = auto()  # complete on all ranks; nothing undoes the step any more
    MUST_MEET = auto()  # failed on some rank, or a rank is lost: agree() undoes the step, and raises


class Vote:
    """The vote of all ranks on one step that all of them have launched, or completed."""

    def __init__(
        self, control: Ranks, carriers: Collection[Ranks], engine: Engine, live: LiveStep | None, flight: Flight | None
    ) -> None:
        """`control`: ranks on a process group of this thread alone. `carriers`: on the groups that exchange parameters.

        `live`: None if the step is complete on all ranks, which vote only on the commit. `flight`: None if the launch
        failed here.

        This rank votes once the step has ended here, on a daemon thread: a program may end before other ranks vote, and
        must not wait long.
        """
        self.live: LiveStep | None = live
        self.result: VoteResult = VoteResult.VOTING
        self.loss: str = ""  # set if a rank is lost: torch's message
        self._control, self._groups = control, [control, *carriers]
        self._engine, self._flight = engine, flight
        self._exchanged, self._over = Flag(), Flag()

    def begin(self) -> None:
        """Vote on a thread; at interpreter shutdown, when no more threads start, vote before returning."""
        self._mark(busy=True)
        _wait_at_exit()
        thread = threading.Thread(target=self._vote, name="csd_optim votes on a step", daemon=True)
        try:
            thread.start()
            _voting.add(thread)
        except RuntimeError:
            self._vote()

    def _mark(self, *, busy: bool) -> None:
        for ranks in self._groups:
            ranks.busy = busy

    def _exchange(self) -> None:
        """Send everything that other ranks wait for, with its present content, as the launch failed here."""
        if self.live:
            with torch.no_grad():
                self.live.travel.gather.begin()
                self.live.travel.gather.finish()

    def _vote(self) -> None:
        result = VoteResult.MUST_MEET
        try:
            try:
                if self._flight:
                    self._flight.join()
                else:
                    with contextlib.suppress(Exception):
                        self._exchange()
            finally:
                self._exchanged.set()
            complete = not (self.live and self.live.is_undone)
            ballot = self._engine.committer.ballot(retry=False) if complete else NO_BALLOT
            if any(ranks.lost for ranks in self._groups):  # these groups could not exchange restored parameters, either
                self._note_lost()
            votes = self._gather(complete, *ballot)
            if votes and all(vote[0] for vote in votes):
                result = VoteResult.KEPT
                self._keep([Ballot(*vote[1:]) for vote in votes])
        finally:
            self._mark(busy=False)
            self.result = result
            self._over.set()

    def _note_lost(self) -> None:
        """Note that this rank has lost others. Waits for no votes, which may not come before this process ends."""
        self.loss = "this rank has lost the others while they exchanged parameters"
        self.result = VoteResult.MUST_MEET
        _voting.discard(threading.current_thread())
        self._over.set()

    def _gather(self, *vote: int) -> list[tuple[int, ...]]:
        """Return all votes; none if a rank is lost, or if the program has destroyed all groups."""
        try:
            votes = self._control.gather(*vote, bool(self.loss))  # even after a loss, as the others would wait
        except Exception as e:
            self.loss = self.loss or str(e)
            return []
        if self.loss:
            return []
        if losers := [rank for rank, (*_, lost) in enumerate(votes) if lost]:
            self.loss = f"ranks {losers} have lost others while they exchanged parameters"
            return []
        return [vote[:-1] for vote in votes]

    def _keep(self, ballots: list[Ballot]) -> None:
        """Keep the step. If not all ranks have made its commit, the next confirm() asks again, and raises."""
        if self.live:
            self.live.keep()
        with self._engine.lock:  # its holders never wait for a vote, nor for another rank during a vote
            if len({ballot.round for ballot in ballots}) == 1 and not self._engine.closed:
                self._engine.committer.count(ballots)

    def wait_for_rows(self) -> None:
        """Return when no more parameters of other ranks arrive here, if the launch failed here."""
        if not self._flight and self._engine.pid == os.getpid():  # a forked child lacks the receiving thread
            self._exchanged.wait()

    def wait(self) -> None:
        """Return when all ranks have voted, or one is lost. Raises CSDRuntimeError in a forked child."""
        if self._engine.pid != os.getpid():  # a forked child lacks the voting thread
            self._engine.check_open()
        self._over.wait()


class Together:
    """The meetings of the ranks of one optimizer."""

    def __init__(self, ranks: Ranks, engine: Engine, carriers: dict[Ranks, Ranks]) -> None:
        """`carriers`: by ranks that share updates, their process group for the landing thread; filled here."""
        self._ranks, self._engine, self._carriers = ranks, engine, carriers
        self._control: Ranks | None = None  # made in the first step, when all ranks are known to overlap
        self.vote: Vote | None = None  # on the last launched step, until the ranks have met
        self._failure: BaseException | None = None  # why the step failed here

    @property
    def kind(self) -> int:
        """1 or 2, by whether get_ready() has been called: see InStep.kind."""
        return 1 + (self._control is not None)

    def get_ready(self, gather: ParamAllGather = NO_GATHER) -> None:
        """Make the groups for votes, in the first step in which all ranks are known to overlap: a collective.

        `gather`: the all-gather of parameters that ranks share, if it is to run in the background.
        """
        if self._control is None:
            self._control = self._ranks.borrow()
        for ranks in gather.groups:
            if ranks not in self._carriers.values():
                self._carriers[ranks] = ranks.borrow()
        gather.travel_by(self._carriers)

    @property
    def has_met(self) -> bool:
        """Whether nothing undoes the last step any more. (The next may begin once all ranks have committed it, too.)"""
        return self.vote is None or self.vote.result is VoteResult.KEPT

    def launched(self, live: LiveStep, flight: Flight | None) -> None:
        """Begin to vote on a step, after get_ready(). `flight`: None if the launch failed here."""
        assert self._control
        self.vote = Vote(self._control, self._carriers.values(), self._engine, live, flight)
        self.vote.begin()

    def completed(self) -> None:
        """Begin to vote on the commit of a step that all ranks have completed, after get_ready() and agree()."""
        assert self._control
        self.vote = Vote(self._control, (), self._engine, None, None)
        self.vote.begin()

    def note_outcome(self, live: LiveStep, failure: BaseException | None) -> None:
        """Note that a launched step has ended here: complete, or with its states undone because of `failure`."""
        live.spec.sources = {}  # frees gradients, which are no longer needed
        self._failure = failure

    def raise_failure(self) -> None:
        """Raise the failure of the last step here, as long as the ranks have not met.

        Called before parameters are saved, since they may not belong to a complete step.
        """
        if self._failure:
            raise self._failure

    def agree(self) -> None:
        """Agree on the last step, a collective. If the step failed on any rank, it is undone on all ranks.

        Then this raises on all ranks: the failure where it happened, CSDRankError elsewhere.
        """
        if (vote := self.vote) is None:
            return
        vote.wait()
        if vote.result is VoteResult.KEPT:
            self.vote = None
            return
        if vote.loss:  # unknown whether the step is complete on other ranks
            self._ranks.lost = True
            raise self._failure or CSDRankError(vote.loss)
        with defer_signals():
            try:
                self._ranks.agree(self._failure)
            finally:
                if not self._ranks.lost:
                    self.vote = self._failure = None
                    if vote.live:
                        vote.live.take_back()

    def leave(self) -> None:
        """End the meetings of this rank, whatever other ranks do. A step that failed here is undone here."""
        vote, self.vote, self._failure = self.vote, None, None
        if vote:
            vote.wait_for_rows()  # no rows may arrive after the old ones were restored
        if (live := vote and vote.live) and live.phase is Phase.FAILED and not self._engine.closed:
            with contextlib.suppress(CSDError):
                live.take_back(alone=True)
        elif live and live.phase is Phase.LANDED:
            live.keep()
        for ranks in (self._control, *self._carriers.values()):
            if ranks:
                ranks.returned = True
        self._carriers.clear()

"""Explicit-state model of a trainer with one or two owners of its states (serve://), as rounds.cpp is of ranks.

    python tests/model/owners.py owners=2 versions=3 cuts=2 mutant=no_take_back

Requests and answers are lost, owners and trainers are killed and start again, steps fail at one owner and are taken
back at the other, versions are published. What rounds.cpp has in detail is one action here: a copy is written, and a
kill leaves it old, torn or new. An action is one function of the package, which its docstring names, or a part of it
between two messages. A violation prints the shortest sequence of actions that leads to it.
"""

import sys
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

BOUNDS = {
    "owners": 2,
    "versions": 3,  # that come to be: steps, also those that are undone
    "cuts": 1,  # requests, or answers, that are lost
    "owner_kills": 1,
    "trainer_kills": 1,
    "failures": 1,  # of a step, at one owner
    "most": 2_000_000,  # states
}
MUTANTS = {
    "attach_ignores_steps": "a lost link is taken up again although the owner is at another step",
    "attach_after_restart": "or although one of several owners was restarted",
    "confirmed_too_early": "an owner counts its round as confirmed before the other one has it",
    "no_take_back": "an owner that has kept a step that failed elsewhere is not told",
    "named_at_finish": "a version gets its name as soon as its step is complete",
    "begin_without_confirm": "a step begins although an owner has an unconfirmed round",
    "begin_before_copy_0": "a step begins although copy 0 of the last commit is not written",
    "lost_finish_counts": "a step whose FINISH got no answer counts",
    "owner_chooses_number": "an owner numbers its rounds itself, and a withdrawn number is used again",
    "trainer_reuses_number": "the trainer gives the number of a round that was withdrawn to the next one",
}
GARBAGE = -1


class Violation(Exception):
    pass


class Copy(NamedTuple):
    sequence: int
    round: int
    version: int
    slot: int


class Owner(NamedTuple):
    copies: tuple[Copy | None, ...]  # None: torn
    slots: tuple[int, ...]  # version in each
    is_alive: bool = True
    # What follows is in memory.
    is_open: bool = True
    version: int = 0
    before: int = 0  # the version before the last step
    slot: int = 0
    sequence: int = 0
    round: int = 0
    round_before: int = 0  # that of the commit before the last one
    job: Copy | None = None
    work: str = ""  # prepare, complete: copy 0, copy 1 of a round; alone 0, alone 1: of another commit
    is_unconfirmed: bool = False
    is_stepping: bool = False
    has_kept: bool = False  # the last step, which may be taken back
    committed: int = 0  # the last version that counts here

    def written(self, slot: int, version: int) -> tuple[int, ...]:
        return (version, self.slots[1]) if slot == 0 else (self.slots[0], version)


class Trainer(NamedTuple):
    version: int
    steps: tuple[int, ...]  # RemoteNative.owner_step, by owner
    links: tuple[bool, ...]
    unanswered: tuple[int, ...]  # the step whose FINISH has got no answer
    round: int  # the highest number that any round has had
    place: str = "idle"  # what it does next, with `owner`; "": it is gone
    owner: int = 0
    done: tuple[int, ...] = ()  # rounds that owners have told, or owners that have begun or kept the step
    new: int = 0  # the version of the step under way
    has_failed: bool = False
    is_unconfirmed: bool = False
    all_told: bool = True
    must_restart: bool = False


class World(NamedTuple):
    trainer: Trainer
    owners: tuple[Owner, ...]
    cuts: int
    owner_kills: int
    trainer_kills: int
    failures: int
    tree: tuple[tuple[int, int], ...]  # parent and step of each version
    reported: int = 1
    published: int = 1
    undone: frozenset[int] = frozenset()

    def owner(self, k: int, **changes: Any) -> "World":
        owners = *self.owners[:k], self.owners[k]._replace(**changes), *self.owners[k + 1 :]
        return self._replace(owners=owners)

    def trains(self, **changes: Any) -> "World":
        return self._replace(trainer=self.trainer._replace(**changes))

    def at(self, k: int, **changes: Any) -> "World":
        """Change the trainer's knowledge of owner `k`."""
        known = {name: getattr(self.trainer, name) for name in changes}
        return self.trains(**{n: (*known[n][:k], value, *known[n][k + 1 :]) for n, value in changes.items()})

    def step(self, version: int) -> int:
        return self.tree[version][1]

    def continues(self, version: int, after: int) -> bool:
        while after > version:
            after = self.tree[after][0]
        return after == version


Action = tuple[World, str]
Answer = tuple[World, Any, str]  # None: the link is lost; an Error that the owner answers; else what it answers


class Error(str):
    __slots__ = ()


class Model:
    def __init__(self, mutant: str = "", **bounds: int) -> None:
        self.mutant, self.bounds = mutant, BOUNDS | bounds
        self.n, self.versions = self.bounds["owners"], self.bounds["versions"]
        self.has_rounds = self.n > 1

    def initial(self) -> World:
        copy = Copy(1, int(self.has_rounds), 1, 0)
        owner = Owner((copy, copy), (1, 0), version=1, sequence=1, round=copy.round, committed=1)
        left: Any = {name: self.bounds[name] for name in ("cuts", "owner_kills", "trainer_kills", "failures")}
        return World(self.resumed_trainer(copy, 1), (owner,) * self.n, tree=((0, 0), (0, 1)), **left)

    def resumed_trainer(self, copy: Copy, step: int) -> Trainer:
        return Trainer(copy.version, (step,) * self.n, (True,) * self.n, (0,) * self.n, copy.round)

    # ---- owners ----------------------------------------------------------------------

    def commit(self, w: World, k: int, round: int) -> World:
        """durable.py: DurableCommitter.commit"""
        o = w.owners[k]
        if self.mutant == "owner_chooses_number":
            round = o.round + 1
        job = Copy(o.sequence + 1, round if self.has_rounds else 0, o.version, o.slot)
        work = "prepare" if self.has_rounds else "alone 0"
        noted = {"round": job.round, "round_before": o.round, "is_unconfirmed": self.has_rounds}
        return w.owner(k, job=job, sequence=job.sequence, work=work, **noted)

    def writes(self, w: World, k: int) -> World:
        """commit.py: Background._run: a copy is durable."""
        o = w.owners[k]
        if o.work in ("prepare", "alone 0"):
            return w.owner(k, copies=(o.job, o.copies[1]), work="alone 1" if o.work == "alone 0" else "")
        assert o.job
        w = w.owner(k, copies=(o.copies[0], o.job), work="")
        return w.owner(k, committed=o.job.version) if o.work == "alone 1" else w

    def kill_owner(self, w: World, k: int) -> Iterator[Action]:
        """A copy that is being written is old, torn or new; a slot that was not flushed is there, or is garbage."""
        o = w.owners[k]
        first = o.work in ("prepare", "alone 0")
        for there in (0, 1, 2) if o.work else (0,):
            new = [o.copies[not first], None, o.job][there]
            copies = (new, o.copies[1]) if first else (o.copies[0], new)
            is_named = any(c and (c.slot, c.version) == (o.slot, o.version) for c in copies)
            for is_flushed in (True, False):
                if not is_flushed and (not first or there or is_named):
                    continue  # it was flushed before a copy named it
                slots = o.slots if is_flushed else o.written(o.slot, GARBAGE)
                dead = Owner(copies if o.work else o.copies, slots, is_alive=False, is_open=False)
                killed = w._replace(owner_kills=w.owner_kills - 1).at(k, links=False)
                yield killed.owner(k, **dead._asdict()), f"owner {k} is KILLED"

    def adopt(self, w: World, k: int, copy: Copy) -> World:
        """resume.py: recover; file.py: StoreFile.discard_newer"""
        o = Owner((copy, copy), w.owners[k].slots, slot=copy.slot, sequence=copy.sequence, round=copy.round)
        return w.owner(k, **o._replace(version=copy.version, committed=copy.version)._asdict())

    def end_sessions(self, w: World, owners: Iterable[int]) -> World:
        """owner_requests.py: OwnerRequests.end: a step that is under way is undone."""
        for k in owners:
            w = w.owner(k, is_stepping=False)
        return w

    def found(self, w: World) -> list[Copy]:
        """recovery.py: last_round: the commit of each owner that a resume finds."""
        known = [[c for c in o.copies if c] for o in w.owners]
        if not all(known):
            raise Violation("I6: no copy of an owner is whole")
        common = set.intersection(*({c.round for c in own} for own in known))
        if not common:
            raise Violation("I1: no round that all owners have")
        return [max(c for c in own if c.round == max(common)) for own in known]

    def check_resume(self, w: World) -> None:
        found = self.found(w)
        version = found[0].version
        if any(c.version != version for c in found):
            raise Violation("I1: a mix of two versions is found")
        if any(o.slots[c.slot] != version for o, c in zip(w.owners, found, strict=True)):
            raise Violation("I4: a slot of the commit that is found has other contents")
        if not w.continues(w.reported, version):
            raise Violation("I2: a version that was reported as durable is lost")
        if not w.continues(w.published, version):
            raise Violation("I3: a published version is ahead of what is found, or differs from it")
        later = [v for v in range(version + 1, len(w.tree)) if w.tree[v][0] == w.tree[version][0]]
        if version in w.undone and later:
            raise Violation("I7: a version that was undone is found, and training had gone on without it")

    # ---- requests, at an owner -------------------------------------------------------

    def on_confirm(self, w: World, k: int) -> tuple[World, Any]:
        """owner_requests.py: OwnerRequests._on_confirm"""
        o = w.owners[k]
        if self.mutant == "confirmed_too_early" and o.is_unconfirmed:
            w, _ = self.on_confirmed(w, k)
        return w, o.round

    def on_confirmed(self, w: World, k: int) -> tuple[World, Any]:
        """owner_requests.py: OwnerRequests._on_confirmed; durable.py: DurableCommitter.note_confirmed"""
        o = w.owners[k]
        if o.is_unconfirmed and o.job:
            w = w.owner(k, is_unconfirmed=False, committed=o.job.version, work="complete")
        return w, "ok"

    def on_begin(self, w: World, k: int) -> tuple[World, Any]:
        """owner_requests.py: OwnerRequests._on_begin"""
        o = w.owners[k]
        if w.step(o.version) != w.step(w.trainer.version):
            return w, Error("a step after another step")
        if o.is_unconfirmed and self.mutant != "begin_without_confirm":
            return w, Error("a step before all have the last one")
        if o.version != w.trainer.version:
            raise Violation("I1: an owner's states are not those of the trainer's parameters")
        return w.owner(k, has_kept=False, is_stepping=True, slots=o.written(1 - o.slot, GARBAGE)), "ok"

    def on_finish(self, w: World, k: int) -> tuple[World, Any]:
        """owner_requests.py: OwnerRequests._on_finish"""
        o, new = w.owners[k], w.trainer.new
        if not o.is_stepping:
            return w, Error("that step is not under way")
        new_slot = {"slot": 1 - o.slot, "slots": o.written(1 - o.slot, new)}
        w = w.owner(k, is_stepping=False, has_kept=True, version=new, before=o.version, **new_slot)
        return self.commit(w, k, w.trainer.round), "kept"

    def on_take_back(self, w: World, k: int) -> tuple[World, Any]:
        """owner_requests.py: OwnerRequests._on_take_back; rounds.py: Rounds.withdraw"""
        o = w.owners[k]
        if not o.has_kept or w.step(o.version) != w.trainer.steps[k]:
            return w, Error("not the last step")
        w = w._replace(undone=w.undone | {o.version})
        if o.is_unconfirmed:
            w = w.owner(k, is_unconfirmed=False, work="", round=o.round_before)
        return w.owner(k, has_kept=False, version=o.before, slot=1 - o.slot), "ok"

    def waits(self, o: Owner, op: str) -> bool:
        """Whether an owner does not answer before its background has done more."""
        if op in ("begin", "confirm"):
            return o.work in ("prepare", "alone 0") and not (op == "begin" and self.mutant == "begin_before_copy_0")
        return op == "finish" and bool(o.work)

    # ---- links -----------------------------------------------------------------------

    def request(self, w: World, k: int, op: str) -> Iterator[Answer]:
        """link.py: Link.request"""
        if not w.trainer.links[k]:
            for t, answer, text in self.attach(w, k):
                yield from self.request(t, k, op) if answer == "ok" else ((t, answer, text),)
            return
        if self.waits(w.owners[k], op):
            return
        done, answer = getattr(self, f"on_{op}")(w, k)
        yield done, answer, f"{op} at owner {k}: {answer}"
        if w.cuts:
            for t, text in ((w, "the link is lost before it"), (done, "it is executed, the answer is LOST")):
                t = self.end_sessions(t._replace(cuts=w.cuts - 1).at(k, links=False), [k])
                yield t, None, f"{op} at owner {k}: {text}"

    def attach(self, w: World, k: int) -> Iterator[Answer]:
        """link.py: Link.attach; ownership.py: Ownership.open; remote_engine.py: Attaching._take"""
        o = w.owners[k]
        if not o.is_alive:
            yield w, None, f"owner {k} is not reached"
            return
        if w.cuts:
            yield w._replace(cuts=w.cuts - 1), None, f"owner {k} is not reached now"
        if not o.is_open:
            if self.has_rounds and self.mutant != "attach_after_restart":
                yield w.trains(must_restart=True), "fatal", f"owner {k} was restarted: start again"
                return
            w = self.adopt(w, k, max(c for c in o.copies if c))
            o = w.owners[k]
        there, here = w.step(o.version), w.trainer.steps[k]
        if self.mutant == "attach_ignores_steps":
            there = here
        if there == here + 1 and w.trainer.unanswered[k] == there:
            if w.trainer.place != "finish":
                w = w.trains(version=o.version)
            w = w.at(k, steps=there)
        elif there == here - 1 and not self.has_rounds:
            w = w.trains(version=o.version, new=0).at(k, steps=there, links=True, unanswered=0)
            yield w, "rolled back", f"owner {k} has lost the last step: rolled back"
            return
        elif there != here:
            w = w.trains(must_restart=True)
            yield w, "fatal", f"owner {k} is at step {there}, the trainer at {here}: start again"
            return
        yield w.at(k, links=True, unanswered=0), "ok", f"attached to owner {k}"

    # ---- the trainer -----------------------------------------------------------------

    def note_confirmed(self, w: World) -> World:
        """remote_committer.py: RemoteCommitter.note_confirmed: the watcher names a version."""
        t = w.trainer
        if t.is_unconfirmed and w.continues(w.published, t.version):
            w = w._replace(published=t.version)
        return w.trains(is_unconfirmed=False, all_told=True)

    def end_step(self, w: World) -> World:
        return w.trains(place="idle", owner=0, done=(), new=0, has_failed=False)

    def next_owner(self, w: World, then: str) -> World:
        k = w.trainer.owner + 1
        return w.trains(owner=k) if k < self.n else w.trains(place=then, owner=0, done=())

    def at_idle(self, w: World) -> Iterator[Action]:
        if len(w.tree) <= self.versions:
            confirms = self.has_rounds and self.mutant != "begin_without_confirm"
            yield w.trains(place="confirm" if confirms else "start"), "step()"

    def at_confirm(self, w: World) -> Iterator[Action]:
        """remote_committer.py: RemoteCommitter.own_round"""
        k = w.trainer.owner
        for t, answer, text in self.request(w, k, "confirm"):
            if not isinstance(answer, int):
                yield self.end_step(t), text
                continue
            t = t.trains(done=(*w.trainer.done, answer))
            if len({*t.trainer.done}) > 1:  # committer.py: check_rounds: take_back was lost
                yield self.end_step(t.trains(must_restart=True)), f"{text}, and rounds differ: start again"
                continue
            is_last = k + 1 == self.n
            t = self.next_owner(t, "confirmed")
            yield self.note_confirmed(t) if is_last else t, text

    def at_confirmed(self, w: World) -> Iterator[Action]:
        for t, answer, text in self.request(w, w.trainer.owner, "confirmed"):
            if answer == "fatal":
                yield self.end_step(t), text
                continue
            t = t if answer == "ok" else t.trains(all_told=False)
            yield self.next_owner(t, "start"), text

    def at_start(self, w: World) -> Iterator[Action]:
        """remote_committer.py: RemoteCommitter.before_step"""
        if self.has_rounds and not w.trainer.all_told:
            yield w.trains(place="confirm"), "confirms again"
            return
        for t, answer, text in [(w, "ok", "")] if w.trainer.links[0] else self.attach(w, 0):
            if answer != "ok":
                yield self.end_step(t), text
            else:
                at = t.trainer.version
                grown = t._replace(tree=(*t.tree, (at, t.step(at) + 1)))
                yield grown.trains(place="begin", new=len(t.tree)), "the step starts"

    def at_begin(self, w: World) -> Iterator[Action]:
        """divided_native.py: DividedNative.begin"""
        k = w.trainer.owner
        for t, answer, text in self.request(w, k, "begin"):
            if answer == "ok":
                yield self.next_owner(t, "finish"), text
                continue
            yield self.end_step(self.end_sessions(t, range(k))), text

    def at_finish(self, w: World) -> Iterator[Action]:
        """divided_native.py: DividedNative.finish; remote_native.py: RemoteNative._keep"""
        k, step = w.trainer.owner, w.step(w.trainer.new)
        if not k and self.has_rounds:
            w = w.trains(round=w.trainer.round + 1)
        w = w.at(k, unanswered=step)
        if w.failures:
            failed = self.end_sessions(w._replace(failures=w.failures - 1), [k])
            yield self.finished(failed.at(k, unanswered=0), False), f"finish at owner {k} FAILS"
        lost = (w, None, f"the link to owner {k} was lost before finish")
        for t, answer, text in self.request(w, k, "finish") if w.trainer.links[k] else [lost]:
            if answer == "kept" or (answer is None and self.mutant == "lost_finish_counts"):
                yield self.finished(t.at(k, unanswered=0, steps=step), True), text
            elif isinstance(answer, Error):
                yield self.finished(t.at(k, unanswered=0), False), text
            else:
                yield from self.resolve(t, k, text)

    def resolve(self, w: World, k: int, text: str) -> Iterator[Action]:
        """remote_native.py: RemoteNative._resolve"""
        for t, answer, more in self.attach(w, k):
            counts = answer == "ok" and t.trainer.steps[k] == t.step(t.trainer.new)
            yield (
                self.finished(t, counts),
                f"{text}; {more}: it {'counts' if counts else 'is unknown or lost'}",
            )

    def finished(self, w: World, is_kept: bool) -> World:
        """An owner's finish has ended. divided_native.py: DividedNative.finish"""
        t = w.trainer
        done = (*t.done, t.owner) if is_kept else t.done
        if is_kept and t.owner + 1 < self.n:
            return w.trains(done=done, owner=t.owner + 1)
        if is_kept:
            w = self.end_step(w.trains(version=t.new, is_unconfirmed=True))
            return w._replace(published=t.new) if self.mutant == "named_at_finish" else w
        w = self.end_sessions(w, range(t.owner + 1, self.n))  # they undo it
        if not self.has_rounds:
            return self.end_step(w)
        if self.mutant == "trainer_reuses_number":
            w = w.trains(round=t.round - 1)
        return w.trains(unanswered=(0,) * self.n, place="undo", done=done)

    def at_undo(self, w: World) -> Iterator[Action]:
        """divided_native.py: DividedNative.finish: owners that have kept the step take it back."""
        t = w.trainer
        if not t.done or self.mutant == "no_take_back":
            yield self.end_step(w), "step() raises"
            return
        k, left = t.done[0], t.done[1:]
        for u, answer, text in self.request(w, k, "take_back"):
            if answer == "ok":
                u = u.at(k, steps=u.trainer.steps[k] - 1)
            elif answer != "fatal":
                u = self.end_sessions(u.at(k, links=False), [k])
            yield self.end_step(u) if answer == "fatal" else u.trains(done=left), text

    def at_(self, w: World) -> Iterator[Action]:
        """A trainer starts, with resume=True; what an owner does in its background has ended."""
        if not all(o.is_alive and not o.work for o in w.owners):
            return
        self.check_resume(w)
        found = self.found(w)
        for k, copy in enumerate(found):
            w = self.adopt(w, k, copy)
        version = found[0].version
        if w.continues(w.reported, version):
            w = w._replace(reported=version)
        trainer = self.resumed_trainer(found[0], w.step(version))
        yield w._replace(trainer=trainer), f"a trainer resumes version {version}"

    # ---- all that may happen -----------------------------------------------------------

    def actions(self, w: World) -> Iterator[Action]:
        t = w.trainer
        for k, o in enumerate(w.owners):
            if o.is_alive and o.work:
                yield self.writes(w, k), f"owner {k}: a copy is durable"
            if o.is_alive and w.owner_kills:
                yield from self.kill_owner(w, k)
            if not o.is_alive:
                yield w.owner(k, is_alive=True), f"owner {k} is restarted"
        yield from self.news(w)
        if t.place and (w.trainer_kills or t.must_restart):
            gone = self.end_sessions(w._replace(trainer_kills=w.trainer_kills - (not t.must_restart)), range(self.n))
            nothing = Trainer(0, (0,) * self.n, (False,) * self.n, (0,) * self.n, 0, place="")
            yield gone._replace(trainer=nothing), "the trainer is gone"
        if not t.must_restart:
            yield from getattr(self, f"at_{t.place}")(w)

    def news(self, w: World) -> Iterator[Action]:
        """remote_committer.py: RemoteCommitter.note_committed: the trainer learns what is durable."""
        if not w.trainer.place or not all(w.trainer.links) or not all(o.is_open for o in w.owners):
            return
        least = min((o.committed for o in w.owners), key=w.step)
        if least == w.reported or not w.continues(w.reported, least):
            return
        w = w._replace(reported=least)
        if not self.has_rounds and w.trainer.is_unconfirmed and least == w.trainer.version and not w.owners[0].work:
            w = self.note_confirmed(w)
        yield w, f"committed_step: version {least}"


def explore(model: Model) -> tuple[str, list[str]]:
    """Visit all states. Returns the outcome, and the actions that lead to a violation."""
    first = model.initial()
    came: dict[World, tuple[World, str] | None] = {first: None}
    states = [first]
    n_resumes = 0
    for w in states:
        n_resumes += not w.trainer.place
        try:
            found = [*model.actions(w)]
            if not found and w.trainer.place != "idle" and not w.trainer.must_restart:
                raise Violation("I5: nobody can go on")
        except Violation as e:
            trace = []
            while last := came[w]:
                w, text = last
                trace.append(text)
            return f"VIOLATION {e}; {len(states)} states", trace[::-1]
        for t, text in found:
            if t not in came:
                came[t] = w, text
                states.append(t)
        if len(states) > model.bounds["most"]:
            return f"NOT exhaustive: {len(states)} states", []
    return f"no violation: {len(states)} states, {n_resumes} crashes checked", []


def main(options: list[str]) -> int:
    given = dict(option.split("=") for option in options)
    mutant = given.pop("mutant", "")
    if not {*given} <= {*BOUNDS} or mutant not in ("", *MUTANTS):
        print(f"unknown option among {options}")
        return 2
    outcome, trace = explore(Model(mutant, **{name: int(value) for name, value in given.items()}))
    print(outcome, *(f"  {n:3} {text}" for n, text in enumerate(trace, 1)), sep="\n")
    return 0 if outcome.startswith("no violation") else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

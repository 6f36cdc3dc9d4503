"""The reference automaton: accepts the trace of processes that commit, or says which line breaks the protocol, and why.

It knows the rules of rounds.cpp, and only these. A trace has the lines that support/commit_traces.py records, of all
processes in the order of time; a process may have been killed after any of them. A *life* is one committer, from its
first line on; it has the stores of one rank. What other means than commits have left in a store is unknown.
"""

import collections
from dataclasses import dataclass, field

TORN = "torn"
BEFORE = 10  # lines that are shown before one that is refused


class Refused(Exception):
    """A line of a trace breaks the protocol."""


def need(condition, why):
    if not condition:
        raise Refused(why)


@dataclass
class Commit:
    """A commit of one rank. `done`: by copy, the stores that have it."""

    sequence: int
    round: int
    step: int
    is_round: bool
    done: tuple = field(default_factory=lambda: (set(), set()))
    unconfirmed: bool = False  # a round that not all ranks are known to have
    withdrawn: bool = False
    names_slots: bool = False  # withdrawn, but its copies name slots that a step would write
    freed: list = field(default_factory=list)  # spaces that it does not name any more, and gives back


class Store:
    """What the file of a device may hold."""

    def __init__(self):
        self.may_have = [None, None]  # by copy: the blocks that it may have; None: anything
        self.manifests = {}  # by offset: the checksum of the manifest that is there
        self.life = None  # the last one that had it
        self.discards = False

    def is_whole(self, copy, commit):
        """Return whether a copy is there for certain, with its manifest, and of this commit."""
        if not self.may_have[copy] or len(self.may_have[copy]) > 1:
            return False
        (block,) = self.may_have[copy]
        return block != TORN and block[0] == commit.sequence and self.manifests.get(block[3]) == block[4]

    def may_have_round(self, number):
        return None in self.may_have or any(b != TORN and b[1] == number for blocks in self.may_have for b in blocks)


class Life:
    def __init__(self, line):
        self.stores, self.rank, self.size, self.id = line["stores"], line["rank"], line["size"], None
        self.commit = None  # the last one
        self.base = None  # the last one that is in copy 1 of all stores
        self.round = 0  # that it is in
        self.used, self.withdrawn = set(), set()  # numbers of rounds since the resume; those that were undone
        self.prepared = {}  # by round: its step, once all stores have copy 0
        self.durable = [0]  # sequences of commits; a resume finds the last of them, or a later one
        self.went_back = False  # tiles have, since the last commit began
        self.has_failed = False  # a load has, and its tiles have not gone back yet
        self.left = []  # spaces of parameters that have left
        self.is_over = False  # others have resumed its stores

    def check_whole(self):
        need(not self.has_failed, "a load has failed, and its tiles have not gone back")

    def is_on_all(self, copy):
        return self.commit.done[copy] >= {*self.stores}


def block_of(line, copy):
    """Return what identifies the superblock of a commit in a copy of a store."""
    base, room, _, crc = line["manifest"]
    return line["sequence"], line["round"], line["step"], base + copy * room, crc, line["table"]


class Automaton:
    def __init__(self):
        self.n, self.recent = 0, collections.deque(maxlen=BEFORE)
        self.lives, self.stores = {}, collections.defaultdict(Store)
        self.commits, self.reported = 0, 0  # how many were begun or resumed; the last step that a program was told of

    def accept(self, lines):
        """Read the lines of a trace. Raises Refused."""
        for line in lines:
            self.n += 1
            try:
                read = ACTIONS.get(line["do"])
                need(read, "an action that the automaton does not know")
                read(self, line)
            except Refused as e:
                before = "".join(f"    {shown(old)}\n" for old in self.recent)
                raise Refused(f"line {self.n}, {who(line)}, {line['do']}: {e}\n{before}  > {shown(line)}") from None
            self.recent.append(line)

    def _life(self, line):
        """Return the life of a committer. One that has resumed nothing has empty stores."""
        if line["who"] not in self.lives:
            self.lives[line["who"]] = Life(line)
        return self.lives[line["who"]]

    def _ranks(self, life):
        """Return the lives of all ranks of a training, by rank: several of a rank that was stopped."""
        found = collections.defaultdict(list)
        for other in self.lives.values():
            if (other.id, other.size) == (life.id, life.size):
                found[other.rank].append(other)
        return found

    # ---- a resume ----------------------------------------------------------------------

    def adopts(self, line):
        self.commits, first = self.commits + 1, line["blocks"][0]
        life = self.lives[line["who"]] = Life(line)
        life.id, life.round = first["id"], first["round"]
        life.prepared, life.used, life.durable = {life.round: first["step"]}, {life.round}, [first["sequence"]]
        life.base = life.commit = Commit(first["sequence"], first["round"], first["step"], False)
        for key, line_of in zip(life.stores, line["blocks"], strict=True):
            store, copy, block = self.stores[key], line_of["copy"], block_of(line_of, line_of["copy"])
            if store.life and store.life.id == life.id:
                may_be = store.may_have[copy] is None or block in store.may_have[copy]
                need(may_be, f"copy {copy} of {place(key)} cannot have that commit")
                durable = store.life.durable[-1]
                need(life.commit.sequence >= durable, f"sequence {durable} was durable in {place(key)}")
            else:
                store = self.stores[key] = Store()
            store.may_have[copy], store.manifests[block[3]] = {block}, block[4]
            life.commit.done[copy].add(key)
        before = [self.stores[key].life for key in life.stores]
        for rank, lives in self._ranks(before[0]).items() if all(before) else ():
            may = any(all(self.stores[key].may_have_round(life.round) for key in other.stores) for other in lives)
            need(rank == life.rank or may, f"rank {rank} cannot have round {life.round}")
        for key in life.stores:
            if self.stores[key].life:
                self.stores[key].life.is_over = True
            self.stores[key].life = life

    def discards(self, line):
        store = self.stores[line["store"]]
        if life := store.life:
            is_resumed = life.commit is life.base and life.commit.sequence == line["sequence"]
            need(is_resumed, "that is no part of a resume")
            store.discards = True

    # ---- commits -----------------------------------------------------------------------

    def begins(self, line):
        life, number = self._life(line), line["round"]
        last, life.id, life.stores, self.commits = life.commit, line["id"], line["stores"], self.commits + 1
        life.check_whole()
        need(line["sequence"] == (last.sequence if last else 0) + 1, "its sequence does not follow the last one")
        if last:
            need(not last.unconfirmed, "the last round is not confirmed")
            need(last.withdrawn or life.is_on_all(1), "copy 1 of the last commit is not on all devices")
        need(all(space in life.left for space in line["freed"]), "it frees space of parameters that have not left")
        if line["is_round"]:
            need(number not in life.used, f"round {number} has been used here before")
            need(number > life.round, f"round {number} after round {life.round}")
            others = [other for lives in self._ranks(life).values() for other in lives if not other.is_over]
            undone = any(number in other.withdrawn for other in others if other.round == life.round)
            need(not undone, f"round {number} was withdrawn on another rank")
            life.used.add(number)
        else:
            need(number == life.round, f"this rank is in round {life.round}")
        for key in life.stores:
            if not last:
                self.stores[key] = Store()
            self.stores[key].life, self.stores[key].discards = life, False
        life.commit = Commit(line["sequence"], number, line["step"], line["is_round"], unconfirmed=line["is_round"])
        life.commit.freed = line["freed"]
        life.went_back = False

    def confirms(self, line):
        life = self._life(line)
        commit, ranks = self._last(life, line), self._ranks(life)
        need(commit.unconfirmed, "it is no round that waits for the ranks")
        for rank in range(life.size):
            steps = {other.prepared[commit.round] for other in ranks[rank] if commit.round in other.prepared}
            need(steps, f"rank {rank} does not have copy 0 of round {commit.round} on all devices")
            need(commit.step in steps, f"rank {rank} has step {steps} in round {commit.round}, not {commit.step}")
        commit.unconfirmed, life.round = False, commit.round
        life.durable.append(commit.sequence)

    def withdraws(self, line):
        life = self._life(line)
        commit = self._last(life, line)
        need(not commit.is_round or commit.unconfirmed, "all ranks have that round")
        commit.withdrawn, commit.unconfirmed = True, False
        commit.names_slots = not commit.is_round or life.went_back
        if commit.is_round:
            life.withdrawn.add(commit.round)
            life.prepared.pop(commit.round, None)
        if life.durable[-1] == commit.sequence:
            life.durable.pop()

    def _last(self, life, line):
        need(life.commit and life.commit.sequence == line["sequence"], "it is not the last commit")
        return life.commit

    # ---- slots -------------------------------------------------------------------------

    def writes_slots(self, line):
        life, moves_none = self._life(line), line["do"] == "tiles move" and not line["tiles"]
        if moves_none or not (commit := life.commit):
            return
        life.check_whole()
        need(not commit.unconfirmed, "slots are overwritten, and the last round is not confirmed")
        need(not commit.names_slots, "slots are overwritten that a withdrawn commit names")
        there = commit.withdrawn or life.is_on_all(0)
        need(there, "slots are overwritten, and copy 0 of the last commit is not on all devices")

    def load_fails(self, line):
        self._life(line).has_failed = True

    def goes_back(self, line):
        life = self._life(line)
        life.went_back, life.has_failed = True, False
        if life.commit and life.commit.withdrawn:
            life.commit.names_slots = True

    # ---- parameters that leave ---------------------------------------------------------

    def leaves(self, line):
        life = self._life(line)
        if commit := life.commit:
            need(not commit.unconfirmed, "the last round, which has them, is not confirmed")
            need(commit.withdrawn or life.is_on_all(1), "the last commit, which has them, is not on all devices")
        life.left += line["spaces"]

    def gives_back(self, line):
        store = self.stores.get(line["store"])
        if store is None or (life := store.life) is None:  # it has no commits
            return
        commit, space = life.commit, line["space"]
        if store.discards:  # in a resume: what its commit does not name
            need(all(store.is_whole(copy, commit) for copy in range(2)), "a copy may name that space")
            return
        need(space in commit.freed, "the last commit names that space")
        need(not commit.withdrawn, "the commit that does not name that space was withdrawn")
        need(life.is_on_all(1), "the commit that does not name that space is not on all devices")
        life.left = [other for other in life.left if other != space]

    # ---- copies ------------------------------------------------------------------------

    def publishes(self, line):
        store, copy = self.stores[line["store"]], line["copy"]
        if store.life and store.life.id == line["id"]:
            self._check_order(store, store.life, line)
            store.may_have[copy] = {*(store.may_have[copy] or ()), block_of(line, copy), TORN}
        else:  # of stores that are made from others
            self.stores[line["store"]] = Store()

    def _check_order(self, store, life, line):
        commit, copy = life.commit, line["copy"]
        mine, last = (line["sequence"], line["round"]), (commit.sequence, commit.round)
        need(mine == last, f"it is of sequence and round {mine}, and the last commit has {last}")
        if store.discards:
            need(store.is_whole(1 - copy, commit), "a copy is overwritten, and the other one may not be whole")
            return
        if commit is life.base:  # one of several devices has failed, and all write the same copy again
            need(copy == 1 and store.is_whole(0, commit), "it is there already")
            return
        need(not commit.withdrawn, "it was withdrawn")
        if copy:
            need(life.is_on_all(0), "copy 1, and copy 0 is not on all devices")
            need(not commit.unconfirmed, "copy 1 of a round that is not confirmed")
        elif life.base or store.may_have[1] is not None:
            whole = life.base and store.is_whole(1, life.base)
            need(whole, "copy 0 is overwritten, and copy 1 is not whole, or not that of the last commit")

    def has_published(self, line):
        key, copy, block = line["store"], line["copy"], block_of(line, line["copy"])
        store = self.stores[key]
        store.may_have[copy] = {block}
        if line["has_manifest"]:
            store.manifests[block[3]] = block[4]
        if (life := store.life) is None or life.id != line["id"]:
            return
        need(store.manifests.get(block[3]) == block[4], f"copy {copy} names a manifest that is not in its space")
        if (commit := life.commit).sequence == line["sequence"]:
            commit.done[copy].add(key)
            self._advance(life, commit)

    def _advance(self, life, commit):
        if life.is_on_all(0) and not commit.withdrawn:
            if commit.is_round:
                life.prepared[commit.round] = commit.step
            elif life.durable[-1] < commit.sequence:
                life.durable.append(commit.sequence)
        if life.is_on_all(1):
            life.base = commit

    def reports(self, line):
        self.reported = max(self.reported, line["step"])


ACTIONS = {
    "adopts a commit": Automaton.adopts,
    "discards newer": Automaton.discards,
    "commit begins": Automaton.begins,
    "publish begins": Automaton.publishes,
    "publish ends": Automaton.has_published,
    "confirms": Automaton.confirms,
    "withdraws": Automaton.withdraws,
    "step begins": Automaton.writes_slots,
    "tiles move": Automaton.writes_slots,
    "parameters leave": Automaton.leaves,
    "gives back": Automaton.gives_back,
    "load fails": Automaton.load_fails,
    "tiles go back": Automaton.goes_back,
    "reports": Automaton.reports,  # a program was told that a step is durable
}


# ---- how a line is shown -------------------------------------------------------------


def who(line):
    return f"rank {line['rank']}" if "rank" in line else place(line["store"]) if "store" in line else "a program"


def place(store):
    """Return the directory of a store, and of its rank or test."""
    return "/".join(store.split("/")[-3:-1])


def shown(line):
    of = (
        "copy",
        "sequence",
        "round",
        "step",
        "is_round",
        "tiles",
        "has_manifest",
        "manifest",
        "table",
        "freed",
        "spaces",
    )
    fields = " ".join(f"{name} {line[name]}" for name in of if name in line)
    return f"{line['t'] / 1e6:.3f} ms  {who(line)}: {line['do']}  {fields}"

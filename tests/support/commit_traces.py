"""Records the actions of commits, in every process of a test, for the reference automaton (tests/model/automaton.py).

Each process writes a file of its own, one line of JSON for an action, before that is done: so the trace of a process
that is killed has it, too. Forked processes record like their parent; a new interpreter does so once it has imported
this module.
"""

import contextlib
import functools
import itertools
import json
import os
import threading
import time
import weakref
from os import O_APPEND, O_CREAT, O_WRONLY, fstat, getpid, stat, write  # tests replace those of os
from os import open as open_file
from pathlib import Path

from model.automaton import Automaton, Refused

from csd_optim import commit_trace
from csd_optim.optim.states import StatesOnDevices

VARIABLE = "CSD_OPTIM_TEST_TRACE"  # the directory of the traces
_recorder = None
_numbers = itertools.count()
_known = weakref.WeakKeyDictionary()  # by committer: its number, and the recorder of its first line
_reported = weakref.WeakKeyDictionary()  # by optimizer: the last step that was reported


class Recorder:
    """Writes the trace of this process."""

    def __init__(self, directory, clock=time.monotonic_ns):
        self.directory, self.clock, self.process = directory, clock, f"{getpid()}-{clock()}"
        self._fd, self._opening = None, threading.Lock()

    def write(self, action, fields):
        if self._fd is None and not Path(self.directory).exists():
            return  # the test that has made it is over; a server of processes keeps the environment of its first test
        with self._opening if self._fd is None else contextlib.nullcontext():
            if self._fd is None:
                self._fd = open_file(f"{self.directory}/{self.process}", O_WRONLY | O_CREAT | O_APPEND, 0o600)
        write(self._fd, (json.dumps({"t": self.clock(), "do": action, **fields}) + "\n").encode())


def follow(directory):
    """Record this process and its children in `directory` from now on; "": nowhere."""
    global _recorder
    os.environ[VARIABLE] = directory = str(directory)
    if directory != (_recorder.directory if _recorder else ""):
        _recorder = Recorder(directory) if directory else None
    if directory and commit_trace.listener is None:
        commit_trace.listener = _listen
        _watch_reports()


def followed():
    return os.environ.get(VARIABLE, "")


@contextlib.contextmanager
def accepted(directory):
    """Record what commits do inside the context, and hand it to the automaton. Raises Refused.

    A step that was reported as durable must have left a trace.
    """
    follow(directory)
    try:
        yield
    finally:
        follow("")
    automaton = Automaton()
    automaton.accept(lines_in(directory))
    if automaton.reported and not automaton.commits:
        raise Refused(f"step {automaton.reported} was reported as durable, and left no trace")


def lines_in(directory):
    """Return the lines of all processes in the order of time. A process that was killed may have cut off its last."""
    texts = [path.read_text() for path in Path(directory).iterdir()]
    lines = [json.loads(line) for text in texts for line in text[: text.rfind("\n") + 1].splitlines()]
    return sorted(lines, key=lambda line: line["t"])


# ---- what is recorded ----------------------------------------------------------------


def _listen(action, **objects):
    recorder, about = _recorder, {}
    if recorder and (committer := objects.get("committer")):
        about = _about(recorder, committer, is_first=action == "commit begins" and committer.sequence == 1)
        recorder = about and recorder
    if recorder:
        recorder.write(action, {**about, **(FIELDS[action](**objects) if action in FIELDS else {})})


def _about(recorder, committer, *, is_first):
    """Return what a line says of a committer; {} if it only reads, or was there before the trace."""
    if committer not in _known:
        is_new = is_first or committer.sequence == 0  # before it adopts a commit, too
        _known[committer] = next(_numbers), recorder if is_new else None
    number, begun_by = _known[committer]
    if begun_by is not recorder or committer.states.mode == "read":
        return {}
    rank, size = (committer.ranks.rank, committer.ranks.size) if committer.ranks else (0, 1)
    stores = [_place(store) for store in committer.devices.stores if store and store.durable]
    return {"who": f"{recorder.process}.{number}", "rank": rank, "size": size, "stores": stores}


def _place(store):
    """Return what identifies a store's file: another one may take its name."""
    return f"{store.path}#{fstat(store.fd).st_ino if store.fd >= 0 else 0}"


def _block(block):
    named = {"sequence": block.sequence, "round": block.round, "step": block.step, "id": block.store_id.hex()}
    return {**named, "manifest": [*block.manifest], "table": block.table.crc}


def _adopt(recovered, **_):
    blocks = [{"copy": c.copy, **_block(c.superblock)} for c in recovered]
    return {"stores": [f"{c.path}#{stat(c.path).st_ino}" for c in recovered], "blocks": blocks}


def _discard(store, commit):
    return {"store": _place(store), **_block(commit.superblock)}


def _publish(store, staged, copy):
    has_manifest = staged.manifest is not None
    return {"store": _place(store), "copy": copy, "has_manifest": has_manifest, **_block(staged.superblock)}


def _commit(commit, is_round=None, **_):
    return {**_block(commit.job.superblock), "is_round": is_round}


def _begun(committer, commit, is_round):
    return {**_commit(commit, is_round), "freed": _spaces(committer, commit.job.freed)}


def _spaces(committer, spaces, **_):
    """Return the spaces of parameters that have left, as far as they are in files: store, offset and size of each."""
    stores = committer.devices.stores
    return [[_place(stores[device]), offset, size] for device, offset, size in sorted(spaces) if stores[device]]


def _leave(**objects):
    return {"spaces": _spaces(**objects)}


def _give_back(store, offset, size):
    return {"store": _place(store), "space": [_place(store), offset, size]}


def _tiles(tiles=(), **_):
    return {"tiles": len(tiles)}


FIELDS = {
    "adopts a commit": _adopt,
    "discards newer": _discard,
    **dict.fromkeys(("publish begins", "publish ends"), _publish),
    "commit begins": _begun,
    **dict.fromkeys(("confirms", "withdraws"), _commit),
    "parameters leave": _leave,
    "gives back": _give_back,
    **dict.fromkeys(("step begins", "tiles move", "tiles go back"), _tiles),
}


def _watch_reports():
    """Record which steps an optimizer reports as durable."""
    committed_step, synchronize = StatesOnDevices.committed_step, StatesOnDevices.synchronize

    def watched(opt):
        step = committed_step.fget(opt)
        if _recorder and step > _reported.get(opt, 0):
            _reported[opt] = step
            _recorder.write("reports", {"step": step})
        return step

    @functools.wraps(synchronize)
    def synchronized(opt):
        synchronize(opt)
        watched(opt)

    StatesOnDevices.committed_step = property(watched, doc=committed_step.__doc__)
    StatesOnDevices.synchronize = synchronized


def _after_fork_in_child():
    global _recorder
    _recorder = _recorder and Recorder(_recorder.directory)


os.register_at_fork(after_in_child=_after_fork_in_child)
follow(followed())

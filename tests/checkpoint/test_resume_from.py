"""resume_from: each rank makes its own stores from those of any number of ranks. test_reshard.py compares their bits.

Whatever is wrong is refused by all ranks before anything is written. A kill at any call leaves the old stores as they
are, and the same script, started again, goes on: whether the new stores were made, half made, or trained with since.
"""

import os
import shutil
import signal
import warnings
from pathlib import Path

import pytest
import torch
from support.comparing import assert_same
from support.divided import (
    TILE,
    DividedTraining,
    begins,
    exported,
    files,
    inside,
    makes,
    names,
    on,
    places,
    resumed,
    to,
    twin,
)
from support.images import images_of, put
from support.ranks import KILLED, on_living_ranks, on_ranks
from support.replacing import replaced
from support.stores import flip
from torch.distributed.fsdp import FullyShardedDataParallel

from csd_optim import CSDSGD, CSDAdam, CSDError, CSDOSError, CSDStoreError, CSDValueError, CSDWarning
from csd_optim.checkpoint.reshard import reshard
from csd_optim.checkpoint.verify import verify
from csd_optim.store.file import StoreFile
from csd_optim.store.format import FILE_NAME, read_contents

pytestmark = [
    pytest.mark.at_hand("resume_from reads and makes stores in directories"),
    pytest.mark.fp32_states("names its codecs"),
]


def test_a_snapshot(tmp_path):
    on(2, saves_and_goes_on, directory=tmp_path)
    assert sorted(path.name for path in tmp_path.glob("snapshot/*")) == ["rank-0", "rank-1"]
    assert [Path(v.file).parent.name for v in verify([tmp_path / "snapshot"])] == ["device-0", "device-1"] * 2
    users = resumed(3, "any", "ddp", "new", 3, resume_from="snapshot", directory=tmp_path)
    assert users == [(0, [0, 1]), (1, [0, 1]), (0, [0, 1])]
    assert read_contents(tmp_path / "new-2-0").origin["world_size"] == 2


def saves_and_goes_on(rank, size):
    training = DividedTraining("any", "ddp", rank, size, places("old", rank, 2))
    training.until(3).opt.save("snapshot")
    training.until(4).opt.close()


# ---- what is refused -----------------------------------------------------------------


def started(old, **options):
    """A training alone that resumes from old stores."""
    devices = options.pop("devices", places("new", 0))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "user_state differs")
        return DividedTraining("any", "alone", devices=devices, resume=True, resume_from=old, **options)


def refused(old, message, *, error=CSDStoreError, **options):
    before = files(Path.cwd(), "old"), files(Path.cwd(), "new")
    with pytest.raises(error, match=message):
        started(old, **options)
    assert (files(Path.cwd(), "old"), files(Path.cwd(), "new")) == before


def test_wrong_old_stores(old, two):
    refused(old[:1], "the store of rank 0 of 2: name those of all ranks")
    refused([*old, old[1]], "named twice", error=CSDValueError)
    refused([], "Invalid devices", error=CSDValueError)
    refused([old[0], "gone"], "there is no store in", error=CSDOSError)
    refused("old-{rank}-0", "there is no store in", error=CSDOSError)
    with inside(Path.cwd()):
        reshard([two / "one-0-0"], to("foreign"), 2)
    refused([old[0], "foreign-1-0"], "is of another run than rank 0's")
    flip(Path(old[1]), "exp_avg")
    refused(old, "old-1-0.*exp_avg of tile 0 is damaged: elements 0 to .* of weight")
    assert not [*Path.cwd().glob("new-*/*")]


def test_wrong_arguments(old):
    with pytest.raises(CSDValueError, match="resume_from needs resume=True"):
        CSDAdam([torch.nn.Parameter(torch.zeros(3))], devices="new-0-0", resume_from=old)
    for device in ("ram:", "gpu:", "xrt:0"):
        refused(old, f"makes a store on each device, and cannot on '{device}'", error=CSDValueError, devices=device)
    refused(old, "is one of the old stores", error=CSDValueError, devices=[old[1]])
    refused(old, "run csd-optim reshard on the owner's machine", error=CSDValueError, devices="serve://127.0.0.1:9")
    assert not [*Path.cwd().glob("new-*")]


def test_another_model(old):
    refused(old, "cannot be resumed: its states are those of the rule adamw", rule="SGD")
    refused(old, "states of parameter weight are fp32 there, and state_dtype says 8bit", rule="8bit")
    with pytest.raises(CSDStoreError, match="is the store of another model: "):
        DividedTraining("groups", "alone", devices=places("new", 0), resume=True, resume_from=old)
    assert not [*Path.cwd().glob("new-*")]


def test_codes_that_do_not_line_up(tmp_path):
    """The ranks encode the same codes as one process for all of them."""
    on(1, begins, "odd", "alone", "old", 3, 1, "8bit", {"spread": True}, directory=tmp_path)
    with inside(tmp_path):
        reshard(names("old", 1), to("offline"), 2, tile_elems=TILE)
    on(2, makes, "odd", "ddp", "new", 1, {"resume_from": names("old", 1), "state_dtype": "8bit"}, directory=tmp_path)
    assert_same(exported(tmp_path, "new", 2), exported(tmp_path, "offline", 2))
    for rank in range(2):
        here, there = (read_contents(tmp_path / f"{run}-{rank}-0").sums for run in ("new", "offline"))
        assert [sums.tolist() for sums in here] == [sums.tolist() for sums in there]


def error_of(rank, size, division, kind, options):
    """The error with which a rank ends; `options` by rank."""
    with pytest.raises(CSDError) as caught:
        DividedTraining(kind, division, rank, size, places("new", rank), resume=True, **options[rank])
    return f"{type(caught.value).__name__}: {caught.value}"


def flat_parameters(rank, old):
    model = FullyShardedDataParallel(torch.nn.Linear(20, 30), device_id=torch.device("cpu"))
    with pytest.raises(CSDError) as caught:
        CSDAdam(model.parameters(), devices=f"new-{rank}-0", resume=True, resume_from=old)
    return str(caught.value)


def test_all_ranks_refuse(old):
    """Before any of them has written anything."""
    from_old = {"resume_from": old}
    on(1, begins, "odd", "alone", "matrices", 1, 1, directory=Path.cwd())
    texts = on(2, error_of, "columns", "odd", [{"resume_from": "matrices-0-0"}] * 2, directory=Path.cwd())
    assert all("this model: weight is not divided by rows: rank" in t for t in texts)
    assert all("is a shard of FSDP1 here" in t for t in on_living_ranks(2, flat_parameters, old, directory=Path.cwd()))
    texts = on(2, error_of, "ddp", "any", [from_old, {}], directory=Path.cwd())
    assert all("all ranks resume or none, with resume_from or without" in text for text in texts)
    texts = on(2, error_of, "ddp", "any", [from_old, {"resume_from": old[:1]}], directory=Path.cwd())
    assert all("name those of all ranks" in text for text in texts)
    shutil.copytree("old-0-0", "copy-0-0")
    shutil.copytree("old-1-0", "copy-1-0")
    goes_on_alone(names("copy", 2))
    texts = on(2, error_of, "ddp", "any", [from_old, {"resume_from": ["alone-0-0"]}], directory=Path.cwd())
    assert all("the ranks do not see the same old stores" in text for text in texts)
    assert not [*Path.cwd().glob("new-*")]


def goes_on_alone(old, step=4, place="alone-0-0"):
    """Makes stores of a process alone, and trains with them."""
    training = started(old, devices=[place])
    training.until(step).opt.close()


# ---- new stores that are there -------------------------------------------------------


def test_stores_of_another_origin(old, two):
    shutil.copytree(two / "one-0-0", "new-0-0")
    refused(old, r"new-0-0.*holds a store of step 3 that was not made from .*old-0-0.*To go on with it, leave")
    shutil.rmtree("new-0-0")
    shutil.copytree("old-0-0", "new-0-0")  # it was made from the process alone
    refused(old, r"new-0-0.*that was made from other stores than .*old-0-0")
    shutil.rmtree("new-0-0")
    reshard(old, to("new"), 2)
    refused(old, "for rank 0 of 2, and this is rank 0 of 1")


def test_old_stores_that_have_gone_on(old):
    started(old).until(4).opt.close()
    resumed(2, "any", "ddp", "old", 3, directory=Path.cwd())
    refused(old, r"new-0-0.*step 4 that was made from .*old-0-0.* at step 3, which has gone on since, to step 5")
    assert started(names("old", 2), devices=["other"]).opt.committed_step == 5


def test_old_stores_that_are_gone(old):
    started(old).until(4).opt.close()
    for name in old:
        shutil.rmtree(name)
    with pytest.warns(CSDWarning, match="there are no stores in .* any more; going on with those that were made"):
        training = started(old)
    assert training.opt.committed_step == 4
    training.opt.close()
    refused(old, "there is no store in", error=CSDOSError, devices=places("other", 0))


def test_half_made_stores_are_made_anew(old):
    reshard(old, to("new", 2), 2, tile_elems=TILE)
    shutil.rmtree("new-1-0")
    flip(Path("new-0-0"), "master")  # so it has to be made anew, too
    assert [own for own, _ in resumed(2, "any", "ddp", "new", 3, 2, resume_from=old, directory=Path.cwd())] == [0, 0]


def test_stores_that_have_gone_on_are_not_made_anew(old):
    resumed(2, "any", "ddp", "new", 3, resume_from=old, directory=Path.cwd())
    shutil.rmtree("new-1-0")
    before = files(Path.cwd(), "new")
    texts = on(2, error_of, "ddp", "any", [{"resume_from": old}] * 2, directory=Path.cwd())
    assert all("no store on rank 1, but rank 0 has" in text for text in texts)
    assert files(Path.cwd(), "new")["new-0-0"] == before["new-0-0"]


def test_user_states(tmp_path):
    on(2, begins, "tiny", "ddp", "old", 1, 1, directory=tmp_path)
    with inside(tmp_path), pytest.warns(CSDWarning, match="differs between the 2 old ranks: this rank has that of old"):
        training = DividedTraining("tiny", "alone", devices="new", resume=True, resume_from=names("old", 2))
    assert training.opt.resumed_user_states == [{"rank": 0}, {"rank": 1}]
    assert training.opt.user_state == {"rank": 0}
    training.opt.close()
    alone = CSDSGD([torch.nn.Parameter(torch.zeros(3))], lr=0.1, momentum=0.9, devices="ram:")
    assert alone.resumed_user_states == [{}]
    alone.close()


def fails_as_rank(rank, size, old, method):
    """Starts; on rank 1 a method of its first new store fails."""

    def fails(original, store, *arguments):
        if rank and store.path.parent.name == "new-1-0":
            raise CSDOSError(5, "the disk is broken")
        return original(store, *arguments)

    with replaced(StoreFile, method, fails), pytest.raises(CSDError) as caught:
        DividedTraining("any", "ddp", rank, size, places("new", rank), resume=True, resume_from=old)
    return str(caught.value)


@pytest.mark.parametrize("method", ["allocate", "sync", "publish"])
def test_a_disk_fails(method, old):
    """It fails on all ranks, and the next start makes all stores."""
    texts = on(2, fails_as_rank, old, method, directory=Path.cwd())
    assert all("the disk is broken" in text for text in texts)
    assert not Path("new-1-0", FILE_NAME).exists()
    assert len(resumed(2, "any", "ddp", "new", 3, resume_from=old, directory=Path.cwd())) == 2


# ---- kills ---------------------------------------------------------------------------


def again(run):
    """Starts the script: the same one at every start."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "user_state differs")
        return DividedTraining("tiny", "alone", devices=places(run, 0, 2), resume=True, resume_from=names("old", 2))


def test_killed_at_every_write(tmp_path, monkeypatch):
    """One process of two devices: the commits are those of two ranks that meet."""
    on(2, begins, "tiny", "ddp", "old", 3, 1, directory=tmp_path)
    monkeypatch.chdir(tmp_path)
    before, want, half = files(tmp_path, "old"), twin("tiny", 5), 0
    for n, image in enumerate(images_of(tmp_path, "new-*", lambda: again("new").opt.close())):
        put(image, "new-*")
        made = [path for path in tmp_path.glob(f"new-*/{FILE_NAME}") if path.read_bytes()[:4] == b"CSDO"]
        if not made and n % 3:
            continue  # until the first commit one call is like another
        half += len(made) == 1
        training = again("new")
        assert training.done == 3
        assert_same(training.until(5).image(), want)
        training.opt.close()
        assert files(tmp_path, "old") == before
    assert half


def dies_as_rank(rank, size, old, call, when):
    """Starts; rank 1 is killed before or after its `call`-th publish."""
    calls, publish = 0, StoreFile.publish

    def counted(store, staged, copy):
        nonlocal calls
        calls += 1
        if calls == call and when == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        publish(store, staged, copy)
        if calls == call and when == "after":
            os.kill(os.getpid(), signal.SIGKILL)

    if rank:
        StoreFile.publish = counted
    with pytest.raises(CSDError) as caught:
        DividedTraining("any", "ddp", rank, size, places("new", rank), resume=True, resume_from=old)
    return str(caught.value)


@pytest.mark.parametrize(("call", "when"), [(1, "before"), (1, "after"), (2, "before"), (2, "after")])
def test_a_rank_is_killed_as_it_commits(call, when, old):
    before = files(Path.cwd(), "old")
    text, other = on_ranks(2, dies_as_rank, 2, old, call, when, directory=Path.cwd(), may_die=[1])
    assert other == KILLED
    assert "lost the others" in text
    assert files(Path.cwd(), "old") == before
    assert [all_ for _, all_ in resumed(2, "any", "ddp", "new", 3, resume_from=old, directory=Path.cwd())] == [
        [0, 0]
    ] * 2

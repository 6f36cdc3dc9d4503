"""csd-optim reshard and resume_from: stores of N ranks become stores of M ranks, to the bit. Every training here has a
twin, alone, in memory.

Gradients are given, the same for every division of the parameters, so a training has the same bits on any number of
ranks. A kill at any writing call leaves the old stores, and either no new stores or ones with instructions for the
user.
"""

import contextlib
import functools
import json
import os
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from support.comparing import assert_same
from support.divided import (
    CHANGES,
    RULES,
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
)
from support.forked import process
from support.images import CALLS, images_of, put
from support.ranks import on_living_ranks
from support.replacing import replaced
from support.stores import flip
from torch.distributed.fsdp import FullyShardedDataParallel

import csd_optim.store.format
from csd_optim import (
    CSDAdam,
    CSDBusyError,
    CSDError,
    CSDOSError,
    CSDStoreError,
    CSDStoreExistsError,
    CSDValueError,
)
from csd_optim.bindings import decode, encode, isa_used
from csd_optim.checkpoint.parts import Division, Whole, block_of, ranks_that_cover
from csd_optim.checkpoint.reshard import reshard
from csd_optim.checkpoint.verify import verify
from csd_optim.distributed.sharding import rows_of
from csd_optim.params.manifest import first_difference
from csd_optim.store.check import check_origin
from csd_optim.store.file import StoreFile
from csd_optim.store.format import FILE_NAME, read_contents
from csd_optim.store.recovery import RanksStore, common_commits, last_round
from csd_optim.store.sections import SECTIONS, slot_of

pytestmark = [pytest.mark.at_hand("reshard reads and makes the stores"), pytest.mark.fp32_states("names its codecs")]


# ---- exact, whatever the numbers -----------------------------------------------------


@pytest.mark.filterwarnings("ignore:user_state differs")
@pytest.mark.parametrize("change", CHANGES)
def test_goes_on_to_the_bit(change, tmp_path):
    """With the stores that csd-optim reshard makes, and with those that resume_from makes, which are the same."""
    kind, (division, size, n), (now, new_size, m), sharding = CHANGES[change]
    on(size, begins, kind, division, "old", 3, n, directory=tmp_path)
    before, old = files(tmp_path, "old"), names("old", size, n)
    with inside(tmp_path):
        said = reshard(old, to("new", m), new_size, sharding=sharding, tile_elems=2048)
    assert (said["step"], said["ranks"], said["of_ranks"], said["made_before"]) == (3, new_size, size, False)
    assert said["user_states_differ"] == (size > 1 and size != new_size)
    on(new_size, makes, kind, now, "own", m, {"resume_from": old, "tile_size": 2048}, directory=tmp_path)
    new, own = ([tmp_path / name for name in names(run, new_size, m)] for run in ("new", "own"))
    assert not any(v.damage or v.unchecked for v in verify([*new, *own]))
    origin = {
        **{"store_id": read_contents(tmp_path / old[0]).superblock.store_id.hex(), "step": 3, "world_size": size},
        "round": read_contents(tmp_path / old[0]).superblock.round,
        "sequences": [read_contents(tmp_path / f"old-{rank}-0").superblock.sequence for rank in range(size)],
    }
    for offline, here in zip(map(read_contents, new), map(read_contents, own), strict=True):
        assert here.manifest == offline.manifest
        assert (offline.superblock.sequence, "origin" in offline.manifest["features"]) == (1, True)
        assert offline.origin == origin
    assert len({read_contents(path).superblock.store_id for path in own}) == 1
    states = exported(tmp_path, "new", new_size, m)
    assert_same(exported(tmp_path, "own", new_size, m), states)
    if not division.startswith(("fsdp2", "hsdp")):
        assert_same(states, exported(tmp_path, "old", size, n))
    users = resumed(new_size, kind, now, "new", 3, m, directory=tmp_path)
    assert users == [(r if r < size else 0, [r if r < size else 0]) for r in range(new_size)]
    assert read_contents(new[0]).origin == origin  # parameters that join leave it there
    users = resumed(new_size, kind, now, "own", 3, m, resume_from=old, directory=tmp_path)
    assert users == [(r if r < size else 0, [*range(size)]) for r in range(new_size)]
    users = resumed(new_size, kind, now, "own", 5, m, resume_from=old, more=0, directory=tmp_path)  # they have gone on
    assert users == [(r, [r]) for r in range(new_size)]
    assert files(tmp_path, "old") == before


def test_replicas_of_shards(tmp_path):
    """HSDP with sharded=False, which csd-optim reshard has no name for: each replica keeps all of its shard."""
    on(3, begins, "fsdp2", "fsdp2", "old", 3, 1, directory=tmp_path)
    users = resumed(4, "fsdp2", "hsdp replicas", "new", 3, resume_from=names("old", 3), directory=tmp_path)
    assert [own for own, _ in users] == [0, 1, 2, 0]


@pytest.mark.parametrize("rule", [rule for rule in RULES if rule not in ("AdamW", "Top-K") and "8bit" not in rule])
def test_states_of_every_rule(rule, tmp_path):
    on(2, begins, "any", "ddp", "old", 3, 1, rule, directory=tmp_path)
    with inside(tmp_path):
        reshard(names("old", 2), to("new"), 3)
    resumed(3, "any", "ddp", "new", 3, 1, rule, directory=tmp_path)


def test_there_and_back(tmp_path, run):
    """By the command line: 2 ranks, a process on its own, 3 ranks, with training in between."""
    on(2, begins, "any", "ddp", "old", 2, 1, directory=tmp_path)
    old = [tmp_path / name for name in names("old", 2)]
    code, out, err = run("reshard", *old, "--ranks", 1, "--to", tmp_path / "one-0-0")
    assert (code, err) == (0, "")
    assert out.startswith("step 2, ")
    assert "of 2 ranks on 1 rank; continue with resume=True\nuser_state differs between the old ranks" in out
    resumed(1, "any", "alone", "one", 2, 1, directory=tmp_path)
    devices = [f"{tmp_path}/many-{{rank}}-0,{tmp_path}/many-{{rank}}-1"]
    code, out, err = run("reshard", tmp_path / "one-0-0", "--ranks", 3, "--to", *devices, "--tile-size", 4096, "--json")
    assert (code, err) == (0, "")
    said = json.loads(out)
    assert (said["schema"], said["step"], said["ranks"], len(said["devices"])) == ("csd_optim.reshard/1", 4, 3, 3)
    made = read_contents(tmp_path / "many-2-1")
    assert made.manifest["extents"][0]["tile_elems"] == 4096
    made_from = made.origin["store_id"]
    text = " ".join(run("inspect", tmp_path / "many-2-1")[1].split())
    assert f"made from store {made_from} of a process on its own, at step 4" in text
    text = " ".join(run("inspect", tmp_path / "one-0-0")[1].split())
    assert f"made from store {read_contents(old[0]).superblock.store_id.hex()} of 2 ranks, at step 2" in text
    assert json.loads(run("inspect", tmp_path / "many-2-1", "--json")[1])["origin"] == made.origin
    assert json.loads(run("inspect", old[0], "--json")[1])["origin"] is None
    assert "made from" not in run("inspect", old[0])[1]
    resumed(3, "any", "ddp", "many", 4, 2, directory=tmp_path)


def test_residuals(tmp_path):
    """They keep their bits, though Top-K then selects in other tiles."""
    on(3, begins, "large", "ddp", "old", 3, 1, "Top-K", directory=tmp_path)
    with inside(tmp_path):
        reshard(names("old", 3), to("new", 2), 2)
    on(2, makes, "large", "ddp", "own", 2, {"resume_from": names("old", 3), "topk": 0.1}, directory=tmp_path)
    old = exported(tmp_path, "old", 3)
    assert [bool(state["residual"].any()) for state in old["state"].values() if "residual" in state] == [True, True]
    assert_same(exported(tmp_path, "new", 2, 2), old)
    assert_same(exported(tmp_path, "own", 2, 2), old)
    assert not any(v.damage for v in verify([tmp_path / name for name in names("new", 2, 2)]))


def test_the_steps_that_all_ranks_have(tmp_path):
    """One rank was restored from the round before."""
    on(2, begins, "any", "ddp", "old", 3, 1, directory=tmp_path)
    file = tmp_path / "old-1-0" / FILE_NAME
    shutil.copy(file, tmp_path / "newest")
    resumed(2, "any", "ddp", "old", 3, directory=tmp_path)
    shutil.copy(tmp_path / "newest", file)
    with inside(tmp_path), pytest.raises(CSDStoreError, match=r"no step in common \(rank 0: \[5.*rank 1: \[3"):
        reshard(names("old", 2), to("new"), 3)
    assert not [*tmp_path.glob("new-*")]


# ---- 8 bits --------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "new_size"), [(2, 4), (1, 2), (4, 1)])
def test_codes_that_line_up(size, new_size, tmp_path):
    if size == 4:  # made here, as four processes are not worth it
        on(1, begins, "groups", "alone", "first", 3, 1, "8bit", directory=tmp_path)
        with inside(tmp_path):
            reshard(names("first", 1), to("old"), 4)
    else:
        on(size, begins, "groups", "ddp" if size > 1 else "alone", "old", 3, 1, "8bit", directory=tmp_path)
    with inside(tmp_path):
        reshard(names("old", size), to("new", 2), new_size, tile_elems=4096)
    assert not any(v.damage or v.unchecked for v in verify([tmp_path / name for name in names("new", new_size, 2)]))
    assert_same(exported(tmp_path, "new", new_size, 2), exported(tmp_path, "old", size))
    if new_size < 3:
        division = "ddp" if new_size > 1 else "alone"
        resumed(new_size, "groups", division, "new", 3, 2, "8bit", directory=tmp_path)


def regrouped(exp_avg, exp_avg_sq, peak, size):
    """What whole moments become when `size` ranks have their rows, in groups of their own: an oracle in fp32."""
    parts = [[], [], []]
    for rank in range(size):
        first, rows = rows_of(len(exp_avg), size, rank)
        m, v, p = (None if t is None else t[first : first + rows].reshape(-1) for t in (exp_avg, exp_avg_sq, peak))
        new_v, new_p = again_in_groups(v), None if p is None else again_in_groups(p)
        ratio = torch.where(v > 0, m / v.sqrt(), 0)  # exact, as a root has 5 significant bits, and a ratio has, too
        for part, value in zip(parts, (ratio * new_v.sqrt(), new_v, new_p), strict=True):
            part.append(value)
    return [None if part[0] is None else torch.cat(part).reshape(exp_avg.shape) for part in parts]


def alone_in_groups(state, codec):
    """Encode and decode the only state of a rule, in groups from its first element on."""
    n = len(state)
    codes = [torch.zeros(s.size, dtype=torch.uint8) for s in slot_of(n, ("master", "state"), codec, torch.float32)]
    encode(isa_used(), [None, state], torch.float32, codes, codec)
    out = torch.empty(n)
    decode(isa_used(), codes, torch.float32, [None, out], codec)
    return out


@pytest.mark.parametrize(
    ("rule", "state", "codec"), [("8bit Adagrad", "sum", "root"), ("8bit Muon", "momentum_buffer", "linear")]
)
def test_codes_of_one_state_that_do_not_line_up(rule, state, codec, tmp_path):
    on(1, begins, "odd", "alone", "one", 3, 1, rule, {"dtype": "bfloat16", "spread": True}, directory=tmp_path)
    with inside(tmp_path):
        reshard(names("one", 1), to("new", 2), 3, tile_elems=4096)
    assert not any(v.damage or v.unchecked for v in verify([tmp_path / name for name in names("new", 3, 2)]))
    old, new = exported(tmp_path, "one", 1), exported(tmp_path, "new", 3, 2)
    changed = 0
    for was, now in zip(old["state"].values(), new["state"].values(), strict=True):
        rows = [was[state].narrow(0, *rows_of(len(was[state]), 3, rank)).reshape(-1) for rank in range(3)]
        wanted = torch.cat([alone_in_groups(of_rank, codec) for of_rank in rows]).reshape(was[state].shape)
        assert_same((now[state], now["master"], now["step"]), (wanted, was["master"], was["step"]))
        changed += int((now[state] != was[state]).sum())
    assert changed  # or nothing was tested
    assert all(on(3, goes_on_at_all, "odd", "ddp", rule, "bfloat16", directory=tmp_path))


def again_in_groups(second_moment):
    """Encode and decode a second moment, in groups from its first element on."""
    n = len(second_moment)
    codes = [torch.zeros(s.size, dtype=torch.uint8) for s in slot_of(n, SECTIONS[:3], "8bit", torch.float32)]
    encode(isa_used(), [None, None, second_moment, None], torch.float32, codes)
    out = torch.empty(n)
    decode(isa_used(), codes, torch.float32, [None, None, out, None])
    return out


@pytest.mark.parametrize("rule", ["8bit", "8bit amsgrad"])
@pytest.mark.parametrize(("size", "new_size", "dtype"), [(2, 3, "float32"), (3, 2, "bfloat16"), (1, 2, "float16")])
def test_codes_that_do_not_line_up(size, new_size, dtype, rule, tmp_path):
    """Masters keep their bits, second moments those of their value in the new groups, and exp_avg its ratio to them."""
    on(1, begins, "odd", "alone", "one", 3, 1, rule, {"dtype": dtype, "spread": True}, directory=tmp_path)
    with inside(tmp_path):
        reshard(names("one", 1), to("old"), size, tile_elems=4096)
        before = files(tmp_path, "old")
        reshard(names("old", size), to("new", 2), new_size, tile_elems=4096)
        reshard(names("old", size), to("again", 2), new_size, tile_elems=4096)
    assert files(tmp_path, "old") == before
    assert not any(v.damage or v.unchecked for v in verify([tmp_path / name for name in names("new", new_size, 2)]))
    old, new = exported(tmp_path, "old", size), exported(tmp_path, "new", new_size, 2)
    assert_same(new, exported(tmp_path, "again", new_size, 2))
    changed = 0
    for was, now in zip(old["state"].values(), new["state"].values(), strict=True):
        moments = was["exp_avg"], was["exp_avg_sq"], was.get("max_exp_avg_sq")
        wanted = regrouped(*moments, new_size)
        assert_same([now[key] for key in now if key.endswith(("avg", "sq"))], [w for w in wanted if w is not None])
        assert_same((now["master"], now["step"]), (was["master"], was["step"]))
        assert not ((wanted[1] == 0) & (moments[1] > 0)).any()
        changed += int((now["exp_avg_sq"] != was["exp_avg_sq"]).sum())
    assert changed  # or nothing was tested
    division = "ddp" if new_size > 1 else "alone"
    went = on(new_size, goes_on_at_all, "odd", division, rule, dtype, directory=tmp_path)
    assert all(went)


def goes_on_at_all(rank, size, kind, division, rule, dtype):
    devices = places("new", rank, 2)
    training = DividedTraining(kind, division, rank, size, devices, rule, resume=True, dtype=dtype, spread=True)
    before = training.opt.committed_step
    training.until(5).opt.synchronize()
    with training.opt as opt:
        return before == 3 and opt.committed_step == 5


# ---- parts ---------------------------------------------------------------------------


@pytest.mark.parametrize("order", [[0, 1, 2], [1, 0, 2], [2, 1, 0]])
@pytest.mark.parametrize("scale", [1, 2])
def test_shared_elements(order, scale):
    """Of any two parts, and any range, against NumPy's indices."""
    shape = [7, 3, 2]
    numbers = np.arange(scale * 42).reshape(*shape, scale)
    whole = Whole(shape, order, scale)
    rng = np.random.default_rng(0)
    for size, new_size in [(1, 3), (2, 3), (3, 2), (4, 4), (9, 2), (5, 1)]:
        for rank, new_rank in np.ndindex(size, new_size):
            parts = []
            for k, n in ((rank, size), (new_rank, new_size)):
                first, rows = rows_of(7, n, k)
                in_memory = numbers[first : first + rows].transpose([*order, 3]).reshape(-1)
                parts.append((whole.part(first, rows), in_memory))
            (old, here), (new, there) = parts
            assert (old.numel, new.numel) == (len(here), len(there))
            first = int(rng.integers(0, old.numel + 1))
            n = int(rng.integers(0, old.numel - first + 1))
            found = {}
            for at, to_, count in old.shared(new, first, n):
                assert first <= at
                assert at + count <= first + n
                assert (here[at : at + count] == there[to_ : to_ + count]).all()
                found |= dict.fromkeys(range(at, at + count))
            assert [*found] == [i for i in range(first, first + n) if here[i] in there]


def entry(shape, whole, first):
    return {"name": "p", "shape": shape, "of": {"shape": whole, "first": first}}


@pytest.mark.parametrize(
    "p",
    [
        entry([8, 2], [8, 5], [0, 2]),  # tensor parallelism
        entry([4, 2], [8, 5], [4, 0]),
        entry([2, 5], [8, 5], [4, 1]),  # made up
    ],
)
def test_parts_that_are_no_rows(p):
    with pytest.raises(CSDStoreError, match="p is not divided by rows: rank 1 of 4"):
        block_of(p, "store", 1, 4)
    assert block_of(entry([2, 5], [8, 5], [2, 0]), "store", 1, 4) == (2, 2)
    assert block_of(entry([0, 5], [1, 5], [7, 3]), "store", 1, 4) == (7, 0)
    assert block_of(entry([], [], []), "store", 1, 4) == (0, 1)
    assert block_of({"name": "p", "shape": [3, 2]}, "store", 1, 4) == (0, 3)


@pytest.mark.parametrize(
    ("blocks", "owners"),
    [
        ([(0, 3), (3, 2)], [0, 1]),
        ([(3, 2), (0, 3)], [0, 1]),
        ([(0, 3), (3, 2), (0, 3), (3, 2)], [0, 1]),  # HSDP with sharded=False: replicas
        ([(0, 2), (3, 1), (2, 1), (4, 1)], [0, 1, 2, 3]),  # HSDP
        ([(0, 5), (0, 5)], [0]),
        ([(0, 5), (5, 0), (9, 0)], [0]),
        ([(0, 3), (2, 3)], None),
        ([(0, 3), (3, 1)], None),
        ([(0, 2), (3, 2), (0, 2)], None),  # a replica hides no hole
        ([(0, 5), (0, 3)], None),
        ([(1, 4)], None),
    ],
)
def test_blocks_that_cover_all_rows(blocks, owners):
    assert ranks_that_cover(dict(enumerate(blocks)), 5) == owners


@pytest.mark.parametrize(("replicas", "shards"), [(1, 3), (2, 2), (3, 1), (2, 3)])
def test_rows_of_a_division(replicas, shards):
    for rows in (0, 1, 3, 7, 12, 40):
        blocks = {rank: Division(shards, replicas).rows_of(rows, rank) for rank in range(replicas * shards)}
        owners = ranks_that_cover(blocks, rows)
        assert owners is not None
        assert sorted(owners) == [rank for rank, (_, n) in blocks.items() if n]


def test_tensor_parallelism(tmp_path):
    on(2, begins, "odd", "columns", "old", 1, 1, directory=tmp_path)
    with (
        inside(tmp_path),
        pytest.raises(CSDStoreError, match=r"weight is not divided by rows: rank 0 of 2"),
    ):
        reshard(names("old", 2), to("new"), 3)


# ---- what is refused -----------------------------------------------------------------


def refused(old, message, *, error=CSDStoreError, ranks=3, new=None, **options):
    before = files(_here(), "old")
    with pytest.raises(error, match=message):
        reshard(old, new or to("new"), ranks, **options)
    assert files(_here(), "old") == before


def _here():
    return Path.cwd()


def nothing_new():
    return not [*_here().glob("new-*/*")]


def test_wrong_stores(old, two):
    refused(old[:1], "the store of rank 0 of 2: name those of all ranks")
    refused([*old, old[1]], "named twice", error=CSDValueError)
    shutil.copytree(old[1], "twice")
    refused([*old, "twice"], "name all 1 of them, each once, not 2")
    refused([], "Invalid devices", error=CSDValueError)
    refused([old[0], "gone"], "there is no store in", error=CSDOSError)
    with inside(_here()):
        reshard([two / "one-0-0"], to("foreign"), 2)
    refused([old[0], "foreign-1-0"], "is of another run than rank 0's")
    assert nothing_new()


def test_a_store_in_use(old):
    store = StoreFile(_here() / old[1], durable=True, mode="resume")
    try:
        refused(old, "is in use", error=CSDBusyError)
    finally:
        store.close()


def test_a_damaged_tile(old):
    flip(_here() / old[1], "exp_avg")
    refused(old, "old-1-0.*exp_avg of tile 0 is damaged: elements 0 to .* of weight")
    assert nothing_new()
    (_here() / old[0] / FILE_NAME).write_bytes(b"nothing")
    refused(old, "no csd_optim store")


def test_wrong_names(old):
    refused(old, "named for rank 0 and rank 1; write {rank}", error=CSDValueError, new=["new"])
    refused(old, "'ram:|ram: keeps nothing", error=CSDValueError, new=["ram:"])
    refused(old, "is one of the old stores", error=CSDValueError, ranks=2, new=["old-{rank}-0"])
    refused(old, "there is no directory", error=CSDOSError, new=["not/there-{rank}"])
    refused(old, "Invalid sharding: 'tensor'", error=CSDValueError, sharding="tensor")
    refused(old, "'hsdp:2x2' is a mesh of 4 ranks, not of 3", error=CSDValueError, sharding="hsdp:2x2")
    refused(old, "Invalid ranks: 0", error=CSDValueError, ranks=0)
    assert nothing_new()


def test_targets_that_exist(old):
    shutil.copytree(old[0], "new-1-0")
    before = files(_here(), "new")
    refused(old, "new-1-0.*holds a store of step 3, and nothing is overwritten", error=CSDStoreExistsError)
    assert files(_here(), "new") == before
    (_here() / "new-1-0" / FILE_NAME).write_bytes(b"a letter to my mother")
    refused(old, "is no csd_optim store; move it away|no csd_optim store", error=CSDError)
    assert (_here() / "new-1-0" / FILE_NAME).read_bytes() == b"a letter to my mother"
    shutil.rmtree("new-1-0")
    (_here() / "new-1-0").write_text("a file")
    refused(old, "new-1-0 is a file; a device is a directory", error=CSDOSError)


def test_no_room(old):
    def full(statvfs, path):
        return os.statvfs_result((4096, 4096, 10, 2, 2, 9, 9, 9, 0, 255))

    with replaced(os, "statvfs", full):
        refused(old, "no room in .*0.00 GB are free", error=CSDOSError)
    assert nothing_new()


def own_parameters(rank):
    with CSDAdam([torch.nn.Parameter(torch.full((50, 20), rank + 1.0))], devices="old-{rank}-0", sharded=False) as opt:
        opt.param_groups[0]["params"][0].grad = torch.ones(50, 20)
        opt.step()
        opt.synchronize()


def test_ranks_that_have_parts_of_one_model(tmp_path, monkeypatch):
    """With sharded=False: their states may have the same names and shapes."""
    monkeypatch.chdir(tmp_path)
    on_living_ranks(2, own_parameters, directory=tmp_path)
    refused(names("old", 2), "rank 1 has other states than rank 0")


def flat_parameters(rank):
    model = FullyShardedDataParallel(torch.nn.Linear(20, 30), device_id=torch.device("cpu"))
    with CSDAdam(model.parameters(), devices="old-{rank}-0") as opt:
        model(torch.ones(2, 20)).sum().backward()
        opt.step()
        opt.synchronize()


def test_flat_parameters(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    on_living_ranks(2, flat_parameters, directory=tmp_path)
    refused(names("old", 2), "is a shard of FSDP1, which alone can put it together")


def test_parts_of_equal_shapes(old):
    """A resume compares where a part begins: FSDP2's and HSDP's may have the same shape."""

    class Part:
        def __init__(self, first):
            self.first = first

        def of(self, p):
            return p[:2]

        def manifest_fields(self):
            return {"of": {"shape": [8, 5], "first": [self.first, 0]}}

    groups = [{"params": [torch.nn.Parameter(torch.zeros(8, 5))]}]
    entry = {"name": "0.0", "group": 0, "position": 0, "shape": [2, 5], "dtype": "float32", **Part(2).manifest_fields()}
    stored = {"params": [entry], "waiting": []}
    assert first_difference(stored, groups, lambda _: Part(2)) is None
    assert "from [2, 0] on there, and of [8, 5] from [4, 0] on here" in first_difference(
        stored, groups, lambda _: Part(4)
    )


def test_older_versions_refuse(old, monkeypatch):
    known = csd_optim.store.format.FEATURES - {"origin"}
    monkeypatch.setattr("csd_optim.store.format.FEATURES", known)
    with pytest.raises(CSDStoreError, match="it has origin, which this csd_optim does not know"):
        read_contents(_here() / old[0])


ORIGIN = {"store_id": "0" * 32, "round": 1, "step": 1, "world_size": 2, "sequences": [4, 5]}


@pytest.mark.parametrize(
    "origin",
    [
        None,
        {},
        *({**ORIGIN, **wrong} for wrong in ({"store_id": "0" * 31}, {"step": -1}, {"more": 1}, {"sequences": [4]})),
    ],
)
def test_impossible_origins(origin):
    with pytest.raises(CSDStoreError, match="the origin"):
        check_origin(origin)


# ---- kills ---------------------------------------------------------------------------


def dies(directory, at):
    """Reshards, and is killed before the `at`-th call that writes, flushes, or makes or removes a name."""
    os.chdir(directory)
    left = at

    def counted(call, *arguments, **named):
        nonlocal left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return call(*arguments, **named)

    for name in CALLS:
        setattr(os, name, functools.partial(counted, getattr(os, name)))
    reshard(names("old", 1), to("new", 2), 2)


def found(run, size, n):
    """What ranks that resume find: "nothing", "all", or the error."""
    summaries = []
    with contextlib.ExitStack() as stack:
        try:
            for rank in range(size):
                stores = []
                for place in places(run, rank, n):
                    if (_here() / place / FILE_NAME).exists():
                        stores.append(StoreFile(_here() / place, durable=True, mode="read"))
                        stack.callback(stores[-1].close)
                some = any(store.recovered for store in stores)
                if some and len(stores) < n:
                    return "some"
                nothing = RanksStore("", b"", rank, size, is_first=True, steps={}, is_missing=True)
                summaries.append(RanksStore.of(stores, common_commits(stores)) if some else nothing)
            return "nothing" if last_round(summaries) is None else "all"
        except CSDStoreError as e:
            return str(e)


def test_killed_at_every_write(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    on(1, begins, "tiny", "alone", "old", 3, 1, directory=tmp_path)
    old, before, want = names("old", 1), files(_here(), "old"), exported(_here(), "old", 1)
    images = images_of(_here(), "new-*", lambda: reshard(old, to("new", 2), 2))
    outcomes = []
    for n, image in enumerate(images):
        put(image, "new-*")
        outcomes.append(found("new", 2, 2))
        assert files(_here(), "old") == before
        if outcomes[-1] == "nothing" and n % 3:
            continue  # until the first commit one call is like another
        made_before = reshard(old, to("new", 2), 2)["made_before"]
        assert made_before == (outcomes[-1] == "all")
        assert found("new", 2, 2) == "all"
        assert_same(exported(_here(), "new", 2, 2), want)
        (_here() / "new.pt").unlink()
    assert outcomes[-1] == "all"
    kinds = {outcome if len(outcome) < 10 else "error" for outcome in outcomes}
    assert kinds == {"nothing", "error", "all"}
    errors = [outcome for outcome in outcomes if len(outcome) > 10]
    assert all("was stopped before all new stores" in e and "Run it again" in e and "rank" in e for e in errors)
    assert outcomes == sorted(outcomes, key=lambda o: {"nothing": 0, "all": 2}.get(o, 1))
    for place in names("new", 2, 2):
        shutil.rmtree(place)
    at = outcomes.index(errors[0])
    child = process(dies, os.getcwd(), at + 1)
    child.join()
    assert child.exitcode == -signal.SIGKILL
    assert found("new", 2, 2) == outcomes[at]  # a process that is killed leaves what the image has


def resumes(rank, size):
    with pytest.raises(CSDError) as caught:
        DividedTraining("any", "ddp", rank, size, places("new", rank), resume=True)
    return str(caught.value)


def test_ranks_do_not_begin_anew_beside_a_store_that_was_made(old):
    reshard(old, to("new"), 2)
    shutil.rmtree("new-1-0")
    for text in on(2, resumes, directory=_here()):
        assert "no store on rank 1, but rank 0 has" in text
        assert "was stopped before all new stores were there. Run it again" in text
    assert not reshard(old, to("new"), 2)["made_before"]
    assert reshard(old, to("new"), 2)["made_before"]
    resumed(2, "any", "ddp", "new", 3, 1, directory=_here())
    refused(old, "holds a store of step 5, and nothing is overwritten", error=CSDStoreExistsError, ranks=2)


def test_devices_do_not_begin_anew(old):
    reshard(old, to("new", 2), 1)
    shutil.rmtree("new-0-1")
    with pytest.raises(CSDStoreError, match=r"holds no store, but .* does: csd-optim reshard.* was stopped"):
        DividedTraining("any", "alone", devices=places("new", 0, 2), resume=True)


def test_a_disk_that_fails_while_it_is_written(old):
    """Nothing of the new stores is left."""
    calls = 0

    def fails(publish, store, staged, copy):
        nonlocal calls
        calls += 1
        raise CSDOSError(5, "the disk is broken")

    with replaced(StoreFile, "publish", fails):
        refused(old, "the disk is broken", error=CSDOSError)
    assert calls == 1
    assert nothing_new()

"""Versions are what docs/publish-format.md says: a reader written from that page alone, and one that gets odd files."""

import errno
import hashlib
import json
import math
import os
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from support.versions import Writer

from csd_optim import CSDOSError, CSDStoreError, Replica
from csd_optim.publish.encode import BITMAP, DENSE, SPARSE, form_of
from csd_optim.replica import to_file

# ---- a reader that knows the page only -------------------------------------------------------


def weight(i):
    return ((i + 1) * 0x9E3779B1 % 2**32) | 1


def tensors_of(folder, number):
    """Return the tensors of a version, name → list of values, with all that the page asks a reader to check."""
    path = folder / f"v{number:010d}"
    manifest = json.loads((path / "manifest.json").read_bytes())
    assert manifest["format"] == "csd_optim version 1"
    assert manifest["number"] == number
    datas = []
    for file in manifest["files"]:
        data = (path / file["name"]).read_bytes()
        assert (len(data), hashlib.sha256(data).hexdigest()) == (file["bytes"], file["sha256"])
        datas.append(data)
    names = [t["name"] for t in manifest["tensors"]]
    if manifest["base"] is None:
        found = {t["name"]: [None] * math.prod(t["shape"]) for t in manifest["tensors"]}
        for file, data in zip(manifest["files"], datas, strict=True):
            take_whole(data, file.get("slices"), manifest["tensors"], found)
        assert not any(value is None for values in found.values() for value in values)
    else:
        base = folder / f"v{manifest['base']['number']:010d}"
        assert hashlib.sha256((base / "manifest.json").read_bytes()).hexdigest() == manifest["base"]["id"]
        found = tensors_of(folder, manifest["base"]["number"])
        for file, data in zip(manifest["files"], datas, strict=True):
            apply(data, [(names[t], first, n) for t, first, n in file["slices"]], found)
    for t in manifest["tensors"]:
        assert sum(v * weight(i) for i, v in enumerate(found[t["name"]])) % 2**32 == t["checksum"], t["name"]
    return found


def take_whole(data, slices, tensors, found):
    (size,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + size])
    header.pop("__metadata__", None)
    parts = slices or [(i, 0, math.prod(t["shape"])) for i, t in enumerate(tensors)]
    assert [*header] == [tensors[i]["name"] for i, _, _ in parts]
    for i, first, n in parts:
        t = tensors[i]
        there = header[t["name"]]
        assert there["dtype"] == t["dtype"]
        assert there["shape"][1:] == t["shape"][1:]
        assert slices or there["shape"] == t["shape"]
        begin, end = there["data_offsets"]
        assert (math.prod(there["shape"]), end - begin) == (n, 2 * n)
        found[t["name"]][first : first + n] = struct.unpack(f"<{n}H", data[8 + size + begin : 8 + size + end])


def apply(data, slices, tensors):
    magic, n_rows, zero, table, _ = struct.unpack("<8sIIQQ", data[:32])
    assert (magic, zero, data[32:64]) == (b"CSDDELT1", 0, bytes(32))
    assert len(data) == table + 32 * n_rows
    before = (-1, -1)
    for i in range(n_rows):
        slice_, count, first, elems, kind, at = struct.unpack("<IIQIIQ", data[table + 32 * i : table + 32 * i + 32])
        name, begin, n = slices[slice_]
        assert before < (slice_, first)
        assert at % 8 == first % 65536 == 0
        assert elems == min(65536, n - first)
        before = slice_, first
        if kind == 0:
            words = struct.unpack(f"<{count}I", data[at : at + 4 * count])
            changed = {word & 0xFFFF: word >> 16 for word in words}
        elif kind == 1:
            size = -(-elems // 64) * 8
            bits = data[at : at + size]
            which = [j for j in range(elems) if bits[j // 8] >> (j % 8) & 1]
            values = struct.unpack(f"<{count}H", data[at + size : at + size + 2 * count])
            changed = dict(zip(which, values, strict=True))
        else:
            assert (kind, count) == (2, elems)
            changed = dict(enumerate(struct.unpack(f"<{elems}H", data[at : at + 2 * elems])))
        assert len(changed) == count
        for inside, value in changed.items():
            tensors[name][begin + first + inside] = value


# ---- what it reads ---------------------------------------------------------------------------


SHAPES = {"one": (), "some": (33, 7), "none": (0, 4), "edge": (65536,), "large": (3, 50001)}


@pytest.fixture
def writer(tmp_path):
    with Writer(tmp_path / "policy", SHAPES) as writer:
        yield writer


@pytest.fixture(params=[1, 3], ids=["alone", "3 ranks"])
def any_writer(request, tmp_path):
    with Writer(tmp_path / "policy", SHAPES, ranks=request.param) as writer:
        yield writer


@pytest.mark.parametrize(
    ("share", "ranks"), [(0, 1), (0.001, 1), (0.05, 1), (0.3, 1), (0.97, 1), (1, 1), (0, 3), (0.05, 3), (0.4, 2)]
)
def test_the_page_suffices(share, ranks, tmp_path):
    """What was published is read from the page alone, and by the Replica, in any form of a block, from any ranks."""
    with Writer(tmp_path / "policy", SHAPES, ranks=ranks) as writer:
        writer.full()
        for _ in range(3):
            writer.change(share)
            writer.delta()
        found = tensors_of(writer.path, 4)
        assert {name: np.array(values, np.uint16).tolist() for name, values in found.items()} == writer.lists()
        replica, model = Replica(writer.path), {}
        replica.load(model)
        replica.verify(model)
        assert {name: values.tolist() for name, values in model.items()} == writer.lists()
        assert (replica.version, replica.step) == (4, 4)
        files = {file.name for file in writer.path.glob("v*/*")} | {f.name for f in writer.path.glob("v*/.*")}
        alone = {"model.safetensors", "delta-0.bin"}
        several = {
            f"{name}-{rank}.{kind}"
            for name, kind in (("model", "safetensors"), ("delta", "bin"))
            for rank in range(ranks)
        }
        assert files == {"manifest.json", *(alone if ranks == 1 else several)}


def test_the_smallest_form():
    """Sparse below 1/16 of a block, dense above 15/16; the forms are as large as the page says."""
    assert [form_of(n, 65536) for n in (0, 1, 4095, 4096)] == [SPARSE] * 4
    assert [form_of(n, 65536) for n in (4097, 30000, 61439)] == [BITMAP] * 3
    assert [form_of(n, 65536) for n in (61441, 65536)] == [DENSE] * 2
    assert form_of(1, 1) == DENSE


def test_follow_and_patches(any_writer):
    writer = any_writer
    writer.full()
    replica, model = Replica(writer.path), {}
    replica.load(model)
    assert replica.follow(model) == 0
    for share in (0.01, 0.4, 0.01):
        writer.change(share)
        writer.delta()
    before = {name: values.copy() for name, values in model.items()}
    for patch in replica.patches():
        assert (patch.dtype, patch.shape) == ("BF16", SHAPES[patch.name])
        assert (np.diff(patch.indices) > 0).all()
        before[patch.name][patch.indices] = patch.values
    assert replica.version == 1  # patches() applies nothing
    assert {name: values.tolist() for name, values in before.items()} == writer.lists()
    assert replica.follow(model) == 3
    assert {name: values.tolist() for name, values in model.items()} == writer.lists()
    assert [p.name for p in replica.patches(since=4)] == []


def test_a_new_run_begins_with_a_full_version(any_writer):
    """A replica follows from one run to the next, and patches() then has whole tensors."""
    writer = any_writer
    writer.full()
    replica, model = Replica(writer.path), {}
    replica.load(model)
    writer.change(0.5)
    writer.new_run()
    writer.full()
    writer.change(0.02)
    writer.delta()
    whole = {patch.name: patch for patch in replica.patches()}
    assert whole["large"].indices is None
    assert whole["large"].values.tolist() == writer.lists()["large"]
    assert replica.follow(model) == 2
    assert {name: values.tolist() for name, values in model.items()} == writer.lists()


def test_old_versions_go(writer):
    """The newest `keep` stay, and all that a new reader needs; one that is too far behind takes the full version."""
    writer.full()
    late, model = Replica(writer.path), {}
    late.load(model)
    for i in range(8):
        writer.change(0.01)
        if i == 4:
            writer.full()
        else:
            writer.delta()
        writer.folder.retire(2, writer.last_full)
    assert sorted(p.name for p in writer.path.glob("v*")) == [f"v{n:010d}" for n in range(6, 10)]
    assert {patch.indices for patch in late.patches(since=1)} == {None}  # whole tensors, as version 1 is gone
    assert late.follow(model) == 4
    assert {name: values.tolist() for name, values in model.items()} == writer.lists()


# ---- a file that follows ---------------------------------------------------------------------


def file_of(path):
    return {name: t.view(-1).view(torch.int16).numpy().view(np.uint16).tolist() for name, t in load_file(path).items()}


def test_a_file_follows(any_writer, run, tmp_path):
    writer = any_writer
    out = tmp_path / "model.safetensors"
    writer.full()
    code, text, _ = run("follow", writer.path, "--to", out, "--once")
    assert (code, text) == (0, f"{out}: version 1, of step 1\n")
    for share in (0.02, 0.6):
        writer.change(share)
        writer.delta()
    assert to_file.follow(writer.path, out).number == 3
    assert file_of(out) == writer.lists()
    assert to_file.follow(writer.path, out) is None
    code, text, _ = run("follow", writer.path, "--to", out, "--once", "--json")
    assert (code, text) == (0, "")


def test_a_file_that_was_changed_is_made_anew(writer, tmp_path):
    out = tmp_path / "model.safetensors"
    writer.full()
    to_file.follow(writer.path, out)
    data = bytearray(out.read_bytes())
    data[-1] ^= 1
    out.write_bytes(data)
    writer.change(0.01)
    writer.delta()
    assert to_file.follow(writer.path, out).number == 2
    assert file_of(out) == writer.lists()
    out.write_bytes(b"something else")
    assert to_file.follow(writer.path, out).number == 2
    assert file_of(out) == writer.lists()


def test_a_full_disk_leaves_the_file(writer, tmp_path, monkeypatch):
    out = tmp_path / "model.safetensors"
    with pytest.raises(CSDOSError, match="no version has been published"):
        to_file.follow(writer.path, out)
    writer.full()
    to_file.follow(writer.path, out)
    was = out.read_bytes()
    writer.change(0.01)
    writer.delta()

    def full(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CSDOSError, match=r"cannot write .*it is as it was"):
        to_file.follow(writer.path, out)
    assert out.read_bytes() == was
    assert not [*tmp_path.glob(".model*")]


# ---- what is damaged -------------------------------------------------------------------------


def damaged(path, at):
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("at", [0, 70, -1])
def test_a_damaged_file_is_refused(writer, at):
    """A bit that is flipped anywhere is noticed before the model has changed."""
    writer.full()
    replica, model = Replica(writer.path), {}
    replica.load(model)
    was = {name: values.tolist() for name, values in model.items()}
    writer.change(0.1)
    writer.delta()
    damaged(writer.path / "v0000000002/delta-0.bin", at)
    with pytest.raises(CSDStoreError, match="SHA-256"):
        replica.follow(model)
    assert {name: values.tolist() for name, values in model.items()} == was
    assert replica.version == 1


def other_slices(files, how):
    slices = files[1]["slices"]
    if how == "file":
        del files[1]
    elif how == "slice":
        slices.pop()
    elif how == "elements":
        slices[-1][2] -= 1
    elif how == "overlap":
        slices[-1][1] -= 1
    elif how == "beyond":
        files[2]["slices"][-1][2] += 1
    elif how == "tensor":
        slices[-1][0] = len(SHAPES)


@pytest.mark.parametrize("how", ["file", "slice", "elements", "overlap", "beyond", "tensor"])
def test_slices_that_are_not_all_of_a_full_version(how, tmp_path):
    with Writer(tmp_path / "policy", SHAPES, ranks=3) as writer:
        writer.full()
        path = writer.path / "v0000000001/manifest.json"
        manifest = json.loads(path.read_text())
        other_slices(manifest["files"], how)
        path.write_text(json.dumps(manifest))
        with pytest.raises(CSDStoreError, match="is no manifest of a version"):
            Replica(writer.path).load({})
        with pytest.raises(CSDStoreError):
            to_file.follow(writer.path, tmp_path / "model.safetensors")


def test_a_manifest_that_was_changed_breaks_the_chain(writer):
    writer.full()
    writer.change(0.1)
    writer.delta()
    manifest = writer.path / "v0000000001/manifest.json"
    manifest.write_text(manifest.read_text().replace('"step": 1', '"step": 3'))
    with pytest.raises(CSDStoreError, match="another manifest"):
        Replica(writer.path).load({})


def test_a_model_that_was_changed_here_is_noticed(writer):
    """The checksum of a result is not that of the version; then the replica begins with a full version."""
    writer.full()
    replica, model = Replica(writer.path), {}
    replica.load(model)
    model["large"] ^= np.uint16(1)
    with pytest.raises(CSDStoreError, match="large differs"):
        replica.verify(model)
    writer.change(0.5)
    writer.delta()
    with pytest.raises(CSDStoreError, match="was changed here"):
        replica.follow(model)
    assert replica.version is None
    assert replica.follow(model) == 2
    assert {name: values.tolist() for name, values in model.items()} == writer.lists()


def test_another_model_is_refused(writer):
    writer.full()
    model = torch.nn.ParameterDict({"one": torch.zeros(()), "two": torch.zeros(3)})
    with pytest.raises(ValueError, match="5 parameters are in the model"):
        Replica(writer.path).load(model)


# ---- without our compiled code ---------------------------------------------------------------


READER = """
import sys
sys.modules["csd_optim._native"] = sys.modules["torch"] = None
import csd_optim
replica, model = csd_optim.Replica(sys.argv[1]), {}
replica.load(model)
replica.verify(model)
print(replica.version, sum(len(p.values) for p in replica.patches(since=1)), model["some"].sum())
assert not {name for name in sys.modules if name.startswith("csd_optim.") and name.split(".")[1] not in
            ("errors", "files", "replica")} - {"csd_optim._native"}
"""


def test_a_reader_needs_neither_torch_nor_the_extension(writer):
    writer.full()
    writer.change(0.1)
    n = sum(int(c.sum()) for c in writer.changed.values())
    writer.delta()
    root = Path(__file__).parents[2]
    command = [sys.executable, "-c", READER, str(writer.path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=root, check=False)
    total = int(writer.values["some"].sum())
    assert (done.stdout, done.stderr) == (f"2 {n} {total}\n", "")


# ---- csd-optim inspect -----------------------------------------------------------------------


def test_inspect_lists_versions(writer, run):
    writer.full()
    writer.change(0.01)
    writer.delta()
    code, text, _ = run("inspect", writer.path)
    assert code == 0
    assert "2 versions" in text
    assert "full" in text
    code, text, _ = run("inspect", writer.path, "--json")
    found = json.loads(text)
    assert [(v["number"], v["full"], v["follows"], v["problem"]) for v in found["versions"]] == [
        (1, True, True, None),
        (2, False, True, None),
    ]
    (writer.path / "v0000000002/delta-0.bin").write_bytes(b"")
    _, text, _ = run("inspect", writer.path)
    assert "has not the size" in text

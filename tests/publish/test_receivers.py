"""What other receivers read: files of patches for vLLM, and directories as slime, miles and SGLang have them.

Here are readers of both that are written from docs/publish.md alone. tests/publish/test_vllm.py has vLLM's own.
"""

import errno
import json
import os
import re
import shutil
import struct
import subprocess
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from support.forked import process
from support.killed import ended, killed_at
from support.versions import Writer

from csd_optim import CSDBusyError, CSDOSError, CSDStoreError, CSDValueError, Replica
from csd_optim.replica import converted, slime, vllm, zstd

SHAPES = {"one": (), "some": (33, 7), "none": (0, 4), "edge": (65536,), "large": (3, 50001)}


def is_nan(values, dtype="BF16"):
    return (values & 0x7FFF) > (0x7F80 if dtype == "BF16" else 0x7C00)


def change(writer, share=0.01):
    """Change some elements, to values that are not NaN."""
    writer.change(share)
    for values in writer.values.values():
        values[is_nan(values, writer.dtype)] = 0x3C00


@pytest.fixture(params=[("BF16", 1), ("F16", 3)], ids=["bf16", "fp16 of 3 ranks"])
def writer(request, tmp_path):
    with Writer(tmp_path / "policy", SHAPES, *request.param) as writer:
        change(writer, 0)
        yield writer


# ---- patches for vLLM ------------------------------------------------------------------------


class Engine:
    """Has the weights of a process that applies the files of a folder in the order of their numbers, each once.

    Each patch is checked as vLLM's load_checkpoint_weight_patches() does, and by its checksum.
    """

    def __init__(self, out):
        self.out, self.values, self.version, self.how = out, {}, None, {}

    def follow(self):
        """Apply what is new; return the names of the files."""
        files = sorted(self.out.glob("*.safetensors"), key=lambda path: int(re.search(r"\d+", path.name)[0]))
        if self.version is None:
            files = files[max(i for i, path in enumerate(files) if path.name.startswith("full")) :]
        else:
            files = [path for path in files if int(re.search(r"\d+", path.name)[0]) > int(self.version[0])]
        for path in files:
            self.apply(path)
        return [path.name for path in files]

    def apply(self, path):
        with safe_open(path, "pt") as file:
            about = file.metadata()
            patches = json.loads(about["csd_optim.patches"])
            base = (about["csd_optim.base"], about["csd_optim.base_id"]) if "csd_optim.base" in about else None
            assert base is None if path.name.startswith("full") else base == self.version
            assert {*file.keys()} == {f"values/{p['name']}" for p in patches} | {
                f"indices/{p['name']}" for p in patches if not p["whole"]
            }
            self.how = {p["name"]: "whole" if p["whole"] else "sparse" for p in patches}
            for patch in patches:
                self.apply_one(patch, file)
        self.version = about["csd_optim.version"], about["csd_optim.id"]

    def apply_one(self, patch, file):
        name, n = patch["name"], int(np.prod(patch["shape"]))
        values = file.get_tensor(f"values/{name}")
        assert (values.dtype, values.dim()) == (getattr(torch, patch["dtype"]), 1)
        bits = values.view(torch.int16).numpy().view(np.uint16)
        if patch["whole"]:
            assert len(values) == n
            self.values[name] = bits.copy()
        else:
            indices = file.get_tensor(f"indices/{name}")
            assert (indices.dtype, indices.shape) == (torch.int32, values.shape)
            assert not values.isnan().any()
            assert not len(indices) or (indices.min() >= 0 and indices.max() < n)
            assert len(indices.unique()) == len(indices)
            self.values[name][indices.numpy()] = bits
        weights = [((i + 1) * 0x9E3779B1 % 2**32) | 1 for i in range(n)]
        assert int(np.dot(self.values[name].astype(object), weights)) % 2**32 == patch["checksum"]

    def lists(self):
        return {name: values.tolist() for name, values in self.values.items()}


def test_patches_for_vllm(writer, run, tmp_path):
    """After each version an engine has its bits: over one version, over several at a time, and over none."""
    out = tmp_path / "patches"
    engine, n = Engine(out), 1
    writer.full()
    code, text, _ = run("follow", writer.path, "--to", out, "--as", "vllm", "--once")
    assert (code, text) == (0, f"{out}/full-v0000000001.safetensors: version 1, of step 1\n")
    engine.follow()
    assert engine.lists() == writer.lists()
    for share, versions in ((0.01, 1), (0.3, 1), (0, 1), (0.05, 3), (1, 1)):
        for _ in range(versions):
            change(writer, share)
            writer.delta()
        n += versions
        code, text, _ = run("follow", writer.path, "--to", out, "--as", "vllm", "--once", "--json")
        found = json.loads(text)
        assert (code, found["version"], found["file"]) == (0, n, f"{out}/patch-v{n:010d}.safetensors")
        assert engine.follow() == [f"patch-v{n:010d}.safetensors"]
        assert engine.lists() == writer.lists()
        assert {*engine.how.values()} <= {"sparse"}
        assert ("large" in engine.how) == bool(share)
    assert vllm.follow(writer.path, out) is None
    assert run("follow", writer.path, "--to", out, "--as", "vllm", "--once")[:2] == (0, "")


def test_a_tensor_with_a_new_nan_comes_whole(writer, tmp_path):
    """vLLM refuses NaNs in patches. Other tensors stay sparse, and so does that one, once it only has an old NaN."""
    out = tmp_path / "patches"
    engine = Engine(out)
    writer.full()
    vllm.follow(writer.path, out)
    engine.follow()
    change(writer)
    writer.values["large"][70000] = 0xFFFF
    writer.changed["large"][70000] = True
    writer.delta()
    replica = Replica(writer.path)
    replica.load({}, version=1)
    plain, safe = ({p.name: p for p in replica.patches(whole_if_nan=w)} for w in (False, True))
    assert (plain["large"].has_nan, plain["edge"].has_nan) == (True, False)
    assert plain["large"].indices is not None
    assert (safe["large"].indices, len(safe["large"].values)) == (None, 150003)
    assert safe["edge"].indices.tolist() == plain["edge"].indices.tolist()
    vllm.follow(writer.path, out)
    engine.follow()
    assert engine.lists() == writer.lists()
    assert (engine.how["large"], engine.how["edge"]) == ("whole", "sparse")
    writer.change(0)
    writer.values["large"][5] ^= 1
    writer.changed["large"][5] = True
    writer.delta()
    vllm.follow(writer.path, out)
    engine.follow()
    assert engine.lists() == writer.lists()
    assert engine.how == {"large": "sparse"}


def test_fields_of_a_patch_in_torch(writer):
    writer.full()
    change(writer, 0.2)
    writer.delta()
    for patch in Replica(writer.path).patches(since=1):
        fields = patch.to_torch()
        assert (fields["name"], fields["shape"], patch.version) == (patch.name, SHAPES[patch.name], 2)
        assert fields["dtype"] == fields["values"].dtype == {"BF16": torch.bfloat16, "F16": torch.float16}[writer.dtype]
        assert fields["values"].view(torch.int16).numpy().view(np.uint16).tolist() == patch.values.tolist()
        assert (fields["indices"].dtype, fields["indices"].tolist()) == (torch.int32, patch.indices.tolist())
    whole = [patch.to_torch() for patch in Replica(writer.path).patches()]
    assert [fields["indices"] for fields in whole] == [None] * len(SHAPES)
    assert whole[1]["values"].view(torch.int16).numpy().view(np.uint16).tolist() == writer.lists()["some"]


def test_a_full_version_and_old_files(writer, tmp_path):
    """A new run begins with a full file; what is before the last full one goes."""
    out = tmp_path / "patches"
    for _ in range(3):
        writer.new_run()
        writer.full()
        vllm.follow(writer.path, out)
        for _ in range(2):
            change(writer)
            writer.delta()
            vllm.follow(writer.path, out)
    kinds = [("patch", "full")[n % 3 == 1] for n in range(4, 10)]
    assert {p.name for p in out.iterdir()} == {
        ".lock",
        *(f"{kind}-v{n:010d}.safetensors" for n, kind in zip(range(4, 10), kinds, strict=True)),
    }
    engine = Engine(out)
    assert len(engine.follow()) == 3
    assert engine.lists() == writer.lists()


def test_files_of_something_else_are_refused(writer, tmp_path):
    """Refused before anything is touched: files of another folder, and a damaged file."""
    out = tmp_path / "patches"
    with Writer(tmp_path / "other", SHAPES) as other:
        for _ in range(3):
            other.full()
        vllm.follow(other.path, out)
    writer.full()
    was = sorted(p.name for p in out.iterdir())
    with pytest.raises(CSDValueError, match="has version 3 of another training"):
        vllm.follow(writer.path, out)
    (out / "full-v0000000003.safetensors").write_bytes(b"something else")
    with pytest.raises(CSDStoreError, match="does not say which version"):
        vllm.follow(writer.path, out)
    assert sorted(p.name for p in out.iterdir()) == was


# ---- slime -----------------------------------------------------------------------------------


def content_of(frame):
    """Return what is in a frame of Zstandard whose blocks are stored, after RFC 8878."""
    assert frame[:4] == struct.pack("<I", 0xFD2FB528)
    assert frame[4] == 0b11000000  # 8 bytes of content size, a window, neither checksum nor dictionary
    window = 1 << (10 + (frame[5] >> 3))
    (size,) = struct.unpack("<Q", frame[6:14])
    content, at, last = b"", 14, 0
    while not last:
        block = int.from_bytes(frame[at : at + 3], "little")
        last, kind, n = block & 1, block >> 1 & 3, block >> 3
        assert kind == 0
        assert n <= min(window, 1 << 17)
        content += frame[at + 3 : at + 3 + n]
        at += 3 + n
    assert (at, len(content)) == (len(frame), size)
    return content


def tensors_in(path):
    """Return the metadata of a safetensors file, and of each tensor its dtype and bytes."""
    data = path.read_bytes()
    (n,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + n])
    metadata = header.pop("__metadata__")
    return metadata, {k: (v["dtype"], data[8 + n :][slice(*v["data_offsets"])]) for k, v in header.items()}


class Host:
    """A checkpoint that is brought from one directory to the next, as receivers of slime's directories do it."""

    def __init__(self, out, content=content_of):
        self.out, self.content, self.version, self.tensors, self.files = out, content, 0, {}, {}

    def pull(self, target):
        start = target
        while start > self.version and (self.path(start) / "model.safetensors.index.json").exists():
            start -= 1
        if start > self.version:
            self.files = {p.name: p.read_bytes() for p in self.path(start).iterdir()}
            _, tensors = tensors_in(self.path(start) / "model.safetensors")
            self.tensors = {name: bytearray(data) for name, (_, data) in tensors.items()}
            self.version = start
        for number in range(self.version + 1, target + 1):
            self.apply(self.path(number), number)

    def path(self, number):
        return self.out / f"weight_v{number:06d}"

    def apply(self, path, number):
        index = json.loads((path / "model.safetensors.index.json").read_text())
        about = index["metadata"]
        assert (int(about["version"]), int(about["base_version"])) == (number, self.version)
        how = [about[f"{what}"] for what in ("delta_encoding", "compression_format", "checksum_format")]
        assert how == ["overwrite", "zstd", "adler32"]
        files = {name: tensors_in(path / name) for name in {*index["weight_map"].values()}}
        assert {p.name for p in path.glob("*.safetensors")} == {*files}
        for name, file in index["weight_map"].items():
            checksums, tensors = files[file]
            dtype, frame = tensors[name]
            assert dtype == "U8"
            delta, tensor = self.content(frame), self.tensors[name]
            (n,) = struct.unpack("<I", delta[:4])
            positions, values = struct.unpack(f"<{n}I", delta[4 : 4 + 4 * n]), delta[4 + 4 * n :]
            assert len({*positions}) == len(values) == n
            for position, value in zip(positions, values, strict=True):
                tensor[position] = value
            assert f"{zlib.adler32(tensor):08x}" == checksums[name]
        self.version = number

    def lists(self):
        return {name: np.frombuffer(data, np.uint16).tolist() for name, data in self.tensors.items()}


@pytest.fixture(autouse=True)
def without_zstandard(monkeypatch):
    """Frames are stored, whether or not the package is installed here."""
    monkeypatch.setitem(sys.modules, "zstandard", None)


@pytest.fixture
def base(tmp_path):
    """A checkpoint that is no file of weights alone."""
    path = tmp_path / "base"
    (path / "onnx").mkdir(parents=True)
    for name in ("config.json", "tokenizer.json", "model-1.safetensors", "model.safetensors.index.json", "old.bin"):
        (path / name).write_text(name)
    return path


def test_directories_for_slime(writer, base, run, tmp_path):
    """After each version a host has its bits; one that was stopped takes several; a new one begins with a full one."""
    out, n = tmp_path / "weights", 1
    host, late = Host(out), Host(out)
    options = ["--to", out, "--as", "slime", "--base", base, "--once"]
    writer.full()
    code, text, _ = run("follow", writer.path, *options)
    assert (code, text) == (0, f"{out}/weight_v000001: version 1, of step 1\n")
    host.pull(1)
    assert {*host.files} == {"config.json", "tokenizer.json", "model.safetensors"}
    follower = slime.Follower(writer.path, out, base)
    for share, versions, here in ((0.01, 1, True), (0.15, 1, False), (0, 1, True), (0.05, 3, True), (0.001, 1, False)):
        for _ in range(versions):
            change(writer, share)
            writer.changed["edge"][:] = True  # more is said to have changed than has
            writer.delta()
        n += 1
        if here:
            path, version = follower.follow()
            assert (path, version.number) == (out / f"weight_v{n:06d}", writer.base.number)
        else:  # by a new process
            assert run("follow", writer.path, *options)[0] == 0
        assert not slime.is_full_directory(host.path(n))
        host.pull(n)
        assert host.lists() == writer.lists()
    assert follower.follow() is None
    late.pull(n)
    assert late.lists() == writer.lists()


def test_compressed_directories_for_slime(writer, tmp_path, monkeypatch):
    monkeypatch.undo()
    zstandard = pytest.importorskip("zstandard", reason="zstandard, which is optional, is not installed")
    out = tmp_path / "weights"
    follower, host = slime.Follower(writer.path, out), Host(out, zstandard.ZstdDecompressor().decompress)
    writer.full()
    follower.follow()
    for n in (2, 3):
        change(writer, 0.1)
        changed = sum(int(which.sum()) for which in writer.changed.values())
        writer.delta()
        path, _ = follower.follow()
        host.pull(n)
        assert host.lists() == writer.lists()
        assert not slime.is_full_directory(path)
        assert sum(file.stat().st_size for file in path.iterdir()) < 0.9 * 10 * changed


def test_a_version_by_its_number(writer):
    writer.full()
    wanted = writer.lists()
    change(writer, 0.3)
    writer.delta()
    replica, model = Replica(writer.path), {}
    replica.load(model, version=1)
    assert (replica.version, {name: values.tolist() for name, values in model.items()}) == (1, wanted)
    assert replica.follow(model) == 1
    assert {name: values.tolist() for name, values in model.items()} == writer.lists()
    with pytest.raises(CSDOSError, match="v0000000009"):
        replica.load(model, version=9)


def test_what_takes_more_than_all_weights_is_full(writer, tmp_path):
    out = tmp_path / "weights"
    follower = slime.Follower(writer.path, out)
    writer.full()
    follower.follow()
    change(writer, 0.9)
    writer.delta()
    path, _ = follower.follow()
    assert slime.is_full_directory(path)
    host = Host(out)
    host.pull(2)
    assert (host.version, host.lists()) == (2, writer.lists())


def test_slime_a_new_run_and_old_directories(writer, tmp_path):
    """Numbers have no gaps, whatever those of the versions; what is before the last full directory goes."""
    out = tmp_path / "weights"
    follower, host, n = slime.Follower(writer.path, out), Host(out), 0
    for _ in range(3):
        writer.new_run()
        writer.full()
        change(writer)
        writer.delta()  # both are in one directory
        follower.follow()
        change(writer)
        writer.delta()
        follower.follow()
        n += 2
        host.pull(n)
        assert host.lists() == writer.lists()
    assert {p.name for p in out.iterdir()} == {".lock", *(f"weight_v{i:06d}" for i in range(3, 7))}
    assert [slime.is_full_directory(host.path(i)) for i in range(3, 7)] == [True, False] * 2


def test_slime_where_the_last_version_is_gone(writer, tmp_path):
    """A follower that begins anew, and finds that the folder no longer has the version it wrote, writes a full one."""
    out = tmp_path / "weights"
    writer.full()
    slime.Follower(writer.path, out).follow()
    for _ in range(2):
        change(writer)
        writer.full()
    writer.folder.retire(1, writer.last_full)
    assert not (writer.path / "v0000000001").exists()
    path, version = slime.Follower(writer.path, out).follow()
    assert (path.name, version.number, slime.is_full_directory(path)) == ("weight_v000002", 3, True)
    host = Host(out)
    host.pull(2)
    assert host.lists() == writer.lists()


def test_slime_beside_directories_of_somebody_else(writer, tmp_path):
    """They are counted on from, with a full directory."""
    out = tmp_path / "weights"
    (out / "weight_v000007").mkdir(parents=True)
    (out / "weight_v000007/model.safetensors.index.json").write_text('{"metadata": {"version": "000007"}}')
    writer.full()
    follower = slime.Follower(writer.path, out)
    assert follower.follow()[0].name == "weight_v000008"
    assert slime.is_full_directory(out / "weight_v000008")
    change(writer)
    writer.delta()
    shutil.rmtree(out / "weight_v000008")  # the process that made it does not go on from it
    path, _ = follower.follow()
    assert (path.name, slime.is_full_directory(path)) == ("weight_v000008", True)


def test_a_large_tensor_is_not_numbered_in_32_bits(writer, tmp_path, monkeypatch):
    """A version in which such a tensor has changed is full."""
    monkeypatch.setattr(slime, "LARGEST", 100_000)
    out = tmp_path / "weights"
    follower = slime.Follower(writer.path, out)
    writer.full()
    follower.follow()
    for name, is_full in (("edge", False), ("large", True)):
        writer.values[name][1] ^= 1
        writer.changed[name][1] = True
        writer.delta()
        assert slime.is_full_directory(follower.follow()[0]) == is_full


LENGTHS = [0, 1, zstd.BLOCK - 1, zstd.BLOCK, zstd.BLOCK + 1, 3 * zstd.BLOCK + 7]


def some_bytes(n):
    return np.random.default_rng(n).integers(0, 256, n, dtype=np.uint8).tobytes()


@pytest.mark.parametrize("n", LENGTHS)
def test_stored_frames(n):
    assert content_of(zstd.frame(some_bytes(n))) == some_bytes(n)


def test_zstandard_reads_all_frames(monkeypatch):
    monkeypatch.undo()
    zstandard = pytest.importorskip("zstandard", reason="zstandard, which is optional, is not installed")
    for data in (*map(some_bytes, LENGTHS), bytes(100_000)):
        for frame in (zstd.stored(data), zstd.frame(data)):
            assert zstandard.ZstdDecompressor().decompress(frame) == data
            assert zstandard.ZstdDecompressor().stream_reader(frame).read() == data
    assert len(zstd.frame(bytes(100_000))) < 100


# ---- both ------------------------------------------------------------------------------------


def followers(path, out):
    return {"vllm": lambda: vllm.follow(path, out / "vllm"), "slime": slime.Follower(path, out / "slime").follow}


@pytest.mark.parametrize("kind", ["vllm", "slime"])
def test_a_full_disk_leaves_nothing(writer, kind, tmp_path, monkeypatch):
    """And what was not written is in the next one."""
    follow, out = followers(writer.path, tmp_path)[kind], tmp_path / kind
    with pytest.raises(CSDOSError, match="no version has been published"):
        follow()
    writer.full()
    follow()
    was = sorted(p.name for p in out.iterdir())
    change(writer)
    writer.delta()

    def full(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(CSDOSError, match=r"cannot write .*it is as it was"):
            follow()
    assert sorted(p.name for p in out.iterdir()) == was
    change(writer)
    writer.delta()
    path, version = follow()
    assert version.number == 3
    reader = Engine(out) if kind == "vllm" else Host(out)
    reader.follow() if kind == "vllm" else reader.pull(2)
    assert reader.lists() == writer.lists()
    assert path.name in ("patch-v0000000003.safetensors", "weight_v000002")


@pytest.mark.parametrize("kind", ["vllm", "slime"])
def test_what_a_killed_follower_left_is_removed(writer, kind, tmp_path):
    writer.full()
    out = tmp_path / kind
    (out / ".weight_v000009.new").mkdir(parents=True)
    (out / ".weight_v000009.new/model.safetensors").write_text("half")
    (out / ".patch-v0000000009.safetensors.new").write_text("half")
    path, _ = followers(writer.path, tmp_path)[kind]()
    assert {p.name for p in out.iterdir()} == {".lock", path.name}


@pytest.mark.parametrize("kind", ["vllm", "slime"])
def test_two_followers(writer, kind, tmp_path):
    writer.full()
    with converted.locked(tmp_path / kind), pytest.raises(CSDBusyError, match="another process follows"):
        followers(writer.path, tmp_path)[kind]()
    assert [p.name for p in (tmp_path / kind).iterdir()] == [".lock"]


def test_arguments(writer, run, tmp_path):
    writer.full()
    file = tmp_path / "file"
    file.write_text("")
    for form in ("vllm", "slime"):
        code, _, text = run("follow", writer.path, "--to", file, "--as", form, "--once")
        assert (code, "cannot write to" in text) == (1, True)
    code, _, text = run("follow", writer.path, "--to", file, "--as", "vllm", "--base", tmp_path, "--once")
    assert (code, "--base is only for --as slime" in text) == (1, True)
    out = tmp_path / "out"
    code, _, text = run("follow", writer.path, "--to", out, "--as", "slime", "--base", file, "--once")
    assert (code, "is no directory of a checkpoint" in text) == (1, True)
    assert not out.exists()


def follows(kind, path, out, n, after):
    sys.modules["zstandard"] = None
    killed_at(n, after=after, body=followers(path, out)[kind])


@pytest.mark.ci
@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("kind", ["vllm", "slime"])
def test_a_follower_that_is_killed(kind, after, tmp_path):
    """Killed at each call in turn: what it writes is there as a whole or not at all, and the next one goes on."""
    begun, n, was_killed = tmp_path / "begun", 0, True
    with Writer(tmp_path / "policy", {"a": (70000,), "b": (3, 5)}) as writer:
        change(writer, 0)
        writer.full()
        followers(writer.path, begun)[kind]()
        change(writer, 0.02)
        writer.delta()
        while was_killed:
            n += 1
            out = tmp_path / f"out-{n}"
            shutil.copytree(begun, out)
            was_killed = ended(process(follows, kind, writer.path, out, n, after))
            visible = sorted(p.name for p in (out / kind).iterdir() if not p.name.startswith("."))
            assert len(visible) in ((1, 2) if was_killed else (2,))
            for _ in range(2):  # the second time there is nothing to do
                followers(writer.path, out)[kind]()
                reader = Engine(out / kind) if kind == "vllm" else Host(out / kind)
                reader.follow() if kind == "vllm" else reader.pull(2)
                assert reader.lists() == writer.lists()
                assert len([p for p in (out / kind).iterdir() if p.name != ".lock"]) == 2
    assert n > 3


ALONE = """
import sys
sys.modules["csd_optim._native"] = sys.modules["torch"] = sys.modules["zstandard"] = sys.modules["safetensors"] = None
from pathlib import Path
from csd_optim.replica import slime, vllm
policy, out = map(Path, sys.argv[1:])
print(vllm.follow(policy, out / "vllm")[0].name, slime.Follower(policy, out / "slime").follow()[0].name)
"""


def test_converters_need_numpy_only(writer, tmp_path):
    writer.full()
    command = [sys.executable, "-c", ALONE, str(writer.path), str(tmp_path)]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=root, check=False)
    assert (done.stdout, done.stderr) == ("full-v0000000001.safetensors weight_v000001\n", "")

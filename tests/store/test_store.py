"""The store: ownership, content, and that nothing is ever erased unasked."""

import contextlib
import errno
import fcntl
import gc
import json
import os
import struct
from dataclasses import replace
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import torch
from support.forked import processes
from support.states import assumed, tile_bytes
from support.store_page import crc32c, decoded
from support.store_page import sections as sections_of
from support.training import train

from csd_optim import CSDAdam, CSDBusyError, CSDOSError, CSDStoreError, CSDStoreExistsError, CSDTypeError, CSDValueError
from csd_optim.checkpoint.verify import verify
from csd_optim.devices.spec import parse_device, parse_devices
from csd_optim.devices.units import parse_bytes
from csd_optim.files import write
from csd_optim.store.file import StoreFile
from csd_optim.store.format import CLEAN, FILE_NAME, PAGE, read_contents, read_region
from csd_optim.store.report import REPORT_NAME


def parameters(*shapes, dtype=torch.float32):
    return [torch.nn.Parameter(torch.randn(shape).to(dtype)) for shape in shapes]


def store_of(directory, steps=1, **options):
    """A store as a closed optimizer leaves it."""
    with CSDAdam(parameters((3000,)), devices=[str(directory)], tile_size=1024, **options) as opt:
        train(opt, steps)
    return directory / FILE_NAME


# ---- device strings ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "''"),
        ("nvme:/mnt", "'nvme:/mnt'"),
        ("ram:/mnt", "'ram:/mnt'"),
        ("null:?buffers=4", "'null:?buffers=4'"),
        ("file:/mnt?buffers=0", "'0'"),
        ("file:/mnt?buffers=two", "'two'"),
        ("file:/mnt?buffers=", "''"),
        ("file:/mnt?block=1000", "'1000'"),
        ("file:/mnt?block=0", "'0'"),
        ("file:/mnt?block=4miles", "'4miles'"),
        ("file:/mnt?blocks=4096", "'blocks'"),
        ("file:/mnt?scratch=yes", "'yes'"),
        ("ram", "'ram:'"),
        ("FILE", "'file:'"),
        ("/mnt?buffers=4", "'file:/mnt?buffers=4'"),
        ("file:///mnt", "file:/mnt"),
        ("s3://bucket", "'s3://bucket'"),
    ],
)
def test_bad_device_string_is_refused_with_its_value(text, named):
    with pytest.raises(CSDValueError) as caught:
        parse_device(text)
    assert named in str(caught.value)
    assert "Invalid" in str(caught.value)
    with pytest.raises(ValueError, match="Invalid"):
        CSDAdam(parameters((4,)), devices=[text])


@pytest.mark.parametrize("device", [3, None, b"/mnt", ["ram:"]])
def test_device_that_is_no_string(device):
    with pytest.raises(CSDTypeError, match=type(device).__name__):
        parse_devices([device])


def test_devices_are_named_once_and_at_least_one(tmp_path):
    with pytest.raises(CSDValueError, match="at least one"):
        parse_devices([])
    with pytest.raises(CSDValueError, match=f"'{tmp_path}' is named twice"):
        parse_devices([f"{tmp_path}", f"file:{tmp_path}/x/.."])
    assert len(parse_devices(["ram:", "ram:", "file:", "file:"])) == 4


def test_good_device_strings(tmp_path, monkeypatch):
    spec = parse_device("file:/mnt/nvme0?buffers=16&block=4MiB")
    assert (spec.backend, str(spec.directory), spec.buffers, spec.block_bytes) == ("file", "/mnt/nvme0", 16, 4 << 20)
    assert str(parse_device(tmp_path).directory) == str(tmp_path)
    assert str(parse_device(Path("/mnt/a?b:c")).directory) == "/mnt/a?b:c"  # a Path is not parsed
    assert parse_device("~/csd").directory == Path.home() / "csd"
    assert [parse_device(text).backend for text in (" ram: ", "RAM:", "./ram")] == ["ram", "ram", "file"]
    assert [s.backend for s in parse_devices("ram:")] == ["ram"]
    monkeypatch.setenv("CSD_OPTIM_DEVICES", "/mnt/a, ram:,")
    assert [str(s) for s in parse_devices(None)] == ["/mnt/a", "ram:"]
    sizes = {"4096": 4096, "2MiB": 2 << 20, "1.5 kb": 1500, "1GB": 10**9, "1 GiB": 1 << 30}
    assert {text: parse_bytes(text) for text in sizes} == sizes


# ---- nothing is erased unasked -------------------------------------------------------


def test_existing_store_is_refused_unless_overwrite(tmp_path):
    store = store_of(tmp_path)
    before = store.read_bytes()
    with pytest.raises(CSDStoreExistsError, match="overwrite=True") as caught:
        CSDAdam(parameters((5,)), devices=[str(tmp_path)])
    assert isinstance(caught.value, FileExistsError)
    assert caught.value.errno == errno.EEXIST
    assert str(store) in str(caught.value)
    assert store.read_bytes() == before
    with CSDAdam(parameters((5,)), devices=[str(tmp_path)], overwrite=True) as opt:
        train(opt, 3)
    assert read_contents(tmp_path).superblock.step == 3


@pytest.mark.parametrize("content", [b"mine", b"x" * 3 * PAGE])
@pytest.mark.parametrize("overwrite", [False, True])
def test_file_that_is_no_store_is_never_touched(tmp_path, content, overwrite):
    file = tmp_path / FILE_NAME
    file.write_bytes(content)
    with pytest.raises(CSDStoreExistsError, match="is no csd_optim store"):
        CSDAdam(parameters((5,)), devices=[str(tmp_path)], overwrite=overwrite)
    assert file.read_bytes() == content


def test_what_a_killed_first_step_left_is_a_store_never_finished(tmp_path):
    """The process was killed after it had reserved space, before the first superblock: the file has only zeros."""
    (tmp_path / FILE_NAME).write_bytes(bytes(10 * PAGE))
    with pytest.raises(CSDStoreExistsError, match="overwrite=True"):
        CSDAdam(parameters((5,)), devices=[str(tmp_path)])
    with CSDAdam(parameters((5,)), devices=[str(tmp_path)], overwrite=True) as opt:
        train(opt, 1)


def test_refused_second_device_leaves_nothing_of_the_first(tmp_path):
    store_of(tmp_path / "b")
    with pytest.raises(CSDStoreExistsError):
        CSDAdam(parameters((5,)), devices=[str(tmp_path / "a"), str(tmp_path / "b")])
    assert not (tmp_path / "a" / FILE_NAME).exists()
    with CSDAdam(parameters((5,)), devices=[str(tmp_path / "a")]) as opt:  # its lock is released, too
        train(opt, 1)


def test_directory_that_cannot_be_had(tmp_path):
    with pytest.raises(CSDOSError, match="missing") as caught:
        CSDAdam(parameters((5,)), devices=[str(tmp_path / "missing" / "below")])
    assert caught.value.errno == errno.ENOENT
    (tmp_path / "file").write_text("")
    with pytest.raises(CSDOSError, match=str(tmp_path / "file")):
        CSDAdam(parameters((5,)), devices=[str(tmp_path / "file")])


@pytest.mark.here("what an owner says ends with that it does")
@pytest.mark.parametrize(("module", "what"), [(Path, "mkdir"), (os, "open")], ids=["mkdir", "open"])
def test_directory_of_somebody_else(module, what, tmp_path, monkeypatch):
    def denied(*_, **__):
        raise PermissionError(errno.EACCES, "Permission denied")

    place = tmp_path / "nvme0"
    monkeypatch.setattr(module, what, denied)
    with pytest.raises(CSDOSError, match=f"{place}: Permission denied; name .* sudo install -d -o .USER {place}$") as e:
        CSDAdam([torch.nn.Parameter(torch.ones(3))], devices=place)
    assert e.value.errno == errno.EACCES


def test_a_refused_overwrite_erases_nothing(tmp_path):
    before = store_of(tmp_path / "a").read_bytes()
    with CSDAdam(parameters((5,)), devices=[str(tmp_path / "b")]) as busy:
        train(busy, 1)
        with pytest.raises(CSDBusyError):
            CSDAdam(parameters((5,)), devices=[str(tmp_path / "a"), str(tmp_path / "b")], overwrite=True)
    assert (tmp_path / "a" / FILE_NAME).read_bytes() == before


def test_overwrite_waits_for_the_first_step(tmp_path):
    before = store_of(tmp_path).read_bytes()
    CSDAdam(parameters((5,)), devices=[str(tmp_path)], overwrite=True).close()
    assert (tmp_path / FILE_NAME).read_bytes() == before


def test_state_of_an_overwritten_store_can_still_be_read_and_loaded(tmp_path):
    """Its file is replaced, not truncated, so existing mappings stay valid."""
    [p] = parameters((5000,))
    with CSDAdam([p], devices=[str(tmp_path)]) as opt:
        train(opt, 3)
        saved = opt.state_dict()
    expected = {k: v.clone() for k, v in saved["state"][0].items()}
    with CSDAdam([p], devices=[str(tmp_path)], overwrite=True) as opt:
        opt.load_state_dict(saved)
        for key, value in expected.items():
            assert torch.equal(opt.state[p][key], value), key
        train(opt, 1)
    assert {*os.listdir(tmp_path)} == {FILE_NAME, REPORT_NAME}


def test_closing_after_chdir_leaves_the_other_directory_alone(tmp_path, monkeypatch):
    for name in "ab":
        (tmp_path / name).mkdir()
    store_of(tmp_path / "b" / "csd")
    monkeypatch.chdir(tmp_path / "a")
    opt = CSDAdam(parameters((5,)), devices=["csd"])
    monkeypatch.chdir(tmp_path / "b")
    opt.close()
    assert (tmp_path / "b" / "csd" / FILE_NAME).exists()
    assert list((tmp_path / "a" / "csd").iterdir()) == []


def test_a_closed_store_is_written_no_more(tmp_path):
    [p] = parameters((5000,), dtype=torch.bfloat16)
    opt = CSDAdam([p], devices=[str(tmp_path)])
    train(opt, 2)
    saved = opt.state_dict()
    opt.close()
    before = (tmp_path / FILE_NAME).read_bytes()
    opt.state[p]["exp_avg"].fill_(7)
    with torch.no_grad():
        p.add_(1)
    for call in (opt.step, lambda: opt.load_state_dict(saved), opt.stats):
        with pytest.raises(RuntimeError, match="closed"):
            call()
    reference = torch.optim.AdamW([p])
    reference.load_state_dict(saved)
    reference.step()
    assert (tmp_path / FILE_NAME).read_bytes() == before
    assert float(opt.state[p]["exp_avg"][0]) != 0  # the old states stay readable


@pytest.mark.fp32_states("counts tiles, bytes or elements of fp32 states")
def test_parameters_that_join_one_by_one_cost_no_more(tmp_path):
    ps = [torch.nn.Parameter(torch.ones(1000)) for _ in range(60)]
    with CSDAdam(ps, devices=[str(tmp_path)]) as opt:
        for p in ps:
            p.grad = torch.ones(1000)
            opt.step()
    contents = read_contents(tmp_path)
    assert [p["numel"] for p in contents.manifest["params"]] == [1000] * 60
    assert contents.steps.tolist() == [*range(60, 0, -1)]
    assert (tmp_path / FILE_NAME).stat().st_size < 60 * 24 * 1024 * 2


@pytest.mark.parametrize("code", [errno.EINVAL, errno.EROFS, errno.ENOSYS, errno.EIO])
def test_a_file_system_that_cannot_flush_can_be_read(code, tmp_path, monkeypatch):
    """Such as squashfs and iso9660. An I/O error, however, is reported."""
    with CSDAdam(parameters((5,)), devices=[str(tmp_path)]) as opt:
        train(opt, 1)

    def flush(fd):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "fdatasync", flush)
    if code == errno.EIO:
        with pytest.raises(CSDOSError, match="Input/output"):
            StoreFile(tmp_path, durable=True, mode="read")
    else:
        StoreFile(tmp_path, durable=True, mode="read").close()
        with pytest.raises(CSDOSError):
            StoreFile(tmp_path, durable=True, mode="resume")


# ---- one owner -----------------------------------------------------------------------


def test_close_lets_go_even_while_a_forked_child_lives(tmp_path):
    opt = CSDAdam(parameters((5,)), devices=[str(tmp_path)])
    train(opt, 1)
    reader, writer = os.pipe()
    if (pid := os.fork()) == 0:
        os.close(writer)
        os.read(reader, 1)  # until the parent is done
        os._exit(0)
    try:
        opt.close()
        CSDAdam(parameters((5,)), devices=[str(tmp_path)], overwrite=True).close()
    finally:
        os.close(writer)
        os.close(reader)
        os.waitpid(pid, 0)


def test_a_dropped_optimizer_in_a_reference_cycle_does_not_keep_its_store(tmp_path):
    """As when a notebook cell is run again: a scheduler and its optimizer refer to each other."""
    gc.disable()
    try:
        opt = CSDAdam(parameters((5,)), devices=[str(tmp_path)])
        opt.cycle = opt
        train(opt, 1)
        del opt
        CSDAdam(parameters((5,)), devices=[str(tmp_path)], overwrite=True).close()
    finally:
        gc.enable()


def test_lock_on_a_file_that_has_just_been_removed_is_not_ownership(tmp_path, monkeypatch):
    """Another optimizer that never stepped removes its file between our open() and our lock."""
    flock, file = fcntl.flock, tmp_path / FILE_NAME

    def late(fd, how):
        if not file.with_suffix(".gone").exists():
            file.rename(file.with_suffix(".gone"))
        flock(fd, how)

    monkeypatch.setattr(fcntl, "flock", late)
    with CSDAdam(parameters((5,)), devices=[str(tmp_path)]) as opt:
        train(opt, 1)
        opt.synchronize()
        assert read_contents(tmp_path).manifest["params"]


def test_lock_within_a_process(tmp_path):
    with CSDAdam(parameters((5,)), devices=[str(tmp_path)]) as opt:
        for shape, overwrite in ((5, False), (6, False), (6, True)):
            with pytest.raises(CSDBusyError, match="this process") as caught:
                CSDAdam(parameters((shape,)), devices=[str(tmp_path)], overwrite=overwrite)
            assert isinstance(caught.value, BlockingIOError)
        train(opt, 1)


def trains_and_waits(device, steps, pipe):
    """The main function of a child: trains, then waits."""
    p = torch.nn.Parameter(torch.ones(5000))
    opt = CSDAdam([p], devices=[device], tile_size=1024)
    for _ in range(steps):
        p.grad = torch.ones(5000)
        opt.step()
    pipe.send("ready")
    pipe.recv()


@pytest.fixture
def child():
    """Starts a process that trains for some steps on a device, and then waits to be killed."""
    started = []

    def start(device, steps):
        ours, theirs = processes.Pipe()
        process = processes.Process(target=trains_and_waits, args=(str(device), steps, theirs))
        process.start()
        started.append((process, ours))  # keep our end open: the child waits while it is
        theirs.close()
        assert ours.recv() == "ready"
        return process

    yield start
    for process, _ in started:
        kill(process)


def kill(process):
    process.kill()
    process.join()


def test_lock_between_processes(tmp_path, child):
    process = child(tmp_path, 2)
    with pytest.raises(CSDBusyError, match=f"process {process.pid}"):
        CSDAdam(parameters((5,)), devices=[str(tmp_path)], overwrite=True)
    contents = read_contents(tmp_path)  # reading needs no lock
    assert not contents.superblock.flags & CLEAN
    kill(process)
    assert not read_contents(tmp_path).superblock.flags & CLEAN
    with pytest.raises(CSDStoreExistsError):  # the lock is free, and the store was not erased
        CSDAdam(parameters((5,)), devices=[str(tmp_path)])


@pytest.mark.parametrize("steps", [0, 1])
def test_scratch_leaves_nothing_behind(tmp_path, child, steps):
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    process = child(f"file:{scratch}?scratch=1", steps)
    assert list(scratch.iterdir()) == []  # not even while it runs
    kill(process)
    assert list(scratch.iterdir()) == []


def test_scratch_in_the_current_directory_has_no_name(tmp_path):
    with CSDAdam(parameters((5000,)), devices=["file:", "file:"]) as opt:
        train(opt, 1)
        assert list(tmp_path.iterdir()) == []
        assert open_files(tmp_path)
    assert not open_files(tmp_path)


def open_files(directory):
    """The files that this process has open below a directory."""
    paths = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # another thread has closed it meanwhile, as listdir() has its own
            paths.append(os.readlink(f"/proc/self/fd/{fd}"))
    return [path for path in paths if path.startswith(str(directory))]


@pytest.mark.parametrize("end", ["close", "drop"])
def test_optimizer_never_stepped_leaves_no_file(tmp_path, end):
    opt = CSDAdam(parameters((5,)), devices=[str(tmp_path / "csd")])
    if end == "close":
        opt.close()
    del opt
    assert list((tmp_path / "csd").iterdir()) == []


# ---- content ---------------------------------------------------------------------------


def tiles_of(store):
    """Yields (extent, global number, current slot, {section: bytes}, row, sums) of each tile, read independently."""
    contents = read_contents(store)
    rows = iter([*zip(contents.tiles, chain.from_iterable(contents.sums), strict=True)])
    for e, extent in enumerate(contents.manifest["extents"]):
        slot_bytes = sum(size for _, _, size in sections_of(extent))
        for j in range(extent["tiles"]):
            row, sums = next(rows)
            at = extent["file_offset"] + (2 * j + int(row["slot"])) * slot_bytes
            sections = {}
            for name, _, size in sections_of(extent):
                sections[name] = np.fromfile(store, np.uint8, size, offset=at).tobytes()
                at += size
            tile = contents.superblock.device + j * contents.superblock.devices
            yield e, tile, int(row["slot"]), sections, row, sums


def values_of(extent, sections):
    """The states of a tile, by name, as fp32."""
    if "codec" in extent:
        return decoded(extent, sections)
    return {name: np.frombuffer(data, "<f4") for name, data in sections.items()}


def sums_of(extent, sections):
    """The checksums [chunk][section] of chunks of 1024 elements (see small_chunks in conftest.py)."""
    assert extent["sum_elems"] == 1024
    each = [(sections[name], 16 * group_bytes) for name, group_bytes, _ in sections_of(extent)]
    chunks = range(-(-extent["tile_elems"] // 1024))
    return [[crc32c(data[n * i : n * (i + 1)]) for data, n in each] for i in chunks]


def states_of(opt):
    """The states of an optimizer, by group and position in it."""
    groups = [group["params"] for group in opt.param_groups]
    return {(k, i): {**opt.state[p]} for k, params in enumerate(groups) for i, p in enumerate(params)}


def check_against(states, stores, manifest):
    """Asserts that all states of each parameter are where manifest and table say."""
    flat = {}  # (extent, section) -> the flat space, tile by tile
    tiles = sorted((t for store in stores for t in tiles_of(store)), key=lambda t: t[:2])
    for extent, _, _, sections, _, _ in tiles:
        for name, values in values_of(manifest["extents"][extent], sections).items():
            flat[extent, name] = flat.get((extent, name), b"") + values.tobytes()
    assert len(states) == len(manifest["params"])
    for entry in manifest["params"]:
        for name in manifest["extents"][entry["extent"]]["sections"]:
            first = 4 * entry["start"]
            stored = flat[entry["extent"], name][first : first + 4 * entry["numel"]]
            state = states[entry["group"], entry["position"]][name]
            state = torch.view_as_real(state) if state.is_complex() else state
            assert stored == state.contiguous().numpy().tobytes(), (entry["name"], name)


@pytest.fixture(params=[1, 3])
def closed(request, tmp_path):
    """An optimizer, closed, that uses everything a manifest can express; its states, still readable; its stores."""
    named = [
        ("weight", parameters((40, 50))[0]),
        ("bias", parameters((7,), dtype=torch.bfloat16)[0]),
        ("phase", torch.nn.Parameter(torch.randn(11, dtype=torch.complex64))),
        ("empty", parameters((0, 3))[0]),
    ]
    half = ("half", parameters((33, 64), dtype=torch.float16)[0])
    devices = [str(tmp_path / f"csd{i}") for i in range(request.param)]
    opt = CSDAdam(
        [{"params": named}, {"params": [half], "lr": torch.tensor(0.5), "amsgrad": True}],
        devices=devices,
        tile_size=1024,
    )
    for step in range(3):
        for name, p in [*named, half]:
            p.grad = None if name == "bias" and step else torch.randn(p.shape).to(p.dtype)
        opt.step()
    states = states_of(opt)
    opt.close()
    return opt, states, [Path(d) / FILE_NAME for d in devices]


def test_store_says_what_the_optimizer_is(closed):
    opt, _, stores = closed
    for d, store in enumerate(stores):
        contents = read_contents(store)
        superblock, manifest = contents.superblock, contents.manifest
        assert (superblock.device, superblock.devices, superblock.step) == (d, len(stores), 3)
        assert superblock.flags & CLEAN
        assert superblock.store_id == read_contents(stores[0]).superblock.store_id
        said = {e["name"]: (tuple(e["shape"]), e["dtype"], e["group"], e["numel"]) for e in manifest["params"]}
        assert said == {
            "weight": ((40, 50), "float32", 0, 2000),
            "bias": ((7,), "bfloat16", 0, 7),
            "phase": ((11,), "complex64", 0, 22),
            "empty": ((0, 3), "float32", 0, 0),
            "half": ((33, 64), "float16", 1, 33 * 64),
        }
        groups = contents.record.groups
        assert [g["lr"] for g in groups] == [1e-3, 0.5]
        assert [g["amsgrad"] for g in groups] == [False, True]
        assert groups[0]["betas"] == [0.9, 0.999]
        of = {e["name"]: manifest["extents"][e["extent"]]["sections"][3:] for e in manifest["params"]}
        assert of == {name: ["max_exp_avg_sq"] if name == "half" else [] for name in said}
        steps = dict(zip(said, contents.steps.tolist(), strict=True))
        assert steps == {"weight": 3, "bias": 1, "phase": 3, "empty": 3, "half": 3}
        assert {name: float(opt.state[p]["step"]) for name, p in names_of(opt)} == steps


def names_of(opt):
    return [pair for g in opt.param_groups for pair in zip(g["param_names"], g["params"], strict=True)]


def test_bytes_of_the_current_slots_are_the_state(closed):
    _, states, stores = closed
    check_against(states, stores, read_contents(stores[0]).manifest)


def test_checksums_are_those_of_the_current_slots(closed):
    _, _, stores = closed
    summed = 0
    for store in stores:
        extents = read_contents(store).manifest["extents"]
        for e, tile, _, sections, row, sums in tiles_of(store):
            if row["summed"]:
                assert sums_of(extents[e], sections) == sums.tolist(), tile
                summed += 1
    assert summed == sum(1 for store in stores for _ in tiles_of(store))  # steps have written every tile


@pytest.mark.parametrize("how", ["load_state_dict", "in place"])
def test_no_checksum_is_wrong_after_state_was_set_from_outside(tmp_path, how):
    """Tiles that were written from outside have no checksum, or a new one."""
    [p] = parameters((3000,))
    with CSDAdam([p], devices=[str(tmp_path)], tile_size=1024) as opt:
        train(opt, 2)
        if how == "in place":
            opt.state[p]["exp_avg"].fill_(0.5)
        else:
            saved = opt.state_dict()
            state = {k: v.clone() for k, v in saved["state"][0].items()}
            state["exp_avg"].fill_(0.5)
            opt.load_state_dict({**saved, "state": {0: state}})
    [extent] = read_contents(tmp_path).manifest["extents"]
    for _, _, _, sections, row, sums in tiles_of(tmp_path / FILE_NAME):
        assert values_of(extent, sections)["exp_avg"][0] == pytest.approx(0.5, rel=0 if assumed() == "fp32" else 2**-5)
        if row["summed"]:
            assert sums_of(extent, sections) == sums.tolist()


def test_both_slots_alternate(tmp_path):
    slots = []
    for steps in range(1, 5):
        p, q = parameters((4096,), (4096,))
        with CSDAdam([p, q], devices=[str(tmp_path / str(steps))], tile_size=4096) as opt:
            train(opt, 1)
            q.grad = None
            for _ in range(1, steps):
                opt.step()
        slots.append([slot for _, _, slot, _, _, _ in tiles_of(tmp_path / str(steps) / FILE_NAME)])
    assert [p for p, _ in slots] == [1, 0, 1, 0]
    assert [q for _, q in slots] == [1, 1, 1, 1]  # without a gradient the slot does not change


def test_space_is_taken_up_front(tmp_path):
    n = 300_000
    with CSDAdam(parameters((n,)), devices=[str(tmp_path)], tile_size=1 << 16) as opt:
        train(opt, 1)
        stat = (tmp_path / FILE_NAME).stat()
        slots = 2 * -(-n // (1 << 16)) * tile_bytes(1 << 16)[1]
        assert stat.st_size >= slots
        assert 512 * stat.st_blocks >= slots, "a hole: the disk may fill up before it is written"
        assert 512 * stat.st_blocks <= slots + (1 << 17)


def test_unclean_while_open(tmp_path):
    opt = CSDAdam(parameters((3000,)), devices=[str(tmp_path)])
    for _ in range(2):
        train(opt, 1)
        opt.synchronize()
        assert not read_contents(tmp_path).superblock.flags & CLEAN
    opt.close()
    assert read_contents(tmp_path).superblock.flags & CLEAN


def test_store_grows_when_parameters_join(tmp_path):
    first, second, third = parameters((9000,), (6000,), (128, 64))
    with CSDAdam([first], devices=[str(tmp_path / "a"), str(tmp_path / "b")], tile_size=4096) as opt:
        train(opt, 2)
        sizes = [(tmp_path / d / FILE_NAME).stat().st_size for d in "ab"]
        opt.add_param_group({"params": [second]})
        train(opt, 1)
        opt.add_param_group({"params": [third], "amsgrad": True})
        train(opt, 1)
        assert all((tmp_path / d / FILE_NAME).stat().st_size > size for d, size in zip("ab", sizes, strict=True))
        states = states_of(opt)
    contents = read_contents(tmp_path / "b")
    assert contents.steps.tolist() == [4, 2, 1]
    assert [e["extent"] for e in contents.manifest["params"]] == [0, 1, 2]
    check_against(states, [tmp_path / d / FILE_NAME for d in "ab"], contents.manifest)


# ---- damage ----------------------------------------------------------------------------


def damage(store, offset, bits=0x01):
    with store.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ bits]))


PARTS = ["superblock", "manifest", "slot table"]


def part(contents, what, copy):
    """The offset and size of one copy of a part of a commit."""
    if what == "superblock":
        return copy * PAGE, 160
    region = contents.superblock.manifest if what == "manifest" else contents.superblock.table
    return region.offset(copy), region.size


@pytest.mark.parametrize("first", PARTS)
@pytest.mark.parametrize("second", PARTS)
@pytest.mark.parametrize("copy", [0, 1])
def test_one_damaged_copy_is_survived_two_are_not(tmp_path, first, second, copy):
    store = store_of(tmp_path)
    contents = read_contents(store)
    offset, size = part(contents, first, copy)
    damage(store, offset + size - 1)
    assert read_contents(store).superblock == contents.superblock
    with CSDAdam(parameters((3000,)), devices=[str(tmp_path)], resume=True) as opt:
        assert opt.committed_step == 1
    again = read_contents(store)
    assert again.superblock == contents.superblock  # and the copy is repaired
    damage(store, offset + size - 1)
    offset, size = part(contents, second, 1 - copy)
    damage(store, offset)
    with pytest.raises(CSDStoreError, match=r"damaged"):
        read_contents(store)
    with pytest.raises(CSDStoreError, match=str(store)):
        CSDAdam(parameters((3000,)), devices=[str(tmp_path)], resume=True)


def test_a_store_that_cannot_be_read_is_let_go(tmp_path):
    store = store_of(tmp_path)
    with store.open("r+b") as f:
        for block in range(2):
            f.seek(block * PAGE + 8)
            f.write(struct.pack("<I", 99))
            f.seek(block * PAGE)
            body = f.read(PAGE - 4)
            f.write(struct.pack("<I", crc32c(body)))
    for _ in range(2):
        with pytest.raises(CSDStoreError, match="format 99"):
            CSDAdam(parameters((5,)), devices=[str(tmp_path)])
    CSDAdam(parameters((5,)), devices=[str(tmp_path)], overwrite=True).close()
    assert not open_files(tmp_path)


def test_overwrite_that_fails_on_one_device_leaves_the_others_whole(tmp_path, monkeypatch):
    places = [tmp_path / "a", tmp_path / "b"]
    before = [store_of(place).read_bytes() for place in places]

    def full(fd, offset, size):
        raise OSError(errno.ENOSPC, "No space left on device")

    with CSDAdam(parameters((5000,)), devices=places, overwrite=True) as opt:
        monkeypatch.setattr(os, "posix_fallocate", full)
        with pytest.raises(CSDOSError, match="no room"):
            train(opt, 1)
    assert (places[1] / FILE_NAME).read_bytes() == before[1]


def test_store_cut_short_is_noticed(tmp_path):
    store = store_of(tmp_path)
    os.truncate(store, read_contents(store).superblock.manifest.base + 10)
    with pytest.raises(CSDStoreError, match="damaged"):
        read_contents(store)
    os.truncate(store, 100)
    with pytest.raises(CSDStoreError):
        read_contents(store)


@pytest.mark.parametrize(("offset", "value", "message"), [(8, 5, "format 5"), (12, 0x04030201, "endianness")])
def test_format_of_another_version_or_machine_is_refused(tmp_path, offset, value, message):
    store = store_of(tmp_path)
    with store.open("r+b") as file:
        for i in range(2):
            file.seek(i * PAGE)
            block = bytearray(file.read(PAGE))
            block[offset : offset + 4] = value.to_bytes(4, "little")
            block[-4:] = crc32c(block[:-4]).to_bytes(4, "little")
            file.seek(i * PAGE)
            file.write(block)
    before = store.read_bytes()
    with pytest.raises(CSDStoreError, match=message):
        read_contents(store)
    with pytest.raises((CSDStoreError, CSDStoreExistsError)):
        CSDAdam(parameters((5,)), devices=[str(tmp_path)])
    assert store.read_bytes() == before


@pytest.mark.parametrize("whole", ["two copies", "one copy"])  # one copy: killed during its first commit
def test_feature_that_nobody_knows_is_refused_by_its_name(whole, tmp_path):
    store = store_of(tmp_path)
    block = read_contents(store).superblock
    with store.open("r+b") as file:
        for copy in range(2):
            manifest = json.loads(read_region(file.fileno(), block.manifest, copy, "manifest", str(store)))
            data = json.dumps(manifest | {"features": [*manifest["features"], "telepathy"]}).encode()
            region = block.manifest._replace(size=len(data), crc=crc32c(data))
            assert region.size <= region.room
            write(file.fileno(), data, region.offset(copy))
            write(file.fileno(), replace(block, manifest=region).pack(), copy * PAGE)
        if whole == "one copy":
            write(file.fileno(), bytes(PAGE), PAGE)
    before = store.read_bytes()
    with pytest.raises(
        CSDStoreError, match=r"csd_optim\.store: it has telepathy, which this csd_optim does not know: upgrade"
    ):
        CSDAdam(parameters((3000,)), devices=[str(tmp_path)], resume=True)
    assert store.read_bytes() == before


@pytest.mark.fp32_states("older formats know no codes")
def test_store_of_an_older_format_is_kept_until_parameters_join(tmp_path, monkeypatch):
    """It keeps one checksum per section; an extent that joins has one per chunk, and then the store names features."""

    def begun(**options):
        torch.manual_seed(0)
        params = parameters((3000,), (2100,))
        named = [("first", params[0]), ("late", params[1])]
        return params, CSDAdam(named, devices=[str(tmp_path)], tile_size=2048, **options)

    def train_members(params, opt, members, steps):
        for step in range(steps):
            for p in params:
                p.grad = None
            for i in members:
                generator = torch.Generator().manual_seed(10 * step + i)
                params[i].grad = torch.randn(params[i].shape, generator=generator)
            opt.step()
        opt.close()

    with monkeypatch.context() as before:
        before.setattr("csd_optim.engine.open_devices.SUM_ELEMS", None)
        train_members(*begun(), [0], 2)
    old = read_contents(tmp_path)
    assert (old.superblock.version, "features" in old.manifest, old.sums[0].shape) == (1, False, (2, 1, 3))

    def resumed():
        params, opt = begun(resume=True)
        with torch.no_grad():  # as a user loads the model's checkpoint
            params[0].copy_(opt.state[params[0]]["master"])
        return params, opt

    train_members(*resumed(), [0], 3)
    same = read_contents(tmp_path)
    assert (same.superblock.version, same.superblock.step, same.sums[0].shape) == (1, 5, (2, 1, 3))

    train_members(*resumed(), [0, 1], 2)
    new = read_contents(tmp_path)
    assert (new.superblock.version, new.manifest["features"]) == (4, ["chunk_sums", "tile_numbers"])
    assert [sums.shape for sums in new.sums] == [(2, 1, 3), (2, 2, 3)]
    assert "sum_elems" not in new.manifest["extents"][0]
    assert [verdict.damage for verdict in verify([tmp_path])] == [[]]
    resumed()[1].close()

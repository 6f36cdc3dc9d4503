"""Stores whose states are codes: content, readers, and what is refused. The tests drive the engine directly."""

import json
import random
import shutil
from dataclasses import replace

import pytest
import torch
from support.backends import TILE as FP32_TILE
from support.codes import ALL, PLAIN, TILE, Coded, made
from support.forged import Forged
from support.stores import flip

from csd_optim import CSDAdam, CSDError, CSDStoreError, CSDValueError
from csd_optim.bindings import crc32c
from csd_optim.checkpoint.export import export_safetensors, export_torch
from csd_optim.checkpoint.files import no_progress
from csd_optim.checkpoint.snapshot import save, snapshot
from csd_optim.checkpoint.verify import verify
from csd_optim.cli.facts import describe_store
from csd_optim.devices.spec import parse_devices
from csd_optim.engine.open_engine import open_engine
from csd_optim.store.check import MAX_SIZE
from csd_optim.store.format import FILE_NAME, PAGE, Superblock, read_contents, unpack
from csd_optim.store.layout import extents_of, plan_extent
from csd_optim.store.reader import tiles_of
from csd_optim.store.sections import SECTIONS, sections_of, size_of, slot_of

NAMES = {
    torch.bfloat16: ["parameter", "correction", "ratio", "root", "exponent", "peak", "peak exponent"],
    torch.float32: ["master", "ratio", "root", "exponent", "peak", "peak exponent"],
}


OF_ADDRESSES = pytest.mark.at_hand("its store is made by the engine alone, with addresses of gradients and parameters")


def places(directory, n):
    return [directory / f"csd{d}" for d in range(n)]


def assert_loads(content, coded, steps):
    """Asserts that a state dict equals the reference arrays in `coded`, one per state and parameter, after `steps`."""
    for i, name in enumerate(coded.params):
        entry = content["state"][i]
        assert entry.keys() == {"step", *coded.states}
        assert entry["step"] == steps
        for state in coded.states:
            values = torch.view_as_real(entry[state]) if entry[state].is_complex() else entry[state]
            assert torch.equal(values.reshape(-1), coded.decoded()[name, state]), (name, state)


# ---- the slot ------------------------------------------------------------------------------


def test_sections_of_a_slot():
    """Each section of 4096 elements begins on a page; there is an exponent for each 64 elements."""
    slot = slot_of(4096, SECTIONS, "8bit", torch.float16)
    assert [s.name for s in slot] == NAMES[torch.bfloat16]
    assert [s.first // PAGE for s in slot] == [0, 2, 3, 4, 5, 6, 7]
    assert [s.at(64) - s.first for s in slot] == [128, 64, 64, 64, 1, 64, 1]
    assert size_of(slot) == 8 * PAGE
    slot = slot_of(1 << 20, SECTIONS[:3], "8bit", torch.float32)
    assert [s.name for s in slot] == NAMES[torch.float32][:4]
    assert [s.size >> 10 for s in slot] == [4096, 1024, 1024, 16]
    assert [s.size for s in slot_of(3072, SECTIONS[:3])] == [3 * PAGE] * 3  # fp32 states are unchanged


def test_parameters_begin_with_a_group():
    codes = plan_extent([70, 1, 128, 4096], 1, codec="8bit", param_dtype=torch.bfloat16)
    assert codes.starts == (0, 128, 192, 320)
    assert codes.tile_elems == 4096
    assert plan_extent([70, 1, 128], 1).starts == (0, 80, 96)


@pytest.mark.parametrize(
    ("states", "codec", "dtype"),
    [
        (SECTIONS[:3], "4bit", torch.bfloat16),
        (SECTIONS[:3], "8bit", None),
        (SECTIONS[:3], "8bit", torch.complex64),
        (SECTIONS[:3], "fp32", torch.float32),
        (("master", "momentum"), "8bit", torch.bfloat16),
        (SECTIONS[:2], "8bit", torch.bfloat16),
    ],
)
def test_codes_that_there_are_not(states, codec, dtype, tmp_path):
    engine = open_engine(parse_devices(tmp_path / "csd"))
    with pytest.raises(CSDValueError, match="Invalid codec"):
        engine.extend([100], states, codec=codec, param_dtype=dtype)
    engine.close()


# ---- what is written is read ---------------------------------------------------------------


@OF_ADDRESSES
@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("devices", [1, 3])
def test_states_come_back(devices, amsgrad, tmp_path):
    stores = places(tmp_path, devices)
    coded = made(stores, amsgrad=amsgrad, steps=3)
    contents = read_contents(stores[0])
    assert contents.superblock.version == 4
    assert contents.manifest["features"] == ["chunk_sums", "codec", "tile_numbers"]
    assert [e["codec"] for e in contents.manifest["extents"]] == ["8bit"] * 3
    assert [e["param_dtype"] for e in contents.manifest["extents"]] == ["bfloat16", "float16", "float32"]
    assert [(v.step, v.unchecked, v.damage) for v in verify(stores)] == [(3, 0, [])] * devices
    assert_loads(CSDAdam.load(stores[::-1]), coded, 3)
    # All slots in each step; the first one also writes the masters' sections, so that it can be undone.
    slots = [e["tiles"] * size_of(sections_of(e)) for e in contents.manifest["extents"]]
    begun = [e["tiles"] * sections_of(e)[0].size for e in contents.manifest["extents"]]
    assert contents.record.written_bytes == 3 * sum(slots) + sum(begun)


@OF_ADDRESSES
@pytest.mark.parametrize("order", [(torch.bfloat16, PLAIN), (PLAIN, torch.float16, torch.float32)], ids=str)
def test_beside_states_in_fp32(order, tmp_path, run):
    """Groups with and without codes: extents of fp32 states do not change."""
    devices = [f"file:{place}?share={1 + d}" for d, place in enumerate(places(tmp_path, 2))]
    coded = made(devices, order, amsgrad=True)
    manifest = read_contents(tmp_path / "csd0").manifest
    assert manifest["features"] == ["chunk_sums", "codec", "shares", "tile_numbers"]
    assert [e.get("param_dtype") for e in manifest["extents"]] == [d and str(d)[6:] for d in order]
    assert {"codec", "param_dtype"} & {*manifest["extents"][order.index(PLAIN)]} == set()
    assert_loads(CSDAdam.load(places(tmp_path, 2)), coded, 2)
    assert "max_exp_avg_sq in fp32" in run("inspect", tmp_path / "csd1")[1]
    export_torch(places(tmp_path, 2), tmp_path / "out.pt")
    assert run("import", tmp_path / "out.pt", tmp_path / "again")[0] == 0
    assert_loads(CSDAdam.load(tmp_path / "again"), coded, 2)
    with Coded(devices, order, amsgrad=True, resume=True) as again:
        for step in (1, 2):
            again.update_codes(step)
        for name, value in again.rounded().items():
            again.params[name].copy_(value)
        again.step()
    assert_loads(CSDAdam.load(places(tmp_path, 2)), again, 3)


@OF_ADDRESSES
@pytest.mark.parametrize("amsgrad", [False, True])
def test_training_goes_on(amsgrad, tmp_path):
    stores = places(tmp_path, 2)
    made(stores, amsgrad=amsgrad, steps=2)
    whole = made([tmp_path / "whole"], amsgrad=amsgrad, steps=4)
    with Coded(stores[::-1], amsgrad=amsgrad, resume=True) as again:
        assert again.engine.states.step == 2
        for step in (1, 2):  # the parameters as they were
            again.update_codes(step)
        for name, value in again.rounded().items():
            again.params[name].copy_(value)
        for _ in range(2):
            again.step()
        for name, param in again.params.items():
            assert torch.equal(param, whole.params[name])
    assert_loads(CSDAdam.load(stores), whole, 4)
    assert not any(v.damage for v in verify(stores))


@OF_ADDRESSES
def test_an_engine_decodes(tmp_path):
    made([tmp_path / "csd"], amsgrad=True)
    with Coded([tmp_path / "csd"], amsgrad=True, resume=True) as again:
        for step in (1, 2):
            again.update_codes(step)
        engine, found = again.engine, again.decoded()
        for row, (name, param) in enumerate(again.params.items()):
            for tile in engine.tiles.of([row]).tolist():
                for _, _, first, at, n in (p for p in engine.tiles.pieces_of(tile).tolist() if p[0] == row):
                    states = [None, *(torch.empty(n) for _ in range(3))]
                    engine.native.decode(tile, at, n, states)
                    for state, values in zip(again.states[1:], states[1:], strict=True):
                        assert torch.equal(values, found[name, state][first : first + n]), (name, state, param)


@OF_ADDRESSES
def test_a_step_that_fails_leaves_the_one_before(tmp_path):
    made([tmp_path / "csd"])
    before = made([tmp_path / "again"])
    with Coded([tmp_path / "csd"], resume=True) as again:
        again.step(commit=False)
        again.engine.abandon()
    assert_loads(CSDAdam.load(tmp_path / "csd"), before, 2)


# ---- other readers of stores -----------------------------------------------------------------


@OF_ADDRESSES
def test_snapshots(tmp_path):
    stores = places(tmp_path, 2)
    coded = made(stores)
    snapshot(stores, tmp_path / "snap")
    copies = sorted((tmp_path / "snap").iterdir())
    assert not any(v.damage for v in verify(copies))
    assert_loads(CSDAdam.load(copies), coded, 2)


@OF_ADDRESSES
@pytest.mark.parametrize("amsgrad", [False, True])
def test_exports(amsgrad, tmp_path, run):
    stores = places(tmp_path, 2)
    coded = made(stores, amsgrad=amsgrad)
    held = CSDAdam.load(stores)
    [file] = export_torch(stores, tmp_path / "out.pt")
    content = torch.load(file, weights_only=True)
    assert_loads(content, coded, 2)
    assert content.keys() == held.keys()
    export_safetensors(stores, tmp_path / "out")
    for out in tmp_path / "out.pt", tmp_path / "out":  # import restores the codes
        again = tmp_path / f"from{out.suffix}"
        code, _, err = run("import", out, again)
        assert code == 0, err
        assert_loads(CSDAdam.load(again), coded, 2)
        assert not verify(again)[0].damage
        described, before = (read_contents(store).manifest["extents"] for store in (again, stores[0]))
        for extent, there in zip(described, before, strict=True):
            assert [extent[k] for k in ("codec", "param_dtype")] == [there[k] for k in ("codec", "param_dtype")]
    del content["csd_optim"]["codes"]  # as software that does not know codes would write it
    torch.save(content, tmp_path / "plain.pt")
    assert run("import", tmp_path / "plain.pt", tmp_path / "plain")[0] == 0
    assert "codec" not in read_contents(tmp_path / "plain").manifest["features"]
    assert_loads(CSDAdam.load(tmp_path / "plain"), coded, 2)


@OF_ADDRESSES
def test_snapshots_between_steps(tmp_path):
    before = made([tmp_path / "before"], steps=1)
    with Coded([tmp_path / "csd"]) as coded:
        coded.step()
        saving = save(coded.engine, tmp_path / "snap", no_progress, wait=False)
        coded.step()
        saving.wait()
    assert_loads(CSDAdam.load(tmp_path / "snap"), before, 1)
    assert_loads(CSDAdam.load(tmp_path / "csd"), coded, 2)


@OF_ADDRESSES
def test_ranks_are_put_together(tmp_path, monkeypatch):
    monkeypatch.setitem(ALL, torch.bfloat16, {"weight": (90, 110)})
    ranks = [made([tmp_path / f"rank{r}"], [torch.bfloat16], rank=r) for r in range(2)]
    export_torch([tmp_path / "rank1", tmp_path / "rank0"], tmp_path / "out.pt")
    entry = torch.load(tmp_path / "out.pt", weights_only=True)["state"][0]
    for state in ranks[0].states:
        halves = [coded.decoded()["weight", state].view(90, 110) for coded in ranks]
        assert torch.equal(entry[state], torch.cat(halves))
    assert not torch.equal(halves[0], halves[1])


@OF_ADDRESSES
def test_inspect_says_it(tmp_path, run):
    made([tmp_path / "csd"], [torch.bfloat16, torch.float32])
    code, out, _ = run("inspect", tmp_path / "csd")
    assert code == 0
    assert "master, exp_avg, exp_avg_sq in 8bit codes of bfloat16 parameters: 5.02 B per parameter in a slot" in out
    assert "8bit codes of float32 parameters: 6.02 B" in out
    assert "in fp32" not in out
    described = describe_store(tmp_path / "csd")
    assert [how["bytes_per_param"] for how in described["states"]] == [5 + 1 / 64, 6 + 1 / 64]
    extents = read_contents(tmp_path / "csd").manifest["extents"]
    assert described["step_bytes"] == sum(e["tiles"] * size_of(sections_of(e)) for e in extents)


# ---- damage ----------------------------------------------------------------------------------


@OF_ADDRESSES
@pytest.mark.parametrize("dtype", NAMES, ids=str)
def test_damage_is_named(dtype, tmp_path, run):
    whole = tmp_path / "whole"
    made([whole], [dtype], amsgrad=True)
    at = TILE + 1024  # in the second chunk of the second tile
    p = [p for p in read_contents(whole).manifest["params"] if p["start"] <= at][-1]
    name = p["name"]
    for k, section in enumerate(NAMES[dtype]):
        store = tmp_path / str(k)
        shutil.copytree(whole, store)
        tile = next(t for t in tiles_of([read_contents(store)]) if t.number == 1)
        flip(store, section, at=tile.offset + tile.sections[k].at(1024))
        code, out, _ = run("verify", store)
        assert code == 1
        assert f"{section} of tile 1 is damaged: elements {at - p['start']} to " in out
        assert name in out
        with pytest.raises(CSDStoreError, match=f"{section} of tile 1"):
            CSDAdam.load(store)
        engine = open_engine(parse_devices(store), mode="resume")
        with pytest.raises(CSDStoreError, match=f"{section} of tile 1.*{name}"):
            engine.committer.check_recovered()
        engine.abandon()
        with pytest.raises(CSDStoreError, match=f"{section} of tile 1"):
            snapshot(store, tmp_path / "snap")
        with pytest.raises(CSDStoreError, match=f"{section} of tile 1"):
            export_torch(store, tmp_path / "out.pt")


@OF_ADDRESSES
def test_what_sections_are_padded_with_is_nobodys(tmp_path):
    made([tmp_path / "csd"], [torch.bfloat16])
    tile = tiles_of([read_contents(tmp_path / "csd")])[0]
    assert tile.sections[4].at(TILE) == tile.sections[4].first + 64
    flip(tmp_path / "csd", "", at=tile.offset + tile.sections[4].at(TILE))
    assert not verify(tmp_path / "csd")[0].damage


# ---- forged stores -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    place = tmp_path_factory.mktemp("coded")
    made([place / "csd"], amsgrad=True)
    return (place / "csd" / FILE_NAME).read_bytes()


def forged(data, change):
    """The contents of a store whose manifest was altered by `change`, with right checksums."""
    block = Superblock.unpack(data[:PAGE], "")
    manifest, table = (data[r.base : r.base + r.size] for r in (block.manifest, block.table))
    about = json.loads(manifest)
    change(about, about["extents"][0])
    manifest = json.dumps(about).encode()
    block = replace(block, manifest=block.manifest._replace(size=len(manifest), crc=crc32c(manifest)))
    return unpack("store", 0, block, manifest, table, len(data))


def of_sgd(manifest):
    """Names a rule without the states that codes represent."""
    manifest.update(rule="sgd", features=[*manifest["features"], "rule"])
    for extent in manifest["extents"]:
        extent["sections"] = ["master", "momentum_buffer"]


@OF_ADDRESSES
@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda m, e: e.update(codec="4bit"), "4bit"),
        (lambda m, e: e.update(codec="fp32"), "fp32"),
        (lambda m, e: e.update(codec=["8bit"]), "codes"),
        (lambda m, e: e.update(codec=None), "None"),
        (lambda m, e: e.pop("codec"), "codes None"),
        (lambda m, e: e.pop("param_dtype"), "parameters None"),
        (lambda m, e: e.update(param_dtype="complex64"), "complex64"),
        (lambda m, e: e.update(param_dtype=["float16"]), "codes"),
        (lambda m, e: e.update(param_dtype="float16"), "parameter weight is bfloat16"),
        (lambda m, e: e.update(sections=["master", "exp_avg"]), "sections"),
        (lambda m, e: e.update(sections=["master", "exp_avg_sq", "exp_avg"]), "sections"),
        (lambda m, e: e.update(sections=list(SECTIONS[:3])), "do not belong together"),
        (lambda m, e: e.update(tile_elems=5120), "5120"),
        (lambda m, e: e.pop("sum_elems"), "a tile of codes"),
        (lambda m, e: of_sgd(m), "codes '8bit' of parameters"),
        (lambda m, e: m["features"].remove("codec"), "features lack 'codec'"),
        (lambda m, e: m["params"][1].update(start=m["params"][1]["start"] + 16), "bias"),
        (lambda m, e: m["params"][0].update(dtype="float32"), "weight is float32"),
        (lambda m, e: [x.pop(k) for x in m["extents"] for k in ("codec", "param_dtype")], "features lack 'codec'"),
    ],
)
def test_what_cannot_be_is_refused(change, says, store):
    forged(store, lambda m, e: None)
    with pytest.raises(CSDStoreError, match=says):
        forged(store, change)


@OF_ADDRESSES
def test_a_reader_that_knows_no_codes_says_so(store, monkeypatch):
    monkeypatch.setattr("csd_optim.store.format.FEATURES", {"chunk_sums", "tile_numbers"})
    with pytest.raises(CSDStoreError, match="it has codec, which this csd_optim does not know"):
        forged(store, lambda m, e: None)


@OF_ADDRESSES
def test_no_reader_fails_otherwise(store, tmp_path):
    opened = refused = 0
    for seed in range(1500):
        fake = Forged(store, random.Random(seed))
        try:
            block = Superblock.unpack(fake.block.pack(), "store")
            contents = unpack("store", 0, block, fake.manifest, fake.table, len(fake.data))
            assert contents.end <= MAX_SIZE
            for tile in tiles_of([contents]):
                assert 2 * PAGE <= tile.offset <= tile.offset + tile.size <= len(fake.data)
            extents_of([contents])
            if seed % 5:
                continue
            (tmp_path / str(seed)).mkdir()
            fake.write(tmp_path / str(seed) / FILE_NAME)
            for reader in describe_store, verify, CSDAdam.load:
                reader(tmp_path / str(seed))
            opened += 1
        except CSDError:
            refused += 1
        except Exception as e:
            raise AssertionError(f"seed {seed}, {fake.what.__name__}: {e!r}") from e
    assert refused > 500
    assert opened > 10


def test_fp32_stores_are_what_they_were(tmp_path):
    """They have neither keys nor features of codes."""
    p = torch.nn.Parameter(torch.ones(5000))
    with CSDAdam([p], devices=[tmp_path / "csd"], tile_size=FP32_TILE, state_dtype="fp32") as opt:
        p.grad = torch.ones(5000)
        opt.step()
    manifest = read_contents(tmp_path / "csd").manifest
    assert "codec" not in manifest["features"]
    assert not {"codec", "param_dtype"} & {*manifest["extents"][0]}

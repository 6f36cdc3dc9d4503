"""State dicts loaded from stores, exports and imports: the same bits everywhere."""

import gc
import json
import pickle
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.backends import TILE
from support.comparing import assert_same
from support.stores import (
    continues_like,
    flip,
    grads,
    groups_of,
    make,
    model,
    places,
    resumed,
    state_of,
    train_params,
)

from csd_optim import (
    CSDAdam,
    CSDBusyError,
    CSDOSError,
    CSDStoreError,
    CSDValueError,
)
from csd_optim.bindings import crc32c
from csd_optim.checkpoint import export as convert
from csd_optim.checkpoint.importing import import_store
from csd_optim.checkpoint.verify import verify
from csd_optim.cli import output as show
from csd_optim.store.format import (
    FILE_NAME,
    PAGE,
    read_contents,
)

GIB = 1 << 30


# ---- load ----------------------------------------------------------------------------


def test_load_gives_adamws_state_dict(tmp_path):
    params, opt = make(tmp_path / "a", 3)
    opt.user_state = {"epoch": 2}
    train_params(opt, params, 3, 4)
    expected = opt.state_dict()
    opt.close()
    devices = places(tmp_path / "a", 3)
    for paths in (devices, devices[::-1], [d / FILE_NAME for d in devices]):
        held = CSDAdam.load(paths)
        assert held["state"].keys() == expected["state"].keys() == {0, 1, 2, 3, 4, 5, 7}
        for i, entry in held["state"].items():
            assert entry.keys() == expected["state"][i].keys()
            for key, value in entry.items():
                assert torch.equal(value, expected["state"][i][key])
                assert value.stride() == expected["state"][i][key].stride() or key == "step"
        for group, wanted in zip(held["param_groups"], expected["param_groups"], strict=True):
            assert group == wanted
    ours = held["csd_optim"]
    assert (ours["step"], ours["user_state"]) == (4, {"epoch": 2})
    assert {p["name"]: p["dtype"] for p in ours["params"]} == {
        name: str(p.dtype).removeprefix("torch.") for name, p in params.items() if name != "waiting"
    }
    assert [p["name"] for p in ours["waiting"]] == ["waiting"]


@pytest.mark.parametrize("named", [True, False])
def test_load_fits_torchs_adamw_and_ours(tmp_path, named):
    """After loading, the next step is the same as the original's."""
    params, opt = make(tmp_path / "a", 1, named)
    opt.save(tmp_path / "snap")
    held = CSDAdam.load(tmp_path / "snap")
    theirs, ours = ({n: torch.nn.Parameter(p.detach().clone()) for n, p in params.items()} for _ in range(2))
    adamw = torch.optim.AdamW(groups_of(theirs, named))
    adamw.load_state_dict(held)
    with CSDAdam(groups_of(ours, named), devices=["ram:"]) as again:
        again.load_state_dict(CSDAdam.load(tmp_path / "snap"))
        for optimizer, mine in ((opt, params), (adamw, theirs), (again, ours)):
            train_params(optimizer, mine, 3, 4)
        assert_same(state_of(again, ours), state_of(opt, params))
    for name, p in params.items():
        tolerance = 1e-6 if p.dtype is not torch.bfloat16 else 2e-2  # torch's AdamW computes in bfloat16 then
        torch.testing.assert_close(theirs[name], p, rtol=tolerance, atol=tolerance)
    opt.close()


@pytest.mark.fp32_states("only fp32 states are mapped")
@pytest.mark.at_hand("looks at states after the optimizer was closed")
def test_loaded_tensors_are_the_file_and_keep_it_from_being_written(tmp_path):
    params, opt = make(tmp_path / "a", 1)
    opt.close()
    held = CSDAdam.load(tmp_path / "a" / "csd0")
    other = CSDAdam.load(tmp_path / "a" / "csd0")  # several may load the same store
    with pytest.raises(CSDBusyError, match=r"load\(\)"):
        resumed(places(tmp_path / "a", 1))
    held["state"][0]["exp_avg"].fill_(5.0)  # the mapping is private
    assert torch.equal(other["state"][0]["exp_avg"], opt.state[params["weight"]]["exp_avg"])
    (tmp_path / "a" / "csd0" / FILE_NAME).rename(tmp_path / "moved")
    assert torch.equal(other["state"][1]["exp_avg"], opt.state[params["columns"]]["exp_avg"])
    (tmp_path / "moved").rename(tmp_path / "a" / "csd0" / FILE_NAME)
    one = held["state"][0]["master"]
    del held, other
    gc.collect()
    with pytest.raises(CSDBusyError):
        resumed(places(tmp_path / "a", 1))
    del one
    gc.collect()
    _, again = resumed(places(tmp_path / "a", 1))
    again.close()


def test_load_of_a_store_in_use(tmp_path):
    _, opt = make(tmp_path / "a", 1)
    with pytest.raises(CSDBusyError, match=r"a snapshot, which its optimizer makes by save\(\)"):
        CSDAdam.load(tmp_path / "a" / "csd0")
    opt.close()


def test_load_refuses_what_is_no_whole_store(tmp_path):
    _, opt = make(tmp_path / "a", 3)
    opt.close()
    with pytest.raises(CSDStoreError, match="name all 3"):
        CSDAdam.load(places(tmp_path / "a", 2))
    with pytest.raises(CSDOSError, match="there is no store"):
        CSDAdam.load(tmp_path)
    with pytest.raises(CSDOSError, match="there is no store"):
        CSDAdam.load(tmp_path / "nowhere")
    with pytest.raises(CSDValueError, match="at least one"):
        CSDAdam.load([])
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / FILE_NAME).touch()
    with pytest.raises(CSDStoreError, match="no step"):
        CSDAdam.load(tmp_path / "empty")
    assert (tmp_path / "empty" / FILE_NAME).exists()  # loading removes nothing
    (tmp_path / "other").mkdir()
    for content in (b"mine", b"mine" * 5000):
        (tmp_path / "other" / FILE_NAME).write_bytes(content)
        for path in (tmp_path / "other", tmp_path / "other" / FILE_NAME):
            with pytest.raises(CSDStoreError, match=r"other/.* is no csd_optim store"):
                CSDAdam.load(path)
        assert (tmp_path / "other" / FILE_NAME).read_bytes() == content
    flip(tmp_path / "a" / "csd1", "master", tile=1)
    with pytest.raises(CSDStoreError, match="master of tile 1 is damaged"):
        CSDAdam.load(places(tmp_path / "a", 3))


# ---- export and import ---------------------------------------------------------------


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize(("n", "m"), [(1, 3), (3, 1)])
@pytest.mark.parametrize("form", ["torch", "safetensors"])
@pytest.mark.at_hand("import writes to windows")
def test_export_and_import_are_the_same_bits(tmp_path, run, form, n, m, named):
    params, opt = make(tmp_path / "a", n, named, steps=2)
    opt.user_state = {"epoch": 4, "rng": torch.arange(100)}
    train_params(opt, params, 2, 3)
    opt.save(tmp_path / "snap")
    code, out, err = run("export", tmp_path / "snap", tmp_path / "out", "--format", form, "--shard-size", "50kB")
    assert (code, err) == (0, "")
    assert str(tmp_path / "out") in out
    code, out, err = run("import", tmp_path / "out", *places(tmp_path, m), "--tile-size", "4096")
    assert (code, err) == (0, "")
    assert "step 3" in out
    assert f"on {m} device" in out
    assert not any(v.damage or v.unchecked for v in verify(places(tmp_path, m)))
    a, b = read_contents(tmp_path / "snap" / "device-0"), read_contents(tmp_path / "csd0")
    assert (a.record.groups, a.record.seconds, a.superblock.step) == (b.record.groups, b.record.seconds, 3)
    assert {e["tile_elems"] for e in b.manifest["extents"]} == {4096}
    _, again = resumed(places(tmp_path, m), named)
    assert again.user_state["epoch"] == 4
    assert torch.equal(again.user_state["rng"], torch.arange(100))
    again.close()
    continues_like(params, opt, places(tmp_path, m), named)
    opt.close()


def test_torch_export_is_what_torch_save_writes(tmp_path, run):
    params, opt = make(tmp_path / "a", 2)
    opt.user_state = {"list": [torch.arange(3), {"x": torch.ones(2).half()}], "none": None}
    train_params(opt, params, 3, 4)
    opt.save(tmp_path / "snap")
    opt.close()
    assert run("export", tmp_path / "snap", tmp_path / "ours.pt")[0] == 0
    torch.save(CSDAdam.load(tmp_path / "snap"), tmp_path / "torchs.pt")
    ours, torchs = (torch.load(tmp_path / f"{name}.pt", weights_only=True) for name in ("ours", "torchs"))
    assert str(ours) == str(torchs)
    for i, entry in torchs["state"].items():
        for key, value in entry.items():
            assert torch.equal(ours["state"][i][key], value)
            assert ours["state"][i][key].stride() == value.stride()
    import_store(tmp_path / "torchs.pt", [tmp_path / "b"])  # users may write the file with torch.save(), too
    assert not verify(tmp_path / "b")[0].damage


def test_inspect_tells_what_a_step_writes(tmp_path, run):
    """Also for an imported store, in which only the last step was written."""
    params, opt = make(tmp_path / "a", 2, steps=9)
    opt.close()
    convert.export_torch(places(tmp_path / "a", 2), tmp_path / "out.pt")
    import_store(tmp_path / "out.pt", [tmp_path / "b"], TILE)
    for store in (tmp_path / "a" / "csd0", tmp_path / "b"):
        code, out, _ = run("inspect", store, "--json")
        told = json.loads(out)["step_bytes"]
        code, out, _ = run("inspect", store)
        assert code == 0
        assert f", {show.size(told)} a step" in out
    params, opt = resumed([tmp_path / "b"])
    train_params(opt, params, 9, 10)
    assert opt.stats()["flash_write_bytes"] == told
    opt.close()


@pytest.mark.fp32_states("only fp32 states are mapped")
@pytest.mark.at_hand("looks at states after the optimizer was closed")
def test_safetensors_are_read_by_the_library(tmp_path, run):
    safe = pytest.importorskip("safetensors.torch")
    params, opt = make(tmp_path / "a", 2)
    opt.close()
    arguments = ("export", *places(tmp_path / "a", 2), tmp_path / "out", "--format", "safetensors")
    code, out, _ = run(*arguments, "--shard-size", "60kB", "--json")
    assert code == 0
    content = json.loads(out)
    assert content["schema"] == "csd_optim.export/1"
    assert {Path(f) for f in content["files"]} == {*(tmp_path / "out").iterdir()}
    held = {}
    for file in sorted((tmp_path / "out").glob("*.safetensors")):
        part = safe.load_file(file)
        assert len(part) == 1 or sum(t.nbytes for t in part.values()) <= 60_000
        assert not held.keys() & part.keys()
        held |= part
    index = json.loads((tmp_path / "out" / convert.INDEX_NAME).read_text())
    assert index["weight_map"].keys() == held.keys()
    for name, p in params.items():
        for key, value in opt.state[p].items() if name != "waiting" else ():
            if key == "step":
                continue
            stored = held[f"{name}.{key}"]
            assert torch.equal(torch.view_as_complex(stored) if p.is_complex() else stored, value)
    assert index["metadata"]["csd_optim"]["steps"] == [3.0] * 7


def test_parameters_that_got_another_place_are_left_behind(tmp_path):
    """amsgrad's fourth state takes another extent; the old one is not exported."""
    params, opt = make(tmp_path / "a", 1)
    held = opt.state_dict()
    held["state"][0]["max_exp_avg_sq"] = torch.full((60, 150), 3.0)
    held["param_groups"][0]["amsgrad"] = True
    for i in (1, 2, 3):
        held["state"][i]["max_exp_avg_sq"] = torch.zeros_like(held["state"][i]["exp_avg"])
    opt.load_state_dict(held)
    train_params(opt, params, 3, 4)
    opt.save(tmp_path / "snap")
    convert.export_torch(tmp_path / "snap", tmp_path / "out.pt")
    import_store(tmp_path / "out.pt", places(tmp_path, 2))
    assert len(read_contents(tmp_path / "csd0").manifest["params"]) == 7
    assert len(read_contents(tmp_path / "a" / "csd0").manifest["params"]) == 11
    others, again = resumed(places(tmp_path, 2))
    assert_same(state_of(again, others), state_of(opt, params))
    again.close()
    opt.close()


@pytest.mark.parametrize("form", ["torch", "safetensors"])
@pytest.mark.fp32_states("counts tiles, bytes or elements of fp32 states")
def test_export_of_a_damaged_store_leaves_nothing(tmp_path, run, form):
    _, opt = make(tmp_path / "a", 1)
    opt.close()
    flip(tmp_path / "a" / "csd0", "exp_avg_sq", tile=0)
    code, _, err = run("export", tmp_path / "a" / "csd0", tmp_path / "out", "--format", form)
    assert code == 1
    assert "exp_avg_sq of tile 0 is damaged: elements 0 to 1023 of weight" in err
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a"]


@pytest.mark.parametrize(
    ("what", "message"), [("start", "the manifest contradicts itself"), ("tiles", "do not belong together")]
)
def test_a_manifest_that_contradicts_itself(tmp_path, run, what, message):
    _, opt = make(tmp_path / "a", 1)
    opt.close()
    store = tmp_path / "a" / "csd0"
    held = read_contents(store)
    if what == "start":
        held.manifest["params"][1]["start"] += 16
    else:
        held.manifest["extents"][0]["tiles"] -= 1
        held.manifest["extents"][1]["tiles"] += 1
    about = json.dumps(held.manifest).encode()
    region = held.superblock.manifest._replace(size=len(about), crc=crc32c(about))
    block = replace(held.superblock, manifest=region).pack()
    with (store / FILE_NAME).open("r+b") as file:
        for copy in range(2):
            for at, data in ((region.offset(copy), about), (copy * PAGE, block)):
                file.seek(at)
                file.write(data)
    with pytest.raises(CSDStoreError, match=message):
        resumed([store])
    for form in ("torch", "safetensors"):
        code, _, err = run("export", store, tmp_path / "out", "--format", form)
        assert code == 1
        assert message in err
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a"]


def test_export_overwrites_nothing_and_needs_a_store_at_rest(tmp_path, run):
    _, opt = make(tmp_path / "a", 1)
    store = tmp_path / "a" / "csd0"
    code, _, err = run("export", store, tmp_path / "out")
    assert code == 1
    assert "save()" in err
    opt.close()
    (tmp_path / "out").write_text("mine")
    for form in ("torch", "safetensors"):
        code, _, err = run("export", store, tmp_path / "out", "--format", form)
        assert code == 1
        assert "nothing is overwritten" in err
    assert (tmp_path / "out").read_text() == "mine"
    assert run("export", store, tmp_path / "new", "--format", "onnx")[0] == 2
    assert run("export", store)[0] == 2


def test_import_refuses_what_is_no_export(tmp_path, run):
    params = model()
    plain = torch.optim.AdamW([params["weight"]])
    grads(params, 0)
    plain.step()
    torch.save(plain.state_dict(), tmp_path / "adamw.pt")
    (tmp_path / "text").write_text("no checkpoint")
    torch.save({"model": torch.nn.Linear(2, 2)}, tmp_path / "objects")
    (tmp_path / "pickle").write_bytes(pickle.dumps({"state": {}}))
    (tmp_path / "empty").mkdir()
    expected = {
        "adamw.pt": "opt.load_state_dict(torch.load(...))",
        **dict.fromkeys(("text", "objects", "pickle"), "is no export of a store, or damaged: torch.load"),
        "empty": "is neither a store nor an export of one",
        "nowhere": "cannot read",
    }
    for name, what in expected.items():
        code, _, err = run("import", tmp_path / name, tmp_path / "b")
        assert code == 1
        assert what in err
        assert len(err.splitlines()) == 1  # what torch advises here is for other cases
    assert not (tmp_path / "b").exists()


def test_import_makes_a_whole_store_or_none(tmp_path, run):
    _, opt = make(tmp_path / "a", 1)
    opt.close()
    store = tmp_path / "a" / "csd0"
    convert.export_safetensors(store, tmp_path / "out", 50_000)
    code, _, err = run("import", tmp_path / "out", tmp_path / "b", store)
    assert code == 1
    assert "holds a store of step 3" in err
    code, _, err = run("import", tmp_path / "out", "ram:")
    assert code == 1
    assert "name a directory" in err
    shard = sorted((tmp_path / "out").glob("*.safetensors"))[2]
    whole = shard.read_bytes()
    for broken in (whole[:-100], b"", b"\xff" * len(whole)):
        shard.write_bytes(broken)
        code, _, err = run("import", tmp_path / "out", tmp_path / "b")
        assert code == 1
        assert "damaged" in err
        assert not (tmp_path / "b" / FILE_NAME).exists()
    shard.write_bytes(whole)
    index = tmp_path / "out" / convert.INDEX_NAME
    content = json.loads(index.read_text())
    next(p for p in content["metadata"]["csd_optim"]["params"] if p["name"] == "half")["shape"] = [5001]
    index.write_text(json.dumps(content))
    code, _, err = run("import", tmp_path / "out", tmp_path / "b")
    assert code == 1
    assert "of half is missing or does not fit" in err
    assert not (tmp_path / "b" / FILE_NAME).exists()


def test_newer_exports_are_refused(tmp_path, run):
    _, opt = make(tmp_path / "a", 1)
    opt.close()
    held = CSDAdam.load(tmp_path / "a" / "csd0")
    held["csd_optim"]["format"] = 5
    torch.save(held, tmp_path / "new.pt")
    code, _, err = run("import", tmp_path / "new.pt", tmp_path / "b")
    assert code == 1
    assert "upgrade" in err

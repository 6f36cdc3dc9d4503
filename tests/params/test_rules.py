"""An update rule is a header and an UpdateRule: engine, stores and tools handle its sections by any name."""

import json
import shutil
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from support.optimizers import ADAMW, FULL, PAIRS
from support.training import train

from csd_optim import CSDAdam, CSDRuntimeError, CSDStoreError, CSDValueError, bindings
from csd_optim.bindings import HYPER, PARAM, RULE_ROWS, RULES, RuleRow
from csd_optim.checkpoint.export import export_safetensors, export_torch
from csd_optim.checkpoint.importing import import_store
from csd_optim.checkpoint.state_dict import load
from csd_optim.checkpoint.verify import verify
from csd_optim.devices.spec import parse_devices
from csd_optim.engine.open_engine import open_engine
from csd_optim.optim.rules import ADAMW as RULE
from csd_optim.optim.rules import NAMED, check_native_rules
from csd_optim.params.manifest import rule_difference
from csd_optim.store import format as store_format
from csd_optim.store.format import read_contents

# AdamW's arithmetic, with other names for rule and sections.
OTHER_NAMES = {"name": "twin", "sections": ("master", "first", "second", "largest"), "switches": {"amsgrad": "largest"}}
TWIN = replace(RULE, **OTHER_NAMES)


pytestmark = pytest.mark.fp32_states("codes are AdamW's alone")


class CSDTwin(CSDAdam):
    _rule = TWIN


# ---- the list of rules ---------------------------------------------------------------------


def without(name):
    return [row for row in RULE_ROWS if row.name != name]


def with_row(name, **changed):
    return [row._replace(**changed) if row.name == name else row for row in RULE_ROWS]


@pytest.mark.parametrize(
    ("rows", "what"),
    [
        (without("lion"), r"\['lion'\], \[\('lion', \(2, 2, 'fp32'\)\)\]"),
        (without("sgd_nesterov"), r"\['sgd_nesterov'\], \[\]"),  # a variant, without which the sections are the same
        (without("muon_apply"), r"\['muon_apply'\], .*'muon', \(1, 1, 'linear'\)"),
        ([*RULE_ROWS, RuleRow("new", "new", 0, 2, 2, "fp32", "New")], r"\['new'\], \[\('new', \(2, 2, 'fp32'\)\)\]"),
        (with_row("lion", rule="tiger"), r"\[\], .*'lion'.*'tiger'"),
        (with_row("adamw", updated=2), r"\[\], .*'adamw', \(2, 4, '8bit'\)"),
        (with_row("lion", most=3), r"\[\], .*'lion', \(2, 3, 'fp32'\)"),
        (with_row("adagrad", codec="8bit"), r"\[\], .*'adagrad', \(2, 2, '8bit'\)"),
    ],
    ids=["no lion", "no variant", "no second pass", "one more", "another name", "fewer", "more", "codec"],
)
def test_rules_that_differ_from_those_of_the_engine_are_refused(rows, what):
    check_native_rules(NAMED.values(), RULE_ROWS)
    with pytest.raises(CSDRuntimeError, match=what):
        check_native_rules(NAMED.values(), rows)


def test_a_rule_that_the_engine_lacks_is_refused():
    with pytest.raises(CSDRuntimeError, match=r"\[\], \[\('twin', \(3, 4, 'fp32'\)\)\]"):
        check_native_rules([*NAMED.values(), TWIN], RULE_ROWS)


# ---- a rule of other names -----------------------------------------------------------------


def params():
    torch.manual_seed(0)
    return [torch.nn.Parameter(torch.randn(n)) for n in (3000, 17)]


def groups(ps):
    return [{"params": ps[:1]}, {"params": ps[1:], "amsgrad": True}]


def states(opt, ps):
    return [{name: value.clone() for name, value in opt.state[p].items()} for p in ps]


def same(a, b, names=None):
    """Asserts that all states agree. `names`: a's name of a state → b's, where they differ."""
    for ours, theirs in zip(a, b, strict=True):
        assert len(ours) == len(theirs)
        for name, value in ours.items():
            assert torch.equal(value, theirs[(names or {}).get(name, name)]), name


# ---- what a rule says -----------------------------------------------------------------------


def test_sections_that_a_group_needs():
    rule = replace(TWIN, min_sections=1, switches={"momentum": "first", "centered": "largest"})
    off, on = {"momentum": 0.0, "centered": False}, {"momentum": 0.9, "centered": False}
    assert rule.sections_for(off) == ("master",)
    assert rule.sections_for(on) == ("master", "first")
    assert rule.sections_for(off, held={"step", "first", "residual"}) == ("master", "first")
    assert rule.sections_for({**on, "centered": True}) == ("master", "first", "largest")
    assert rule.lacking({**on, "centered": True}, ("master", "first")) == ("centered", "largest")
    assert [rule.takes(TWIN.sections[:n]) for n in range(5)] == [False, True, True, True, True]
    assert rule.takes(("master", "largest"))
    assert not rule.takes(("master", "largest", "first"))
    assert not TWIN.takes(TWIN.sections[:2])
    assert not TWIN.takes(("master", "first", "largest"))
    assert not TWIN.takes(RULE.sections)


def test_constants_fill_what_the_engine_has_for_them():
    for amsgrad in (False, True):
        group = {
            "lr": 0.1,
            "betas": (0.9, 0.99),
            "eps": 1e-8,
            "weight_decay": 0.1,
            "amsgrad": amsgrad,
            "maximize": True,
        }
        number, constants = RULE.constants(group, RULE.sections, 2.0, 0.5)
        assert number == RULES["amsgrad" if amsgrad else "adamw"]
        assert len(constants) == HYPER["c"].shape[0]
        assert constants[bindings.GRAD_SCALE] == -0.5


# ---- the engine -----------------------------------------------------------------------------


def pass_through(engine, tiles):
    """A step without gradients: it reads and verifies all tiles and writes them unchanged."""
    engine.begin(np.zeros(engine.tiles.n_params, PARAM), np.zeros(0, HYPER), tiles)
    for tile in tiles.tolist():
        engine.native.push(tile)
    engine.finish()
    engine.committer.commit()


def described(extent, **more):
    """A manifest of 1-D parameters."""
    entries = [
        {"name": f"0.{i}", "group": 0, "position": i, "shape": [n], "dtype": "float32", "stride": [1], "extent": 0}
        | {"start": start, "numel": n}
        for i, (n, start) in enumerate(zip(extent.numels, extent.starts, strict=True))
    ]
    return {"params": entries, "waiting": [], **more}


@pytest.mark.parametrize("sections", [("master",), ("master", "momentum_buffer")])
@pytest.mark.at_hand("writes to windows")
def test_one_and_two_sections_through_engine_store_and_tools(sections, tmp_path):
    devices = [f"{tmp_path}/csd{d}" for d in range(2)]
    values = [torch.linspace(k, k + 1, 5000) for k, _ in enumerate(sections)]
    with closing(open_engine(parse_devices(devices), tile_elems=1024)) as engine:
        extent = engine.extend([5000], sections)
        engine.committer.describe(described(extent, rule="descent"))
        windows = [engine.windows.window(extent, 0, k, torch.float32) for k in range(len(sections))]
        with engine.writing([0]):
            for window, value in zip(windows, values, strict=True):
                window.copy_(value)
        tiles = np.arange(len(engine.tiles), dtype=np.uint32)
        for _ in range(3):
            pass_through(engine, tiles)
        engine.states.remap()
        windows[-1][1024:2048] = values[-1][1024:2048] = 7.0  # windows are closed: the next step starts from it
        torch.autograd.graph.increment_version(windows[-1])
        pass_through(engine, tiles)
        engine.wait()
    for device in devices:
        contents = read_contents(Path(device))
        assert (contents.manifest["rule"], contents.superblock.version) == ("descent", 4)
        assert contents.manifest["features"] == ["chunk_sums", "rule", "tile_numbers"]
        assert [e["sections"] for e in contents.manifest["extents"]] == [[*sections]]
        assert contents.sums[0].shape[2] == len(sections)
    assert not any(verdict.damage for verdict in verify(devices))

    with closing(open_engine(parse_devices(devices), mode="resume")) as engine:
        engine.committer.check_recovered()
        pass_through(engine, np.arange(len(engine.tiles), dtype=np.uint32))
        assert engine.states.step == 5
        engine.states.remap()
        for k, value in enumerate(values):
            assert torch.equal(engine.windows.window(engine.tiles.extents[0], 0, k, torch.float32), value)


@pytest.mark.parametrize("device", ["ram:", "file:"])
@pytest.mark.at_hand("writes to windows")
def test_a_step_by_a_rule_that_there_is_not_or_not_for_these_sections_touches_nothing(device):
    p, g = torch.ones(5000), torch.ones(5000)
    with closing(open_engine(parse_devices(device), tile_elems=1024)) as engine:
        for sections in (("master",), RULE.sections[:3], RULE.sections):
            engine.extend([5000], sections)
        tiles, table = np.arange(len(engine.tiles), dtype=np.uint32), np.zeros(engine.tiles.n_params, PARAM)
        constants = (1, 0.9, 0.1, 0.999, 0.001, 0.1, 1, 1e-8, 1)
        for rule, param, message in (
            (99, 1, "no update rule 99"),
            (RULES["adamw"], 0, "parameter 0 has 1 sections, which update rule 0 does not take"),
            (RULES["amsgrad"], 1, "parameter 1 has 3 sections, which update rule 1 does not take"),
        ):
            table[:] = np.zeros((), PARAM)
            table["grad"][param], table["param"][param] = g.data_ptr(), p.data_ptr()
            with pytest.raises(CSDValueError, match=message):
                engine.begin(table, np.array([(rule, constants)], HYPER), tiles)
            pass_through(engine, tiles)  # the failed begin() has left no step in flight
        for row, extent in enumerate(engine.tiles.extents):
            for k in range(len(extent.sections)):
                assert not engine.windows.window(extent, 0, k, torch.float32).any(), row
        assert (p == 1).all()
        with pytest.raises(CSDValueError, match="no update rule 0 for 2 sections"):
            bindings.update(np.array([(0, constants)], HYPER), "scalar", g, (p, p.clone()), None)


# ---- an optimizer with a rule of its own ------------------------------------------------------


@pytest.fixture
def twins(tmp_path):
    """A store of TWIN after three steps, its parameters and states."""
    ps = params()
    with CSDTwin(groups(ps), devices=f"{tmp_path}/csd", tile_size=1024) as opt:
        train(opt, 3)
        return tmp_path / "csd", [p.detach().clone() for p in ps], states(opt, ps)


def test_states_are_called_as_the_rule_calls_them(twins):
    """Only the names differ; the states are AdamW's to the last bit."""
    _, values, found = twins
    assert [[*entry] for entry in found] == [["step", "first", "second", *more, "master"] for more in ([], ["largest"])]
    ps = params()
    with CSDAdam(groups(ps), devices="file:", tile_size=1024) as opt:
        train(opt, 3)
        same(found, states(opt, ps), dict(zip(TWIN.sections, RULE.sections, strict=True)))
    assert all(torch.equal(p, value) for p, value in zip(ps, values, strict=True))


def test_a_store_is_resumed_by_its_own_rule_only(twins, tmp_path):
    store, values, found = twins
    before = store.joinpath(store_format.FILE_NAME).read_bytes()
    with pytest.raises(CSDStoreError, match="cannot be resumed: its states are those of the rule twin, and this optim"):
        CSDAdam(groups(params()), devices=store, resume=True)
    ours = tmp_path / "adamw"
    ps = params()
    with CSDAdam(groups(ps), devices=ours) as opt:
        train(opt, 1)
    with pytest.raises(CSDStoreError, match="the rule adamw, and this optimizer's is twin"):
        CSDTwin(groups(params()), devices=ours, resume=True)
    assert "rule" not in read_contents(ours).manifest
    assert store.joinpath(store_format.FILE_NAME).read_bytes() == before
    ps = params()
    with CSDTwin(groups(ps), devices=store, resume=True) as opt:
        assert all(torch.equal(p, value) for p, value in zip(ps, values, strict=True))
        same(states(opt, ps), found)
        train(opt, 1)


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    """For each optimizer: the pair of classes, a store after two steps, its parameters and states."""
    made = {}
    for of in (ADAMW, *FULL):
        store, ps = tmp_path_factory.mktemp(of.name), params()
        with of.ours(ps, devices=store, tile_size=1024, **of.kwargs) as opt:
            train(opt, 2)
            made[of.name] = of, store, [p.detach().clone() for p in ps], states(opt, ps)
    return made


@pytest.mark.parametrize("name", [of.name for of in PAIRS])
def test_stores_of_each_optimizer(name, stores, tmp_path):
    """All other optimizers refuse the store and name its rule; export, import and load give the same states."""
    of, store, values, found = stores[name]
    before = store.joinpath(store_format.FILE_NAME).read_bytes()
    for other, *_ in stores.values():
        if other is not of:
            with pytest.raises(CSDStoreError, match=f"those of the rule {of.rule.name}, and .* is {other.rule.name}"):
                other.ours(params(), devices=store, resume=True, **other.kwargs)
    assert store.joinpath(store_format.FILE_NAME).read_bytes() == before
    assert not any(verdict.damage for verdict in verify([store]))
    loaded = load(store)
    same([loaded["state"][i] for i in range(2)], found)
    del loaded
    export_safetensors([store], tmp_path / "export")
    import_store(tmp_path / "export", [tmp_path / "made"])
    ps = params()
    with of.ours(ps, devices=tmp_path / "made", resume=True, **of.kwargs) as opt:
        assert all(torch.equal(p, value) for p, value in zip(ps, values, strict=True))
        same(states(opt, ps), found)
        assert repr(opt.param_groups[0]["lr"]) == repr(opt.defaults["lr"])
        train(opt, 1)
    if not of.has_codes:
        with pytest.raises(CSDValueError, match=rf"stay fp32: those of {of.rule.name} are .*no codes of 8 bits"):
            import_store(store, [tmp_path / "8bit"], state_dtype="8bit")
        assert not (tmp_path / "8bit" / store_format.FILE_NAME).exists()


def test_a_store_whose_hyperparameters_are_no_numbers(stores):
    of, store, *_ = stores["CSDSGD"]
    contents = read_contents(store)
    for value in (None, "0.9", [], {}):
        groups = [{**contents.record.groups[0], "momentum": value}]
        found = replace(contents, record=replace(contents.record, groups=groups))
        assert (
            rule_difference(found, [{}], lambda _: of.rule) == "a group of it has no momentum, which the rule sgd needs"
        )


def test_a_reader_that_knows_no_rules_refuses_the_store_by_name(twins, monkeypatch):
    monkeypatch.setattr(store_format, "FEATURES", store_format.FEATURES - {"rule"})
    with pytest.raises(CSDStoreError, match="it has rule, which this csd_optim does not know: upgrade it"):
        read_contents(twins[0])


def forged(store, change):
    """Replaces the store's manifest and makes all checksums match it."""
    file = store / store_format.FILE_NAME
    data = bytearray(file.read_bytes())
    for copy in range(2):
        block = store_format.Superblock.unpack(bytes(data[copy * 4096 :][:4096]), "")
        region = block.manifest
        manifest = json.loads(bytes(data[region.offset(copy) :][: region.size]))
        change(manifest)
        text = json.dumps(manifest).encode()
        assert len(text) <= region.room
        region = region._replace(size=len(text), crc=bindings.crc32c(text))
        data[region.offset(copy) : region.offset(copy) + len(text)] = text
        data[copy * 4096 : copy * 4096 + 4096] = replace(block, manifest=region).pack()
    file.write_bytes(data)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m.pop("rule"), "it names a rule, but its features lack 'rule'"),
        (lambda m: m["features"].remove("rule"), "it names a rule, but its features lack 'rule'"),
        (lambda m: m.update(rule=["twin"]), "the rule"),
        (lambda m: m.update(rule="no name"), "the rule"),
        (lambda m: m["extents"][0].update(sections=["first", "master", "second"]), "the sections"),
        (lambda m: m["extents"][0].update(sections=["master", "first", "first"]), "the sections"),
        (lambda m: m["extents"][0].update(sections=["master", "first", "step"]), "the sections"),
        (lambda m: m["extents"][0].update(sections=["master", "second", "first"]), "are not those of the rule twin"),
    ],
)
def test_a_manifest_whose_rule_and_sections_cannot_be(change, message, twins):
    forged(twins[0], change)
    with pytest.raises(CSDStoreError, match=message):
        CSDTwin(groups(params()), devices=twins[0], resume=True)


@pytest.fixture(scope="module")
def mixed(tmp_path_factory):
    """A store of two parameters of AdamW and one of Lion, in two extents."""
    store = tmp_path_factory.mktemp("mixed")
    ps = [*params(), torch.nn.Parameter(torch.zeros(5))]
    with CSDAdam([{"params": ps[:2]}, {"params": ps[2:], "rule": "lion"}], devices=store) as opt:
        train(opt, 1)
    return store


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m["features"].remove("rules"), r"a tile has the sections \['master', 'exp_avg'\]"),
        (lambda m: m["params"][2].pop("rule"), "parameters have rules, but not as a feature, or the reverse"),
        (lambda m: m["params"][2].update(rule=["lion"]), "rule of parameter 1.0"),
        (lambda m: m["params"][2].update(rule="no name"), "rule of parameter 1.0"),
        (lambda m: m["params"][2].update(rule="adamw"), r"extent 1 has the sections \['master', 'exp_avg'\]"),
        (lambda m: m["params"][1].update(rule="lion"), "0.1 has another rule than others of its extent"),
        (lambda m: m["extents"][0].update(sections=["master", "exp_avg"]), "extent 0 has the sections"),
        (
            lambda m: m["params"][2].update(rule="sgd"),
            r"parameter 1\.0 are those of the rule sgd, and that of its group",
        ),
        (lambda m: m["extents"][1].update(sections=["master", "sum"]), "which are not those of the rule lion"),
    ],
)
def test_a_manifest_whose_rules_of_parameters_cannot_be(change, message, mixed, tmp_path):
    store = tmp_path / "store"
    shutil.copytree(mixed, store)
    forged(store, change)
    ps = [*params(), torch.nn.Parameter(torch.zeros(5))]
    with pytest.raises(CSDStoreError, match=message):
        CSDAdam([{"params": ps[:2]}, {"params": ps[2:], "rule": "lion"}], devices=store, resume=True)


def test_inspect_shows_the_rules(mixed, run):
    said = json.loads(run("inspect", mixed, "--json")[1])
    assert said["rules"] == {"adamw": 3017, "lion": 5}
    assert [p["rule"] for p in said["params"]] == ["adamw", "adamw", "lion"]
    assert "updated by adamw (3.02 k), lion (5)" in " ".join(run("inspect", mixed)[1].split())


@pytest.mark.parametrize("export", [export_torch, export_safetensors])
def test_an_export_keeps_rule_and_states(export, twins, tmp_path):
    store, _, found = twins
    export([store], tmp_path / "export")
    made = tmp_path / "made"
    import_store(tmp_path / "export", [made])
    assert read_contents(made).manifest["rule"] == "twin"
    ps = params()
    with CSDTwin(groups(ps), devices=made, resume=True) as opt:
        same(states(opt, ps), found)
    loaded = load(made)
    assert (loaded["csd_optim"]["rule"], loaded["csd_optim"]["format"]) == ("twin", 3)
    same([loaded["state"][i] for i in range(2)], found)

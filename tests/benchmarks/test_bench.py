"""The benchmarks at tiny size: they run, verify, and report all promised values. Speed is not tested."""

import json
import statistics
from pathlib import Path

import pytest
from support.cards import emulated_python, needs_xrt
from support.forked import module, python, running

from bench import muon, paced_network

ROOT = Path(__file__).parents[2]


def run(name, *arguments):
    done = module(name, *arguments, seconds=300)
    assert done.returncode == 0, done.stderr
    return done


@pytest.fixture(autouse=True)
def in_the_root(monkeypatch):
    monkeypatch.chdir(ROOT)


def test_step(tmp_path):
    png = tmp_path / "step.png"
    rules = ["--optimizer", "sgd", "rmsprop-all", "lion"]
    done = run("bench.step", "--quick", "--runs=5", f"--directory={tmp_path}", "--json", f"--plot={png}", *rules)
    result = json.loads(done.stdout)
    assert result["schema"] == "csd_optim.bench.step/1"
    assert {"cpu", "cores", "isa", "storage", "date"} <= set(result["machine"])
    file, coded, plain, coded_ram, plain_ram, commit, buffers, half, fp16, fp32, null, *others = result["rows"]
    assert len(file["seconds"]) == len(commit["seconds"]) == len(fp16["seconds"]) == len(fp32["seconds"]) == 5
    assert len(null["seconds"]) == 50
    assert file["bytes_per_param"]["push"] == file["bytes_per_param"]["pull"] == 2
    assert file["bytes_per_param"]["flash_read"] == pytest.approx(12, rel=0.05)  # tiles are whole pages
    assert len(file["ratio_to"]["the same requests without the update"]) == 5
    for row, read, written in ((coded, 3.016, 5.016), (plain, 12, 12)):
        assert len(row["seconds"]) == len(row["ratio_to"]["the same requests without the update"]) == 5
        assert row["bytes_per_param"]["flash_read"] == pytest.approx(read, rel=0.05)
        assert row["bytes_per_param"]["flash_write"] == pytest.approx(written, rel=0.05)
    for row in (coded, coded_ram):
        assert len(row["ratio_to"]["the same with fp32 states"]) == 5
    assert plain_ram["state_bytes_per_param"] == pytest.approx(12, abs=0.5)  # the kernel counts more than states
    assert coded_ram["state_bytes_per_param"] < 5.5
    for cached in (buffers, half):
        assert len(cached["ratio_to"]["the same with cache=off"]) == 5
        assert cached["share_of_bytes"] == 0.5  # the buffers hold all of so small a model
    assert len(commit["ratio_to"]["the same without commits"]) == 5
    names = [f"{name}, fp16, {place}" for name in rules[1:] for place in ("1 file(s)", "in memory")]
    assert [row["what"] for row in others] == names
    for row, written in zip(others, (4, 0, 16, 0, 8, 0), strict=True):
        assert row["bytes_per_param"]["flash_write"] == pytest.approx(written, rel=0.05)
        limit, beside = row["ratio_to"]
        assert limit in ("the same requests without the update", "memory read and written back in place")
        assert ("fused" if row["what"].startswith("sgd") else "foreach") in beside
        assert [len(ratios) for ratios in row["ratio_to"].values()] == [5, 5] == [len(row["seconds"])] * 2
    assert all(f"verified {name} on" in done.stderr for name in rules[1:])
    assert png.read_bytes().startswith(b"\x89PNG")
    assert "verified fp16" in done.stderr
    assert "against those in memory: the same bits" in done.stderr
    assert "Mparam/s" in done.stderr
    assert list(tmp_path.iterdir()) == [png]


def test_step_beside_a_peer(tmp_path):
    """The report about a peer that takes two seconds for twice as many parameters."""
    program = """
import argparse, json, pathlib, sys
from bench import step
from csd_optim.devices.spec import parse_devices

def peer(name, params, *_, **__):
    return {"name": name, "params": 2 * params, "seconds": [1.0, 4.0, 2.0, 2.0, 2.0], "versions": {}}

step.peers.run = peer
arguments = argparse.Namespace(params=10_000, runs=5, rounds=2, directory=pathlib.Path(sys.argv[1]))
row = step.peer_row("tensornvme", arguments, parse_devices("ram:"), "bf16", step.OURS)
print(json.dumps([row, step.describe(row)]))
"""
    done = python(program, tmp_path, seconds=300)
    assert done.returncode == 0, done.stderr
    row, text = json.loads(done.stdout)
    for our, kind in (("our", "fp32"), ("our_8bit", "8bit")):
        assert len(row[f"{our}_seconds"]) == 10
        expected = [1 / statistics.median(row[f"{our}_seconds"][i : i + 5]) for i in (0, 5)]
        assert row[f"{our}_speed_over_it"] == pytest.approx(expected)
        assert f"CSDAdam beside it, with {kind} states, is" in text


def test_ceiling(tmp_path):
    png = tmp_path / "ceiling.png"
    done = run("bench.ceiling", "--quick", "--runs=5", f"--directory={tmp_path}", "--json", f"--plot={png}")
    result = json.loads(done.stdout)
    assert result["schema"] == "csd_optim.bench.ceiling/1"
    assert {"cpu", "cores", "isa", "storage", "date"} <= set(result["machine"])
    (row,) = result["rows"]
    assert row["bytes"] == 24 * row["params"]
    assert all(len(row[part]["seconds"]) == 5 for part in ("engine", "verify", "wake-ups"))
    assert len(row["memory"]["bytes_per_s"]) == len(row["engine"]["ratio_to_memory"]) == 5
    assert all(len(rates) == 5 and min(rates) > 0 for rates in result["chunk"].values())
    assert [row["isa"] for row in result["codec"]] == result["machine"]["isas"]
    assert all(len(row["ratio"]) == 5 and min(row["8bit_per_cpu_s"]) > 0 for row in result["codec"])
    assert len(result["disk"]["step"]["seconds"]) == len(result["disk"]["requests"]["seconds"]) == 5
    engine, disk = result["per_gb"]
    assert [*engine["parts"]] == ["fetch, verify", "update", "sum", "wake-ups"]
    assert [*disk["parts"]] == [*engine["parts"], "I/O calls"]
    for entry in (engine, disk):
        assert entry["together"] == pytest.approx(sum(entry["parts"].values()))
        assert entry["ratio"] == pytest.approx(entry["together"] / statistics.median(entry["measured"]))
    drives = {r["what"]: r for r in result["reckoned"]}
    assert drives["4 drives"]["params_per_s"] == pytest.approx(52e9 / 24)
    assert drives["4 drives"]["cores"] == pytest.approx(52 * (engine["together"] + disk["parts"]["I/O calls"]))
    assert drives["16 cores"]["cores"] == pytest.approx(16)
    assert "verified bf16" in done.stderr
    assert "the same bits as CSDAdam's" in done.stderr
    assert "the same bits of 8-bit states" in done.stderr
    assert "calculated, not measured" in done.stderr
    assert png.read_bytes().startswith(b"\x89PNG")
    assert list(tmp_path.iterdir()) == [png]


def test_zeros():
    done = run("bench.studies.zeros", "--rows=256", "--at=20", "--runs=5", "--json")
    result = json.loads(done.stdout)
    assert result["schema"] == "csd_optim.bench.zeros/1"
    assert [row["what"] for row in result["rows"]] == ["CSDAdam", "torch", "torch, set_flush_denormal"]
    assert all(len(row["ratio_to"]["its dense rate"]) == 5 for row in result["rows"])
    assert result["rows"][0]["subnormal"] == 0
    assert "largest relative difference" in done.stderr


def test_muon(tmp_path):
    """bench/muon.py, which compares with torch.optim.Muon before it reports anything."""
    done = run("bench.muon", "--quick", "--runs=5", f"--directory={tmp_path}", "--json")
    result = json.loads(done.stdout)
    assert result["schema"] == "csd_optim.bench.muon/1"
    assert result["verified"]["momentum"] <= 1e-6
    assert 0 < result["verified"]["parameters"] <= 0.005
    assert result["params"] == 2 * 12 * 128**2
    rows = {row["what"]: row for row in result["rows"]}
    assert [*rows] == [*muon.MEASURED]
    assert all(len(row["seconds"]) == 5 for row in rows.values())
    assert all(len(values) == 5 for values in result["ratios"].values())
    for name, half in (("CSDMuon", 8), ("CSDMuon without iterations", 8), ("CSDAdam", 12)):
        moved = rows[name]["bytes_per_param"]
        assert moved["flash_read"] == moved["flash_write"] == half
        assert moved["push"] == moved["pull"] == (2 if name == "CSDAdam" else 4)
    assert rows["Newton-Schulz"]["dtype"] == "bf16"
    assert len(rows["Newton-Schulz"]["flops_per_second"]) == 5
    assert "verified against torch.optim.Muon" in done.stderr
    assert not list(tmp_path.iterdir())


def test_muon_reports_nothing_that_is_not_torchs(monkeypatch):
    monkeypatch.setattr(muon, "MOMENTUM_OFF", 1e-9)
    with pytest.raises(SystemExit, match="nothing is timed"):
        muon.verify()


def test_overlap(tmp_path):
    """bench/overlap.py, whose modes must end with the same parameters, or nothing is reported."""
    done = run("bench.overlap", "--quick", "--params=2e5", "--runs=5", f"--directory={tmp_path}", "--json")
    result = json.loads(done.stdout)
    assert result["schema"] == "csd_optim.bench.overlap/1"
    rows = {(row["what"], row["mode"]): row for row in result["rows"]}
    assert all(len(row["seconds"]) == 5 for row in rows.values())
    assert rows["clipped in each step", "backward"]["overlap"]["redone"]["gradients"] > 0
    assert rows["f + b = 1.00 of s", "none"]["overlap"] is None
    assert "what could be reached" not in rows["a small GPT", "backward"]["ratio_to"]
    assert list(tmp_path.iterdir()) == []


def test_overlap_on_ranks(tmp_path):
    done = run("bench.overlap", "--ranks=2", "--quick", "--params=1e5", f"--directory={tmp_path}", "--json")
    rows = json.loads(done.stdout)["rows"]
    assert [row["mode"] for row in rows] == ["none", "forward", "backward", "free_gradients"]
    for row in rows:
        assert len(row["seconds"]) == len(row["step_seconds"]) == 5
        assert row["reachable_seconds"] > 0
    assert list(tmp_path.iterdir()) == []


def test_placement(tmp_path):
    """bench/placement.py, whose ways must end with the same states, or nothing is reported."""
    done = run("bench.placement", "--quick", "--runs=5", f"--directory={tmp_path}", "--json")
    result = json.loads(done.stdout)
    assert result["schema"] == "csd_optim.bench.placement/1"
    rows = {row["what"]: row for row in result["rows"]}
    assert all(len(row["seconds"]) == len(row["times_as_fast"]) == 5 for row in rows.values())
    assert rows["half in ram"]["shares"] == pytest.approx([0.5, 0.5], abs=0.02)
    placed = rows["auto, 2/3 fit"]
    assert 0 < placed["shares"][0] <= 2 / 3
    assert placed["predicted"] >= 24 * 4e5 / 3 / 300e6  # what does not fit is on the drive
    assert len(rows["auto, cache"]["shares"]) == 1
    assert "goal, half in ram: 1.9 times" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_memory(tmp_path):
    done = run("bench.memory", "--quick", f"--directory={tmp_path}", "--json")
    result = json.loads(done.stdout)
    assert result["schema"] == "csd_optim.bench.memory/1"
    rows = result["rows"]
    assert [(row["mode"], row["limit_bytes"] > 0) for row in rows] == [("none", False), ("free", True)]
    assert len({row["checksum"] for row in rows}) == 1
    assert all(row["peak_bytes"] > row["buffer_bytes"] > 0 for row in rows)
    assert list(tmp_path.iterdir()) == []


def test_top(tmp_path):
    done = run("bench.studies.top", "--quick", f"--directory={tmp_path}", "--json")
    result = json.loads(done.stdout)
    assert result["schema"] == "csd_optim.bench.top/1"
    assert [row["way"] for row in result["rows"]] == ["silent", "told", "watched"]
    assert all(len(row["seconds"]) == len(row["ratio_to_silent"]) == 2 for row in result["rows"])
    assert len(result["tell_seconds"]) == 3
    assert list(tmp_path.iterdir()) == []


def test_imports():
    result = json.loads(run("bench.studies.imports", "--quick", "--json").stdout)
    assert result["schema"] == "csd_optim.bench.imports/1"
    [(torch, ours, package, command)] = zip(*result["cpu_seconds"].values(), strict=True)
    assert 0 < package < torch  # csd_optim by itself does not import torch
    assert ours > 0
    assert command > 0


def test_end_to_end(tmp_path):
    """Trainings of the same model are timed as a whole; a peer that is not installed is reported as such."""
    pytest.importorskip("transformers", reason="pip install csd_optim[bench]")
    trainings = ("deepspeed-nvme", "csdadam-8bit", "csdadam-8bit-overlap")
    done = run("bench.end_to_end", "--quick", f"--directory={tmp_path}", "--json", "--trainings", *trainings)
    result = json.loads(done.stdout)
    assert result["schema"] == "csd_optim.bench.end_to_end/1"
    peer, blocking, overlapped = result["rows"]
    assert "deepspeed" in peer["skipped"] or len(peer["seconds"]) == 5
    for row in (blocking, overlapped):
        assert len(row["losses"]) == 7
        assert len(row["seconds"]) == 5
        assert 4 * row["params"] <= row["bytes_written"] < 7 * row["params"]
    assert max(abs(a - b) for a, b in zip(blocking["losses"], overlapped["losses"], strict=True)) < 0.1
    assert not any(tmp_path.iterdir())


def test_big(tmp_path):
    """CSDAdam trains in a process too small for AdamW, and a killed training resumes with the same parameters."""
    pytest.importorskip("transformers", reason="pip install csd_optim[bench]")
    done = run("bench.big", "--quick", f"--directory={tmp_path}", "--json")
    result = json.loads(done.stdout)
    assert result["schema"] == "csd_optim.bench.big/1"
    adamw, whole, killed, resumed = (result["runs"][name] for name in ("AdamW", "CSDAdam", "killed", "resumed"))
    assert "memory" in adamw["ending"]
    assert killed["checksum"] == resumed["checksum"] > 0
    assert killed["losses"].keys() | resumed["losses"].keys() == whole["losses"].keys()
    assert len(killed["losses"]) < len(whole["losses"]) == 3
    assert whole["stats"]["params"] == result["params"]
    assert all(m["resident"] > m["states"] > 0 for m in whole["memory"])
    assert {p.name for p in tmp_path.iterdir()} == {"memory.png", "big.json"}


@pytest.mark.parametrize("missing", ["", "cgroup.controllers", "memory"])
def test_limit(tmp_path, monkeypatch, missing):
    """Memory is limited by a cgroup beside our own if possible, else by RLIMIT_DATA, which lets allocations fail."""
    groups = tmp_path / "cgroup"
    (groups / "user" / "shell").mkdir(parents=True)
    (groups / "user" / "cgroup.subtree_control").write_text("cpu" if missing == "memory" else "cpu memory")
    if missing != "cgroup.controllers":
        (groups / "cgroup.controllers").touch()
    (tmp_path / "own").write_text("1:name=systemd:/x\n0::/user/shell\n")
    done = python(
        "import sys, pathlib, mmap\n"
        "from bench import limit\n"
        "limit.CGROUPS, limit.OWN = (pathlib.Path(sys.argv[1], name) for name in ('cgroup', 'own'))\n"
        "how, group = limit.limit_memory(1 << 30)\n"
        "print(how)\n"
        "mmap.mmap(-1, 1 << 30, mmap.MAP_PRIVATE)\n",
        tmp_path,
    )
    (group,) = [*groups.glob("user/csd-optim-*")] or [None]
    if missing:
        assert group is None
        assert done.stdout.startswith("RLIMIT_DATA; no cgroup v2, as ")
        assert "Cannot allocate memory" in done.stderr
    else:
        assert done.stdout == "a cgroup v2 without swap\n"
        assert (group / "memory.max").read_text() == str(1 << 30)
        assert group.name == f"csd-optim-{(group / 'cgroup.procs').read_text()}"


def test_topk(tmp_path):
    png = tmp_path / "topk.png"
    done = run("bench.topk", "--quick", "--runs=5", f"--directory={tmp_path}", "--json", f"--plot={png}")
    result = json.loads(done.stdout)
    assert result["schema"] == "csd_optim.bench.topk/1"
    parts = {part: [r for r in result["rows"] if r["part"] == part] for part in ("link", "selection", "step")}
    pushed = {(r["dtype"], r["topk"]): r["bytes_per_param"]["push"] for r in parts["link"]}
    assert (pushed["fp16", None], pushed["fp32", None]) == (2, 4)
    for dtype in ("fp16", "fp32"):
        for share in (0.1, 0.05, 0.02, 0.01):
            assert 4 * share <= pushed[dtype, share] <= 4 * share + 0.002
    assert len(parts["selection"]) >= 6
    assert len(parts["step"]) == 6
    assert all(len(v) == 5 for r in parts["step"] for v in (r["seconds"], r["dense_seconds"], *r["ratio_to"].values()))
    assert png.read_bytes().startswith(b"\x89PNG")
    assert "verified: the engine" in done.stderr
    assert list(tmp_path.iterdir()) == [png]


def test_scaling(tmp_path):
    png = tmp_path / "scaling.png"
    done = run("bench.scaling", "--quick", f"--directory={tmp_path}", "--json", f"--plot={png}")
    result = json.loads(done.stdout)
    assert result["schema"] == "csd_optim.bench.scaling/1"
    rows = {(r["variant"], r["devices"]): r for r in result["rows"]}
    # Lower bounds by the testbed's rates: ns per parameter and device, and ns per parameter for what all devices share.
    least = {
        "base": (16 / 3.0 + 12 / 2.4, 4.77 + 4 / 1.4),
        "su_o": (16 / 2.98 + 12 / 1.75 + 1 / 0.552 + 4 / 8, 4.77),
        "su_o_c": (12 / 2.98 + 12 / 1.75 + 1 / 0.260 + 4 / 8, 4.77),
        "csdadam": (12 / 1.75, 4.77),
        "csdadam_topk": (12 / 1.75, 4.77),
        "csdadam_8bit": (5.016 / 1.75, 4.77),
        "csdadam_8bit_topk": (5.016 / 1.75, 4.77),
        "csdadam_8bit_overlap": (0, 4.77),
    }
    assert set(rows) == {(variant, n) for variant in least for n in (1, 2)}
    for (variant, devices), row in rows.items():
        each, once = least[variant]
        assert row["seconds"] >= each * 4.0 / devices + once
        assert len(row["runs"]) == 5
        assert row["speedup"] == rows["base", 1]["seconds"] / row["seconds"]
        assert ("published" in row) == (not variant.startswith("csdadam"))
    assert (rows["su_o", 2]["published"], rows["su_o_c", 1]["published"]) == (1.48, 0.89)
    assert bool(result["claims"]) != bool(result["why_not"])
    assert ("nothing is claimed" in done.stderr) == bool(result["why_not"])
    assert done.stderr.count("gives the same bits") == len(rows)
    assert "verified 8-bit states" in done.stderr
    assert png.read_bytes().startswith(b"\x89PNG")
    assert list(tmp_path.iterdir()) == [png]


def test_per_csd(tmp_path):
    png = tmp_path / "per-csd.png"
    paced = f"file:{tmp_path}?update=5M/s&link=1GB/s&read=500MB/s"
    done = run("bench.per_csd", str(tmp_path), "ram:", paced, "null:", "--quick", "--json", f"--plot={png}")
    result = json.loads(done.stdout)
    assert result["schema"] == "csd_optim.bench.per_csd/1"
    assert [r["device"] for r in result["rows"]] == [str(tmp_path), "ram:", paced, "null:"]
    file, ram, paced, null = result["rows"]
    assert set(file["parts"]) == {"read", "write", "mixed", "updater"}
    assert set(ram["parts"]) == {"updater", "memory"}
    assert set(paced["parts"]) == {*file["parts"], "link to device", "link from device"}
    assert null["parts"] == {}
    assert null["params_per_second"]["min"] > 0
    shapes = {(s["kind"], s["block_bytes"], s["depth"]) for s in file["sweep"]}
    assert len(shapes) == len(file["sweep"]) >= 3 * 2 * 2
    assert {kind for kind, _, _ in shapes} == {"read", "write", "mixed"}
    assert paced["slowest"] == "updater"
    assert paced["parts"]["updater"]["params_per_second"] == 5e6
    assert 0 < paced["ratio_to_slowest"]["max"] <= 1
    assert "emulated" not in done.stderr
    assert "verified, off AdamW's by" in done.stderr
    assert png.read_bytes().startswith(b"\x89PNG")
    assert list(tmp_path.iterdir()) == [png]


def test_distributed(tmp_path):
    done = run("bench.distributed", "--quick", "--dtype=bf16", f"--directory={tmp_path}", "--json")
    result = json.loads(done.stdout)
    assert result["schema"] == "csd_optim.bench.distributed/1"
    assert {"cpu", "cores", "isa", "storage", "date", "back_end"} <= set(result["machine"])
    ways = ("DDP replicated", "DDP sharded", "FSDP2")
    rows = {(r["processes"], r["what"], r.get("device")): r for r in result["rows"]}
    ours = {(n, f"CSDAdam, {way}", device) for n in (1, 2) for way in ways for device in (str(tmp_path), "ram:")}
    assert set(rows) == ours | {(n, f"AdamW, {way}", None) for n in (1, 2) for way in ("DDP replicated", "FSDP2")}
    for row in rows.values():
        assert len(row["seconds"]) == len(row["zero_seconds"]) == len(row["speed_over_zero"]) == 5
        assert len(row["zero_bytes_of_ranks"]) == row["processes"]
    for processes, what, device in ours:
        row = rows[processes, what, device]
        share = 1 if what == "CSDAdam, DDP replicated" else 1 / processes
        for counted in row["bytes_of_ranks"]:
            each = {name: count / row["params"] for name, count in counted.items()}
            assert each["push"] == each["pull"] == pytest.approx(2 * share, rel=0.02)
            assert each["flash_read"] == pytest.approx(12 * share if device != "ram:" else 0, rel=0.1)
            gathered = 2 * (1 - share) if what == "CSDAdam, DDP sharded" else 0
            assert each["gathered"] == pytest.approx(gathered, rel=0.02)
    assert done.stderr.count("verified: off AdamW's by") == len(ours)
    plain, hooked = result["backward"]
    assert (plain["processes"], plain["hooked"], hooked["hooked"]) == (2, False, True)
    assert plain["bytes_per_parameter_and_rank"] >= 2  # at least: other programs use the loopback device, too
    assert hooked["bytes_per_parameter_and_rank"] >= 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("paced", [True, pytest.param(False, marks=pytest.mark.soak)], ids=["paced", "loopback"])
def test_optimizer_ranks(tmp_path, paced):
    """All ways must end with the same parameters, or nothing is reported. On loopback if no network can be made."""
    paced = paced and not paced_network.missing()
    more = [] if paced else ["--unpaced"]
    done = run("bench.optimizer_ranks", "--quick", "--owners", "1", "2", f"--directory={tmp_path}", "--json", *more)
    result = json.loads(done.stdout)
    assert result["schema"] == "csd_optim.bench.optimizer_ranks/3"
    assert result["machine"]["network"].startswith("network namespaces" if paced else "loopback only")
    assert done.stderr.count("have the same parameters on all trainers") == 4 * (4 if paced else 2)
    ways = [(row["trainers"], row["owners"], row["way"]) for row in result["rows"]]
    on_loopback = [(n, m, way) for n in (1, 2) for m in (1, 2) for way in ("local", "plain", "encrypted")]
    assert ways == on_loopback + paced * [row for row in on_loopback if row[2] != "plain"]
    for row in result["rows"]:
        assert all(len(row[name]) == 5 for name in ("seconds", "durable_seconds", "trainer_cpu_seconds"))
        gathered = 2 * row["params"] if row["trainers"] > 1 else 0
        assert row["bytes"] == {
            "push_bytes": 2 * row["params"],
            "pull_bytes": 2 * row["params"],
            "gathered_bytes": gathered,
        }
        if row["way"] != "local":
            assert row["owner_memory_bytes"] > 0
            assert row["cpu_seconds_per_gb_with_update"] > 0
        if "owner_link_bytes" in row:
            each = 2 * row["params"] / row["owners"]
            assert [*row["owner_link_bytes"].values()] == pytest.approx([each] * 2, rel=0.1)
            assert len(row["ratio_to_limit"]) == 5
    assert list(tmp_path.iterdir()) == []


@needs_xrt
def test_per_csd_of_an_emulated_card(tmp_path):
    """It works as on a real card, and says that its times mean nothing."""
    done = emulated_python(running("bench.per_csd"), "xrt:0", "--params=10000", "--json", "--quick")
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(done.stdout)["rows"]
    assert "its times mean nothing" in done.stderr
    assert row["emulated"]
    assert "mean nothing" in row["note"]
    assert set(row["parts"]) == {"P2P to card", "P2P from card", "DMA to card", "DMA from card", "kernel"}
    assert all(part["params_per_second"] > 0 for part in row["parts"].values())
    assert row["sweep"]
    assert row["ratio_to_slowest"]["median"] > 0


def test_tables(tmp_path):
    """The table in docs/performance.md is the one that the optimizer's counts give."""
    page = ROOT / "docs/performance.md"
    copy = tmp_path / page.name
    copy.write_text(page.read_text())
    assert run("bench.tables", copy).stdout.endswith("as it was\n")
    assert copy.read_text() == page.read_text()


def test_peers(tmp_path):
    for name in ("torch-fp16", "torch-fp32", "nvme-stream-fp32", "nvme-stream-bf16"):
        done = run("bench.peers", name, "--params=100000", f"--directory={tmp_path}", "--json")
        result = json.loads(done.stdout)
        assert (result["name"], result["params"], len(result["seconds"])) == (name, 100000, 5)


def test_peer_that_is_not_installed_says_so(tmp_path):
    done = run("bench.peers", "tensornvme", "--params=100000", f"--directory={tmp_path}")
    assert "skipped" in done.stdout or "Mparam/s" in done.stdout

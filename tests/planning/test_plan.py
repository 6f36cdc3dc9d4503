"""`csd-optim plan`: the model compared with published times and with the engine, and the command's output."""

import json
import math
import time
from pathlib import Path

import pytest
import torch

import csd_optim
from csd_optim import CSDAdam, CSDStoreError, CSDValueError
from csd_optim.cli import benchmark, facts
from csd_optim.cli.optimizers import OPTIMIZERS, described
from csd_optim.engine.placing import engine_rate
from csd_optim.muon import newton_schulz
from csd_optim.planning import advice as plan
from csd_optim.planning import costs, model
from csd_optim.planning.advice import PlanRequest
from csd_optim.planning.model import Host, predict, traffic
from csd_optim.rates import Rates

ENGINE_RATE = engine_rate.engine_rate  # the real one

# ---- published times -----------------------------------------------------------------
#
# Smart-Infinity (HPCA 2024): up to ten SmartSSDs behind an expansion box. Seconds of an iteration, read off the paper's
# vector graphics to about 1 %; billions of parameters, devices.

GIB = 2**30 / 1e9
LINK = 8e9  # bytes per second, measured on the testbed
PLAIN = Rates.in_turn(3.0e9, 3.0e9)  # "per SSD about 3 GB/s"
# Peer to peer, as measured with the models of 4.0 and 8.4 B (the code of its authors counts in GiB).
SMARTSSD = Rates.in_turn(2.78e9 * GIB, 1.63e9 * GIB)
# Forward and backward alone, in seconds per billion parameters, which a user of `plan` knows. Means over the phases
# below: forward as published, backward less the time that gradients take to flash at 6.4 GB/s.
GPU = {"A5000": (0.133, 0.81), "A100": (0.125, 0.54)}

ITERATIONS = [  # GPU, parameters, devices, base, su_o, su_o_c
    ("A5000", 4.0, 6, 23.8, 18.4, 15.6),
    ("A5000", 4.0, 10, 23.7, 14.75, 12.2),
    ("A5000", 8.4, 6, 49.9, 39.5, 35.2),
    ("A5000", 8.4, 10, 48.8, 31.6, 26.3),
    ("A5000", 4.0, 10, 23.5, 14.3, 12.0),  # BERT
    ("A5000", 8.3, 10, 48.2, 30.2, 25.1),  # BERT
    ("A5000", 16.6, 10, 95.9, 60.8, 51.7),
    ("A5000", 24.8, 10, 142.0, 89.3, 76.6),
    ("A5000", 33.0, 6, 190.7, 158.3, 139.5),
    ("A5000", 33.0, 10, 188.8, 119.6, 100.6),
    ("A100", 4.0, 10, 22.5, 12.5, 10.65),
]
SPEEDUPS = [  # GPU, devices, speed-up over BASE with one: base, su_o, su_o_c; without the points listed above
    ("A5000", 1, 1, 0.81, 0.89),
    ("A5000", 2, 1.55, 1.48, 1.62),
    ("A5000", 4, 2.23, 2.55, 2.80),
    ("A5000", 8, 2.26, 3.25, 3.75),
    ("A100", 1, 1, 0.80, 0.75),
    ("A100", 2, 1.54, 1.45, 1.38),
    ("A100", 4, 2.27, 2.58, 2.65),
    ("A100", 6, 2.44, 3.18, 3.34),
    ("A100", 8, 2.42, 3.81, 4.39),
]
ONE_DRIVE = {"A5000": 23.7 * 2.27, "A100": 22.5 * 2.48}  # seconds of BASE, from its speed-up on ten
PHASES = [  # GPU, parameters, devices, variant, forward, backward with writing gradients, update
    ("A5000", 4.0, 6, "base", 0.67, 5.6, 17.6),
    ("A5000", 4.0, 6, "su_o", 0.67, 5.4, 12.3),
    ("A5000", 4.0, 6, "su_o_c", 0.67, 4.1, 10.8),
    ("A5000", 4.0, 10, "base", 0.67, 5.2, 17.8),
    ("A5000", 4.0, 10, "su_o", 0.67, 5.8, 8.3),
    ("A5000", 4.0, 10, "su_o_c", 0.67, 4.2, 7.3),
    ("A5000", 8.4, 6, "base", 1.1, 11.2, 37.6),
    ("A5000", 8.4, 6, "su_o_c", 1.1, 8.2, 25.8),
    ("A5000", 8.4, 10, "base", 1.1, 10.9, 36.8),
    ("A5000", 8.4, 10, "su_o", 1.1, 10.9, 19.5),
    ("A5000", 8.4, 10, "su_o_c", 1.1, 8.2, 17.0),
    ("A5000", 16.6, 10, "base", 2.1, 21.2, 72.6),
    ("A5000", 33.0, 10, "base", 4.4, 42.2, 142.2),
    ("A5000", 33.0, 10, "su_o", 4.4, 43.3, 71.9),
    ("A5000", 33.0, 10, "su_o_c", 4.4, 32.0, 64.2),
    ("A100", 4.0, 10, "base", 0.5, 4.5, 17.5),
    ("A100", 4.0, 10, "su_o", 0.5, 4.2, 7.8),
    ("A100", 4.0, 10, "su_o_c", 0.5, 2.8, 7.4),
]

OTHERS = [  # SGD with momentum, AdaGrad: A5000, 4.0 B parameters, 10 devices
    {"base": 18.85, "su_o": 11.87, "su_o_c": 10.56},
    {"base": 18.87, "su_o": 11.81, "su_o_c": 10.55},
]


def server(**rates):
    """Return a host with DeepSpeedCPUAdam's published rate on a server, so that plans do not depend on this machine."""
    return Host(**({"update": 1.4e9} | rates))


def published(gpu, billions, devices, variant, sections=3):
    """Return the model's prediction for the paper's testbed."""
    device = PLAIN if variant == "base" else plan.replace(SMARTSSD, update=model.published_update(variant, sections))
    forward, backward = (seconds * billions for seconds in GPU[gpu])
    host, times = Host(link=LINK, update=model.ZERO_UPDATE), {"forward": forward, "backward": backward}
    return predict(variant, billions * 1e9, devices, device, host, topk=0.01, sections=sections, **times)


def iterations():
    """Return each published point once: (GPU, billions of parameters, devices, variant, seconds)."""
    rows = [*ITERATIONS]
    rows += [(gpu, 4.0, n, *(ONE_DRIVE[gpu] / s for s in speedups)) for gpu, n, *speedups in SPEEDUPS]
    return [
        (gpu, billions, n, variant, s)
        for gpu, billions, n, *seconds in rows
        for variant, s in zip(("base", "su_o", "su_o_c"), seconds, strict=True)
    ]


def errors(pairs):
    """Return the relative errors of pairs (predicted, published)."""
    return [predicted / real - 1 for predicted, real in pairs]


def mean(values):
    return sum(map(abs, values)) / len(values)


def test_published_iterations(capsys):
    points = iterations()
    assert len(points) == len(set(points)) == 60
    off = errors([(published(*point[:4]).seconds, point[4]) for point in points])
    of = {v: [e for e, point in zip(off, points, strict=True) if point[3] == v] for v in ("base", "su_o", "su_o_c")}
    worst = max(range(len(off)), key=lambda i: abs(off[i]))
    with capsys.disabled():
        each = ", ".join(f"{v} {mean(e):.1%} (worst {max(e, key=abs):+.1%})" for v, e in of.items())
        print(f"\nplan: {len(points)} published iteration times, mean error {mean(off):.1%}: {each}")
        print(f"plan: worst {off[worst]:+.1%} at {points[worst]}")
    assert mean(off) < 0.04
    assert max(map(abs, off)) < 0.15
    assert all(mean(e) < 0.055 for e in of.values())


def test_published_updates(capsys):
    """The update phase depends on the devices only, not on the GPU."""
    off = errors([(published(*point[:4]).step, point[6]) for point in PHASES])
    with capsys.disabled():
        print(f"\nplan: {len(off)} published update phases, mean error {mean(off):.1%}, worst {max(off, key=abs):+.1%}")
    assert mean(off) < 0.055
    assert max(map(abs, off)) < 0.16


def test_published_iterations_of_other_optimizers(capsys):
    """SGD with momentum and AdaGrad have a master and one state. Nothing was fitted to their times."""
    off = errors([(published("A5000", 4.0, 10, v, 2).seconds, s) for seconds in OTHERS for v, s in seconds.items()])
    with capsys.disabled():
        print(f"\nplan: {len(off)} published times of other optimizers, mean error {mean(off):.1%}", end="")
        print(f", worst {max(off, key=abs):+.1%}")
    assert mean(off) < 0.05
    assert max(map(abs, off)) < 0.1


def test_times_of_the_gpu_are_those_of_the_phases():
    for gpu, (forward, backward) in GPU.items():
        rows = [row for row in PHASES if row[0] == gpu]
        alone = []
        for _, billions, n, variant, _, seconds, _ in rows:
            alone.append((seconds - published(gpu, billions, n, variant).gradients) / billions)
        assert sum(alone) / len(alone) == pytest.approx(backward, abs=0.02)
        assert sum(row[4] / row[1] for row in rows) / len(rows) == pytest.approx(forward, rel=0.15)


def test_published_conclusions():
    """One CSD is slower than one plain drive, four are faster; compression gains; RAID0 stops at the link."""
    for n, faster in ((1, False), (2, False), (4, True), (10, True)):
        assert (published("A5000", 4.0, n, "su_o").seconds < published("A5000", 4.0, n, "base").seconds) == faster
    assert published("A5000", 4.0, 10, "su_o_c").seconds < 0.9 * published("A5000", 4.0, 10, "su_o").seconds
    assert published("A5000", 4.0, 6, "base").step == published("A5000", 4.0, 10, "base").step
    assert published("A5000", 4.0, 6, "base").bound == "link"
    assert published("A5000", 4.0, 1, "base").bound == "read"


# ---- times that bench/scaling.py measured --------------------------------------------

SCALING = sorted((Path(__file__).parents[2] / "bench/results").glob("scaling-*.json"))


@pytest.mark.parametrize("result", SCALING, ids=lambda path: path.stem)
def test_measured_iterations(result):
    """The engine on paced devices, in the place of all systems (see bench/scaling.py), takes the predicted times."""
    measured = json.loads(result.read_text())
    facts, off = measured["machine"], {}
    for row in measured["rows"]:
        variant, rates = row["variant"], facts["rates"][row["variant"]]
        if variant.endswith("_overlap"):  # test_overlap_by_hand covers overlap
            continue
        device = Rates.in_turn(rates["read"], rates["write"], rates["update"])
        if variant.startswith("csdadam"):
            device = Rates(rates["read"], rates["write"], facts["mixed"], rates["update"])
        topk = 0.01 if variant == "su_o_c" or variant.endswith("_topk") else None
        predicted = predict(
            variant.replace("_8bit", ""),
            facts["model_params"],
            row["devices"],
            device,
            Host(link=rates["link"], update=rates["update"]),
            topk=topk,
            state_dtype="8bit" if "_8bit" in variant else "fp32",
            forward=0.67,
            backward=4.1,
        )
        off[variant, row["devices"]] = predicted.seconds / row["seconds"] - 1
    ours = [abs(e) for (variant, _), e in off.items() if variant.startswith("csdadam")]
    others = [abs(e) for (variant, _), e in off.items() if not variant.startswith("csdadam")]
    for whose, errors in (("CSDAdam's", ours), ("the others'", others)):
        print(f"\nplan: {result.stem}: mean error {sum(errors) / len(errors):.1%}, worst {max(errors):.1%}, of {whose}")
    assert len(off) >= 30
    assert max(ours) < 0.05
    assert max(others) < 0.15


def test_there_is_something_measured():
    assert SCALING


# ---- our engine ----------------------------------------------------------------------

NUMEL = 1 << 20
# The seconds that each resource would take alone. A step must take as long as the slowest; the sum is at least twice
# as long.
PACED = [
    {"read": 0.24, "write": 0.2, "update": 0.2, "down": 0.1},
    {"read": 0.15, "write": 0.24, "update": 0.2, "down": 0.1},
    {"read": 0.18, "write": 0.18, "update": 0.24, "down": 0.1},
    {"read": 0.15, "write": 0.15, "update": 0.15, "down": 0.24},
]


@pytest.mark.parametrize("devices", [1, 3])
@pytest.mark.parametrize("alone", PACED, ids=["read", "write", "update", "link"])
def test_prediction_is_what_a_paced_engine_takes(alone, devices):
    each = NUMEL / devices
    pace = Rates(
        read=12 * each / alone["read"],
        write=12 * each / alone["write"],
        update=each / alone["update"],
        link=2 * NUMEL / alone["down"],
    )
    device = Rates(pace.read, pace.write, pace.read + pace.write, pace.update)
    predicted = predict("csdadam", NUMEL, devices, device, server(link=pace.link))
    text = f"file:?read={pace.read}B/s&write={pace.write}B/s&update={pace.update}/s&link={pace.link}B/s&cache=off"
    p = torch.nn.Parameter(torch.randn(NUMEL).half())
    p.grad = torch.randn(NUMEL).half()
    taken = []
    with CSDAdam([p], devices=[text] * devices) as opt:
        while len(taken) < 4 or (len(taken) < 20 and min(taken) >= 1.5 * predicted.step):  # until the machine is idle
            start = time.perf_counter()
            opt.step()
            opt.stats()  # waits until all states are written
            taken.append(time.perf_counter() - start)
    print(f"predicted {predicted.step:.3f} s, took {min(taken):.3f} s, {min(taken) / predicted.step:.3f}")
    slowest = {"read": "read", "write": "write", "update": "update", "down": "link down"}[max(alone, key=alone.get)]
    assert predicted.bound == slowest
    # A busy machine makes it slower; but if it is a tenth faster than predicted, the model is wrong.
    assert 0.85 * predicted.step < min(taken) < 1.5 * predicted.step


def test_pipeline_fills_and_drains():
    device = Rates(read=12e6, write=12e6, mixed=24e6, update=1e6)  # a second each for a million parameters
    p = predict("csdadam", 1e6, 1, device, server(link=2e6))
    tiles = model.tiles_per_device(1e6, 1)
    assert tiles == 8
    assert p.step == pytest.approx(1 + 4 / tiles)  # one of read, write, update, down, up; and a tile in the other four
    assert predict("csdadam", 1e9, 1, device, server()).step == pytest.approx(1000, rel=0.01)


# ---- bytes ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("variant", "link", "flash"),
    [
        ("base", (16, 16), (16, 16)),
        ("su_o", (4, 4), (16, 16)),
        ("su_o_c", (0.08, 4), (12.08, 12.08)),
        ("csdadam", (2, 2), (12, 12)),
        ("csdadam_topk", (0.04, 2), (12, 12)),
    ],
)
def test_bytes_per_parameter(variant, link, flash):
    moved = traffic(variant, 1000, topk=0.01)
    assert moved["link"] == pytest.approx([1000 * b for b in link])
    assert moved["flash"] == pytest.approx([1000 * b for b in flash])


def test_bytes_of_plain_drives_fp32_and_half_of_the_gradients():
    assert traffic("csdadam", 1, on_host=True)["link"] == (12, 12)  # states cross
    assert traffic("csdadam", 1, item_bytes=4)["link"] == (4, 4)
    assert traffic("csdadam_topk", 1, topk=0.5)["link"] == (2, 2)  # so large a share is sent dense


@pytest.mark.parametrize(("dtype", "item"), [("bf16", 2), ("fp32", 4)])
def test_bytes_of_8bit_states(dtype, item):
    """The bytes are those that the optimizer counts. A GPU sends the parameter to a plain drive; a CSD reads it."""
    p = torch.nn.Parameter(torch.randn(1 << 20).to(benchmark.DTYPES[dtype]))
    p.grad = torch.randn_like(p)
    with CSDAdam([p], devices=["file:?cache=off"], state_dtype="8bit") as opt:
        opt.step()
        opt.step()
        stats = opt.stats()
    of = {"item_bytes": item, "state_dtype": "8bit"}
    drive = traffic("csdadam", p.numel(), on_host=True, **of)
    written, read = stats["flash_write_bytes"], stats["flash_read_bytes"]
    assert drive["flash"] == drive["link"] == pytest.approx((written, read), rel=0.02)  # sections are whole pages
    csd = traffic("csdadam", 64, **of)
    assert csd["flash"] == (321 + 64 * (item == 4),) * 2
    assert drive["gpu"] == (2 * item * p.numel(), item * p.numel())
    assert csd["gpu"] == (64 * item, 64 * item)
    assert drive["flash"][1] == drive["flash"][0] - item * p.numel()
    assert csd["link"] == (64 * item, 64 * item)
    assert traffic("base", 1, state_dtype="8bit") == traffic("base", 1)


SECTIONS = {
    "CSDAdam": 3,
    "CSDAdam,amsgrad": 4,
    "CSDAdamL2": 3,
    "CSDSGD": 1,
    "CSDSGD,momentum": 2,
    "CSDAdagrad": 2,
    "CSDRMSprop": 2,
    "CSDRMSprop, momentum, centered": 4,
    "CSDLion": 2,
    "CSDMuon": 2,
}


@pytest.mark.parametrize("text", SECTIONS)
def test_bytes_are_those_that_the_optimizer_counts(text):
    p = torch.nn.Parameter(torch.randn(1 << 20).half().view(1024, 1024))
    p.grad = torch.randn(1024, 1024).half()
    planned, sections, _ = described(text, "fp32")
    assert planned.sections == len(sections) == SECTIONS[text]
    made, options = OPTIMIZERS[planned.name], dict.fromkeys(planned.options, True)
    with made([p], devices=["file:?cache=off"], **options) as opt:
        opt.step()
        opt.step()
        stats = opt.stats()
    share = float(planned.rule == "muon")
    moved = traffic("csdadam", p.numel(), sections=planned.sections, orthogonal=share)
    assert moved["link"] == (stats["push_bytes"], stats["pull_bytes"])
    assert moved["flash"] == (stats["flash_write_bytes"], stats["flash_read_bytes"])


@pytest.mark.parametrize(("variant", "topk"), [("adam", None), ("su_o_c", None), ("csdadam_topk", 0), ("su_o_c", 2)])
def test_traffic_refuses(variant, topk):
    with pytest.raises(CSDValueError, match="Invalid"):
        traffic(variant, 1e9, topk=topk)


# ---- a plan --------------------------------------------------------------------------


def own(found):
    return next(row for row in found["predictions"] if row["chosen"])


def test_plan_by_hand():
    """7 B parameters on two drives that read 6 and write 3 GB/s in turn: 24 B / (4 GB/s) each."""
    drive = Rates.in_turn(6e9, 3e9, on_host=True)
    gpu = {"forward": 1, "backward": 2, "accumulate": 3}
    found = plan.plan(PlanRequest(params=7 * 10**9, devices=2, host=server(), drive=drive, tbw=1e15, **gpu))
    assert own(found)["bound"] == "drive"
    assert own(found)["step"] == pytest.approx(7e9 * 24 / (2 * 4e9), rel=0.01)
    assert own(found)["seconds"] == own(found)["step"] + 9
    assert found["capacity_bytes_per_device"] == 84e9
    assert found["memory_bytes"]["parameters"] == found["memory_bytes"]["gradients"] == 14e9
    assert found["memory_bytes"]["buffers"] <= 2 * 8 * 12.1 * 2**20
    assert found["bytes"]["link"] == {"towards_flash": 84e9, "back": 84e9}
    assert found["bytes"]["gpu"] == {"towards_flash": 14e9, "back": 14e9}
    assert found["wear"]["bytes_per_step_and_device"] == 42e9
    assert found["wear"]["steps"] == pytest.approx(1e15 / 42e9)
    assert found["wear"]["days"] == pytest.approx(1e15 / 42e9 * own(found)["seconds"] / 86400)


def test_overlap_by_hand():
    """17.0 s of a step hide beside a forward of 0.4 s and a backward of 0.8; 38.4 s beside 4 and 27."""

    def overlap(**changes):
        gen4 = {"params": 7 * 10**9, "devices": 2, "host": server(gpu_link=25e9), "forward": 0.4, "backward": 0.8}
        found = plan.plan(PlanRequest(**(gen4 | changes)))
        seconds, rounded = own(found)["seconds"], {how: round(s, 1) for how, s in found["overlap"].items()}
        return round(seconds, 1), rounded, plan.describe_overlap(found["request"], seconds, found["overlap"])

    assert overlap()[:2] == (18.2, {"forward": 17.8, "backward": 17.0})
    seconds, rounded, said = overlap(accumulate=57)
    assert (seconds, rounded["backward"]) == (85.4, 84.2)
    assert said == "gains little: 1.2 s, as much as fits beside one batch of 57"
    cards = {"params": 33 * 10**9, "devices": 10, "on": "csd", "forward": 4, "backward": 27}
    behind = server(link=8e9, gpu_link=25e9)
    seconds, rounded, said = overlap(**cards, host=behind)
    assert (seconds, rounded) == (69.4, {"forward": 65.4, "backward": 38.4})
    assert "65.44 s with overlap(model), 38.44 s with backward=True: 1.06 and 1.81 times as fast" in said
    assert overlap(**(cards | {"on": "drive"}), host=behind)[:2] == (80.6, {"forward": 76.6, "backward": 49.6})
    # A step that is shorter than forward and backward is hidden completely, but no more than its own time is saved.
    assert overlap(forward=10, backward=20)[:2] == (47.0, {"forward": 37.0, "backward": 30.0})
    # Top-K begins in step().
    seconds, rounded, said = overlap(**cards, host=behind, topk=0.01)
    assert rounded == {"forward": 65.4, "backward": 65.4}
    assert said == "an iteration takes 65.43 s with overlap(model), with backward=True as well: 1.06 times as fast"
    assert plan.plan(PlanRequest(params=10**9, devices=1, host=server()))["overlap"] is None


def test_plan_with_8bit_states_by_hand():
    """The same two drives: 3.016 B / (6 GB/s) and 5.016 B / (3 GB/s) each."""
    drive = Rates.in_turn(6e9, 3e9, on_host=True)
    request = PlanRequest(params=7 * 10**9, devices=2, host=server(), drive=drive, tbw=1e15, state_dtype="8bit")
    found = plan.plan(request)
    assert own(found)["bound"] == "drive"
    assert own(found)["step"] == pytest.approx(7e9 * (3.016 / 6e9 + 5.016 / 3e9) / 2, rel=0.01)
    assert found["capacity_bytes_per_device"] == pytest.approx(7e9 * 10.03 / 2, rel=1e-3)
    assert found["memory_bytes"]["buffers"] <= 2 * 8 * 5.1 * 2**20
    assert found["wear"]["steps"] == pytest.approx(1e15 / (7e9 * 5.016 / 2), rel=1e-3)
    assert {(row["variant"], row["state_dtype"]) for row in found["predictions"]} == {
        ("base", "fp32"),
        ("su_o", "fp32"),
        ("csdadam", "8bit"),
    }
    on_csds = plan.plan(plan.replace(request, on="csd", csd=model.SMARTSSD_8BIT))
    assert own(on_csds)["step"] == pytest.approx(7e9 * 10.03 / 2 / model.SMARTSSD.mixed, rel=0.01)


def test_break_even_with_8bit_states():
    """Plain drives stop at the link's 5.016 B / 8 GB/s, as 16 CSDs do at 10.03 B / 1 GB/s each. Reading less, they fill
    the pipeline sooner.
    """
    slow, fast = Rates.in_turn(1.0e9, 1.0e9, 1e12), Rates.in_turn(5.0e9, 5.0e9, on_host=True)
    request = PlanRequest(params=10**10, devices=1, csd=slow, drive=fast, host=server(link=8e9, update=1e12))
    even = plan.plan(plan.replace(request, state_dtype="8bit"))["break_even"]
    assert even["csdadam"] == 17
    assert even["base"] < plan.plan(request)["break_even"]["base"]


def test_figures_of_the_pages_with_8bit_states():
    """The numbers in docs/plan.md and docs/performance.md: from how many SmartSSDs on they pay, by the CPU's rate."""

    def plan_of(params, cpu, csd=model.SMARTSSD_8BIT, **rates):
        host = Host(update=cpu, gpu_link=25e9, **rates)
        return plan.plan(PlanRequest(params=params, devices=10, on="csd", host=host, csd=csd, state_dtype="8bit"))

    alone = [plan_of(7 * 10**9, cpu)["break_even"] for cpu in (0.7e9, 1.4e9, 2.8e9)]
    assert alone == [{"base": 1, "csdadam": n} for n in (4, 7, 14)]
    behind = [plan_of(33 * 10**9, cpu, link=8e9)["break_even"] for cpu in (0.7e9, 1.4e9, 2.8e9)]
    assert behind == [{"base": 1, "csdadam": n} for n in (4, 7, 8)]
    assert own(plan_of(33 * 10**9, 1.4e9, link=8e9))["step"] == pytest.approx(16.1, abs=0.05)
    at_once = plan_of(33 * 10**9, 1.4e9, csd=plan.replace(model.SMARTSSD_8BIT, mixed=4.5e9), link=8e9)
    assert at_once["break_even"]["csdadam"] == 5
    assert own(at_once)["step"] == pytest.approx(10.4, abs=0.05)


def test_a_cpu_that_is_slow_with_codes_does_not_slow_zero_infinity_down():
    """ZeRO-Infinity's states are fp32: with 8-bit states, the rate measured for those says nothing about it."""
    request = PlanRequest(params=10**9, devices=4, host=server(update=1e8))
    for state_dtype, rate in (("fp32", 1e8), ("8bit", model.ZERO_UPDATE)):
        rows = plan.plan(plan.replace(request, state_dtype=state_dtype))["predictions"]
        assert rows[0]["variant"] == "base"
        assert rows[0]["stages"]["update"] == pytest.approx(1e9 / rate)


def test_what_bounds_changes_with_the_machine():
    def bound(**changes):
        return own(plan.plan(PlanRequest(**({"params": 10**10, "devices": 4, "host": server()} | changes))))["bound"]

    assert bound() == "drive"
    assert bound(host=server(update=1e8)) == "update"
    assert bound(host=server(link=1e9)) == "link down"
    assert bound(host=server(link=1e9), on="csd") == "drive"  # states stay behind the link
    assert bound(host=server(link=1e8), on="csd") == "link down"
    assert bound(host=server(link=1e8), on="csd", topk=0.01) == "link up"
    assert bound(host=server(gpu_link=1e8)) == "gpu link down"
    assert bound(on="csd", csd=Rates.in_turn(3e9, 3e9, 1e6)) == "update"


def test_break_even():
    slow = Rates.in_turn(1.0e9, 1.0e9, 1e12)
    fast = Rates.in_turn(5.0e9, 5.0e9, on_host=True)

    def even(**rates):
        return plan.plan(PlanRequest(params=10**10, devices=1, csd=slow, drive=fast, host=server(**rates)))[
            "break_even"
        ]

    # Without a shared link five times slower ones never pay; with one of 8 GB/s in each direction plain drives stop at
    # 12 B / 8 GB/s = 1.5 ns, and slow CSDs, 24 ns each, get there with 16.
    assert even(update=1e12)["csdadam"] is None
    assert even(link=8e9, update=1e12)["csdadam"] == 16
    assert even(link=8e9)["base"] < 16


def test_advice():
    def said(**changes):
        return " ".join(
            plan.plan(PlanRequest(**({"params": 7 * 10**9, "devices": 2, "host": server()} | changes)))["advice"]
        )

    assert "twice as many plain drives" in said()
    assert "waits for the update" in said()
    assert "--forward" in said()
    assert "--accumulate" in said(forward=0.4, backward=0.8)
    assert "--accumulate" not in said(forward=0.4, backward=0.8, accumulate=100)
    assert "Top-K buys no time" in said(topk=0.01)
    assert "more plain drives change nothing" in said(host=server(link=1e9))
    assert "on as many CSDs" in said(host=server(link=1e9))
    assert "the CPU is the limit" in said(host=server(update=1e8))


def test_accumulating_as_advised_does_what_it_says():
    request = PlanRequest(params=7 * 10**9, devices=2, host=server(), forward=0.4, backward=0.8)
    advice = plan.plan(request)["advice"][-1]
    batches = int(advice.rpartition("--accumulate ")[2].rstrip(")"))
    row = own(plan.plan(plan.replace(request, accumulate=batches)))
    assert row["step"] / row["seconds"] == pytest.approx(0.2, abs=0.01)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"params": 0}, "params: 0"),
        ({"devices": 0}, "devices: 0"),
        ({"dtype": "fp8"}, "dtype: 'fp8'"),
        ({"state_dtype": "4bit"}, "state_dtype: '4bit'"),
        ({"topk": 0.0}, "topk: 0.0"),
        ({"topk": 1.5}, "topk: 1.5"),
        ({"forward": -1.0}, "forward: -1.0"),
        ({"backward": math.nan}, "backward: nan"),
        ({"host": server(link=0.0)}, "link 0.0"),
    ],
)
def test_plan_refuses(changes, named):
    with pytest.raises(CSDValueError, match="Invalid") as caught:
        plan.plan(PlanRequest(**({"params": 10**9, "devices": 1, "host": server()} | changes)))
    assert named in str(caught.value)


# ---- costs ---------------------------------------------------------------------------


def test_costs_by_hand():
    """7 B parameters on two drives that read 6 and write 3 GB/s: 21 s in an iteration of 30, 84 GB of states."""
    drive = Rates.in_turn(6e9, 3e9, on_host=True)
    r = PlanRequest(params=7 * 10**9, devices=2, host=server(), drive=drive, tbw=1e15, forward=4, backward=5)
    prices = {"dram": 10.0, "gpu": 300.0, "drive": 500.0, "capacity": 0.084}
    watts = {"cpu": 200.0, "drive": 9.0, "idle": 3.0, "dram": 0.5, "gpu": 100.0}
    found = plan.plan(plan.replace(r, prices=prices, watts=watts))
    step, cost = own(found)["step"], found["costs"]
    wear = 2 * 500 * 1000 * 42e9 / 1e15
    assert cost["dollars"] == pytest.approx(
        {"dram": 840, "gpu_memory": 25200, "drives": 1000, "wear_of_1000_steps": wear}
    )
    assert cost["joules_per_step"] == pytest.approx(
        {"cpu": 200 * step, "drives": 2 * (9 * step + 3 * 9), "waiting_gpu": 100 * step}
    )
    assert cost["dram_watts"] == pytest.approx(42)
    assert cost["drives_are_large_enough"]  # exactly
    assert cost["assumed"] == []
    small = plan.plan(plan.replace(r, prices=prices | {"capacity": 0.0839}))["costs"]
    assert not small["drives_are_large_enough"]


def test_costs_with_8bit_states_and_of_csds():
    request = PlanRequest(params=7 * 10**9, devices=2, host=server())
    fp32, coded = (plan.plan(plan.replace(request, state_dtype=s))["costs"]["dollars"] for s in ("fp32", "8bit"))
    assert coded["dram"] / fp32["dram"] == pytest.approx(5.016 / 12, rel=1e-3)
    assert coded["wear_of_1000_steps"] / fp32["wear_of_1000_steps"] == pytest.approx(5.016 / 12, rel=1e-3)
    assert coded["drives"] == fp32["drives"]
    on_csds = plan.plan(plan.replace(request, on="csd"))["costs"]
    assert on_csds["dollars"]["drives"] == 2 * costs.CARD_PRICES["drive"].value
    assert on_csds["tbw_bytes"] == 7.008e15


def test_what_was_assumed_is_said():
    """Every default that nobody gave, and no other, with its date and source."""
    r = PlanRequest(params=10**9, devices=1, host=server(), prices={"dram": 9.0}, watts={"cpu": 90.0})
    assumed = plan.plan(r)["costs"]["assumed"]
    names = {(a["option"], a["name"]) for a in assumed}
    every = {("prices", name) for name in costs.PRICES} | {("watts", name) for name in costs.WATTS}
    assert names == every - {("prices", "dram"), ("watts", "cpu")}
    for a in assumed:
        assert a["source"]
        assert f"{a['what']} {a['text']}" in costs.describe_assumed(assumed)
        assert a["as_of"] in costs.describe_assumed(assumed)
    assert ("prices", "tbw") not in {
        (a["option"], a["name"]) for a in plan.plan(plan.replace(r, tbw=1e15))["costs"]["assumed"]
    }


def test_the_page_has_the_defaults_that_are_assumed():
    """docs/plan.md: one row for each, with its value, date and source."""
    page = (Path(__file__).parents[2] / "docs/plan.md").read_text()
    for option, table in (("--prices", costs.PRICES), ("--watts", costs.WATTS)):
        for name, of in table.items():
            given = "--tbw" if name == "tbw" else f"{option} {name}="
            assert f"| `{given}` | {of.text} | {of.as_of or 'assumed'} | {of.source} |" in page
    for name in ("drive", "capacity", "tbw"):
        of = costs.CARD_PRICES[name]
        assert f"| {of.text} | {of.as_of or 'assumed'} | {of.source} |" in page


# ---- what people write ---------------------------------------------------------------


def test_costs_are_parsed():
    assert costs.parse_costs("", "--prices", costs.PRICES) == {}
    assert costs.parse_costs(" dram=11, drive=0.5e3,", "--prices", costs.PRICES) == {"dram": 11, "drive": 500}


def test_rates_are_parsed():
    assert plan.parse_rates("gen5", model.DRIVES, model.DRIVES["gen4"]) == model.DRIVES["gen5"]
    drive = plan.parse_rates("read=6GB/s, write=3GB/s", model.DRIVES, model.DRIVES["gen4"])
    assert (drive.read, drive.write, drive.on_host) == (6e9, 3e9, True)
    assert drive.mixed == pytest.approx(4e9)  # 12 B + 12 B in 6 ns
    csds = {"smartssd": model.SMARTSSD}
    card = plan.parse_rates("read=3GB/s,write=3GB/s,mixed=5GB/s,update=240M/s", csds, model.SMARTSSD)
    assert card == Rates(3e9, 3e9, 5e9, 240e6)
    assert plan.parse_rates("read=3GB/s,write=3GB/s", csds, model.SMARTSSD).update == model.SMARTSSD.update


@pytest.mark.parametrize(
    "text",
    [
        "gen9",
        "",
        "read=3GB/s",
        "read=3GB/s,write=fast",
        "read=3GB/s,write=0GB/s",
        "read=3GB/s,read=3GB/s,write=1GB/s",
        "read=3GB/s,write=1GB/s,mixed=5GB/s",
        "read=3GB/s,write=1GB/s,update=240M/s",  # the CPU updates plain drives
    ],
)
def test_bad_rates_are_refused(text):
    with pytest.raises(CSDValueError, match="Invalid rate"):
        plan.parse_rates(text, model.DRIVES, model.DRIVES["gen4"])


def test_sweeps_are_parsed():
    assert plan.parse_sweep("devices=1..16") == range(1, 17)
    for text in ("devices=2..1", "devices=0..4", "params=1..4", "1..4", "devices=1..9999"):
        with pytest.raises(CSDValueError, match="Invalid sweep"):
            plan.parse_sweep(text)


def entry(device, read, mounted_at, **more):
    speed = {"read_bytes_per_second": read, "write_bytes_per_second": 2.0, "mixed_bytes_per_second": 3.0}
    return {"device": device, "storage": {"mounted_at": mounted_at}, "speed": speed, **more}


def test_the_slowest_of_measured_devices_counts():
    assert plan.measured([entry("a", 5.0, "/a"), entry("b", 4.0, "/b")]) == Rates(4.0, 2.0, 3.0, on_host=True)
    shared = plan.measured([entry("a", 4.0, "/a"), entry("b", 4.0, "/a")])
    assert shared == Rates(2.0, 1.0, 1.5, on_host=True)
    rates = {"drive_to_card": 3.0, "card_to_drive": 1.5, "to_card": 9.0, "from_card": 9.0, "kernel": 7.0}
    assert plan.measured([entry("xrt:0", 5.0, "/a", card_speed=rates)]) == Rates.in_turn(3.0, 1.5, 7.0)
    no_p2p = rates | {"drive_to_card": 0.0, "card_to_drive": 0.0, "from_card": 1.0}
    assert plan.measured([entry("xrt:0", 5.0, "/a", card_speed=no_p2p)]) == Rates.in_turn(5.0, 1.0, 7.0)
    with pytest.raises(CSDValueError, match="one kind"):
        plan.measured([entry("a", 5.0, "/a"), entry("xrt:0", 5.0, "/b", card_speed=rates)])
    with pytest.raises(CSDValueError, match="'ram:' has no drive"):
        plan.measured([{"device": "ram:"}])


LLAMA = {"model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32}
CONFIGS = [  # with the numbers of parameters that their makers publish
    ({"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_positions": 1024, "vocab_size": 50257}, 124_439_808),
    (LLAMA | {"intermediate_size": 11008, "vocab_size": 32000}, 6_738_415_616),
    (LLAMA | {"intermediate_size": 14336, "vocab_size": 128256, "num_key_value_heads": 8}, 8_030_261_248),
    (
        LLAMA | {"model_type": "mistral", "intermediate_size": 14336, "vocab_size": 32000, "num_key_value_heads": 8},
        7_241_732_096,
    ),
    (
        LLAMA
        | {"model_type": "mixtral", "intermediate_size": 14336, "vocab_size": 32000, "num_key_value_heads": 8}
        | {"num_local_experts": 8},
        46_702_792_704,
    ),
    (
        {"model_type": "qwen2", "hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28}
        | {"num_key_value_heads": 4, "intermediate_size": 18944, "vocab_size": 152064},
        7_615_616_512,
    ),
    (
        {"model_type": "qwen3", "hidden_size": 4096, "num_hidden_layers": 36, "num_attention_heads": 32}
        | {"num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 12288, "vocab_size": 151936},
        8_190_735_360,
    ),
]


@pytest.mark.parametrize(("config", "params"), CONFIGS, ids=[c["model_type"] for c, _ in CONFIGS])
def test_parameters_of_a_config_are_counted(tmp_path, config, params):
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config))
    assert plan.count_params(file) == params


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"model_type": "t5"}', "'t5' is not one of gpt2"),
        ('{"model_type": "llama"}', "no 'hidden_size'"),
        ("{}", "no 'model_type'"),
        ("[]", "nothing that could be read"),
        ("not json", "nothing that could be read"),
    ],
)
def test_what_is_no_config_is_refused(tmp_path, text, said):
    file = tmp_path / "config.json"
    file.write_text(text)
    with pytest.raises(CSDValueError, match="give --params") as caught:
        plan.count_params(file)
    assert said in str(caught.value)


# ---- the command ---------------------------------------------------------------------


@pytest.fixture(autouse=True)
def measured(monkeypatch):
    """Replace the measurement of this CPU by a server's rate, and list the dtypes and states that were asked for."""
    asked = []
    monkeypatch.setattr(engine_rate, "engine_rate", lambda *what: asked.append(what[:3]) or server().update)
    return asked


ADAMS = ("master", "exp_avg", "exp_avg_sq")


def run_json(run, *arguments):
    code, out, err = run("plan", *arguments, "--json")
    assert (code, err.strip()) == (0, "")
    content = json.loads(out, parse_constant=pytest.fail)  # no Infinity, no NaN
    assert content["schema"] == "csd_optim.plan/1"
    return content


def test_command_for_programs(run, tmp_path):
    found = run_json(run, "--params", "7B", "--devices", "2", "--drive", "read=6GB/s,write=3GB/s", "--tbw", "600TB")
    assert own(found)["variant"] == "csdadam"
    assert own(found)["step"] == pytest.approx(21, rel=0.01)
    assert [(row["variant"], row["on"]) for row in found["predictions"]] == [
        ("base", "drive"),
        ("csdadam", "drive"),
        ("su_o", "csd"),
        ("csdadam", "csd"),
    ]
    assert found["request"]["host"]["link"] is None
    assert found["wear"]["steps"] == pytest.approx(600e12 / 42e9)
    config = tmp_path / "config.json"
    config.write_text(json.dumps(CONFIGS[1][0]))
    assert run_json(run, "--config", config)["request"]["params"] == CONFIGS[1][1]


def test_command_for_csds_with_topk(run):
    found = run_json(run, "--params=33B", "--devices=10", "--csd=smartssd", "--link=8GB/s", "--topk=0.01")
    assert (own(found)["variant"], own(found)["on"]) == ("csdadam_topk", "csd")
    assert found["memory_bytes"]["residuals"] == 66e9
    assert (found["request"]["tbw"], found["wear"]["tbw_bytes"]) == (None, 7.008e15)
    assert {row["variant"] for row in found["predictions"]} == set(model.VARIANTS)
    without = run_json(run, "--params=33B", "--topk=0.01", "--no-error-feedback")
    assert without["memory_bytes"]["residuals"] == 0


def test_command_with_8bit_states(run, measured):
    found = run_json(run, "--params=33B", "--devices=10", "--csd=smartssd", "--state-dtype=8bit")
    assert own(found)["state_dtype"] == found["request"]["state_dtype"] == "8bit"
    assert found["request"]["csd"]["update"] == model.SMARTSSD_8BIT.update
    assert found["bytes"]["flash"]["towards_flash"] == pytest.approx(33e9 * 5.016, rel=1e-3)
    assert found["bytes"]["flash"]["back"] == found["bytes"]["flash"]["towards_flash"]
    assert measured == [(torch.bfloat16, "8bit", ADAMS)]
    code, out, _ = run("plan", "--params", "7B", "--devices", "2", "--state-dtype", "8bit", "--sweep", "devices=1..2")
    assert code == 0
    for words in (
        "7.00 B bf16 parameters with 8-bit states",
        "CSDAdam, 8-bit, on drives",
        "35.1 GB on each",
    ):
        assert words in out
    assert run("plan", "--params=7B", "--state-dtype=4bit")[2].startswith("error: Invalid state_dtype: '4bit'")


def test_command_for_other_optimizers(run, measured):
    """7 B parameters with two sections on two drives that read 6 and write 3 GB/s in turn: 16 B / (4 GB/s) each."""
    two = ("--params=7B", "--devices=2", "--drive=read=6GB/s,write=3GB/s", "--tbw=600TB")
    adams = run_json(run, *two)
    assert "optimizer" not in adams["request"]  # plain CSDAdam is left out, as in older versions
    found = run_json(run, *two, "--optimizer=CSDSGD,momentum")
    said = {"name": "CSDSGD", "options": ["momentum"], "rule": "sgd", "sections": 2}
    assert found["request"].pop("optimizer") == said
    assert measured[1:] == [(torch.bfloat16, "fp32", ("master", "momentum_buffer"))]
    assert own(found)["step"] == pytest.approx(7e9 * 16 / (2 * 4e9), rel=0.01)
    assert found["capacity_bytes_per_device"] == 56e9
    assert found["memory_bytes"]["buffers"] == pytest.approx(2 / 3 * adams["memory_bytes"]["buffers"])
    assert found["bytes"]["flash"] == found["bytes"]["link"] == {"towards_flash": 56e9, "back": 56e9}
    assert found["wear"]["steps"] == pytest.approx(600e12 / 28e9)
    assert found["request"]["csd"]["update"] == 385e6  # 40 B at 15.4 GB/s
    code, out, _ = run("plan", *two, "--optimizer", "CSDRMSprop, momentum,centered", "--sweep=devices=1..2")
    assert code == 0
    for words in ("7.00 B bf16 parameters of CSDRMSprop(centered, momentum)", "CSDRMSprop on CSDs", "112.0 GB on each"):
        assert words in out
    assert "CSDAdam" not in out
    found = run_json(run, *two, "--optimizer=CSDAdam,amsgrad", "--state-dtype=8bit")
    assert found["bytes"]["flash"]["towards_flash"] == pytest.approx(7e9 * 6.031, rel=1e-4)
    for optimizer in ("CSDAdagrad", "CSDRMSprop", "CSDMuon"):
        found = run_json(run, *two, f"--optimizer={optimizer}", "--state-dtype=8bit", "--orthogonalize=200T/s")
        assert found["bytes"]["flash"]["towards_flash"] == pytest.approx(7e9 * 4.016, rel=1e-4)


def test_command_for_a_rule_per_group(run, measured):
    two = ("--params=7B", "--devices=2", "--drive=read=6GB/s,write=3GB/s")
    groups = ("--group=lion=20%", "--group", "sgd, momentum=0.1")
    found = run_json(run, *two, *groups)
    assert found["request"]["optimizer"].pop("sections") == pytest.approx(0.7 * 3 + 0.3 * 2)
    said = {"name": "CSDAdam", "options": [], "rule": "adamw", "groups": [["lion", 0.2], ["sgd,momentum", 0.1]]}
    assert found["request"]["optimizer"] == said
    names = [("master", "exp_avg", "exp_avg_sq"), ("master", "exp_avg"), ("master", "momentum_buffer")]
    assert measured == [(torch.bfloat16, "fp32", sections) for sections in names]
    assert found["capacity_bytes_per_device"] == pytest.approx(7e9 * 2.7 * 4)
    assert own(found)["step"] == pytest.approx(7e9 * 4 * 2.7 * 2 / (2 * 4e9), rel=0.01)
    code, out, _ = run("plan", *two, *groups)
    assert (code, "7.00 B bf16 parameters of CSDAdam, 20% lion, 10% sgd with momentum on 2 plain drives" in out) == (
        0,
        True,
    )
    found = run_json(run, *two, "--group=adam=0.5", "--state-dtype=8bit")
    assert found["bytes"]["flash"] == run_json(run, *two, "--state-dtype=8bit")["bytes"]["flash"]
    found = run_json(run, *two, "--group=adagrad=0.5", "--state-dtype=8bit")
    assert found["bytes"]["flash"]["towards_flash"] == pytest.approx(7e9 * (5.016 + 4.016) / 2, rel=1e-4)


@pytest.fixture
def cpu_of_a_server(monkeypatch):
    """Replace the measurement of Newton-Schulz on this CPU, and list the dtypes that were asked for."""
    asked = []
    monkeypatch.setattr(newton_schulz, "fast_dtype", lambda device: torch.float32)
    monkeypatch.setattr(newton_schulz, "rate", lambda *what: asked.append(what) or 1e12)
    return asked


TWO = ("--params=7B", "--devices=2", "--drive=read=6GB/s,write=3GB/s")


def test_command_for_muon(run, measured, cpu_of_a_server):
    """7 B parameters of width 4096: 25 * 4096 operations for each; 16 B at 4 GB/s each of two drives."""
    found = run_json(run, *TWO, "--optimizer=CSDMuon", "--width=4096", "--forward=1", "--backward=2")
    assert found["request"]["optimizer"] == {"name": "CSDMuon", "options": [], "rule": "muon", "sections": 2}
    said = {"share": 1, "width": 4096, "rate": 1e12, "dtype": "fp32", "measured": True}
    assert found["request"]["orthogonalization"] == said
    assert cpu_of_a_server == [(torch.float32, torch.device("cpu"))]
    assert measured == [(torch.bfloat16, "fp32", ("master", "momentum_buffer"))]
    seconds, drives = 7e9 * 25 * 4096 / 1e12, 7e9 * 16 / (2 * 4e9)
    assert own(found)["stages"]["orthogonalize"] == pytest.approx(seconds)
    assert own(found)["bound"] == "orthogonalize"
    assert seconds < own(found)["step"] < seconds + drives / 100
    assert found["overlap"]["backward"] == found["overlap"]["forward"] == own(found)["seconds"] - 1
    assert found["bytes"]["gpu"] == {"towards_flash": 28e9, "back": 28e9}
    assert found["bytes"]["flash"] == {"towards_flash": 56e9, "back": 56e9}
    matrix = 4096 * 16384
    tile = found["memory_bytes"]["buffers"] / 2 / 8 / plan.DEFAULT_BUFFERS
    ring, workspace = 2 * 5 * (8 * tile + matrix), 4 * (3 * matrix + 2 * 4096**2) + 4 * matrix
    assert found["memory_bytes"]["orthogonalization"] == pytest.approx(ring + workspace, rel=1e-6)
    zero = found["predictions"][0]
    assert zero["step"] == pytest.approx(sum(zero["stages"].values()))  # the published systems do it in turn


def test_command_for_muon_and_adamw_in_groups(run, measured, cpu_of_a_server):
    groups = run_json(run, *TWO, "--optimizer=CSDMuon", "--group=adamw=20%", "--orthogonalize=200T/s")
    same = run_json(run, *TWO, "--group=muon=80%", "--orthogonalize=200T/s")
    for found in (groups, same):
        ns = found["request"]["orthogonalization"]
        assert ns == {"share": pytest.approx(0.8), "width": 4224, "rate": 200e12, "dtype": "bf16", "measured": False}
        assert own(found)["bound"] == "drive"
        assert own(found)["stages"]["orthogonalize"] == pytest.approx(0.8 * 7e9 * 25 * 4224 / 200e12)
        assert own(found)["step"] == pytest.approx(7e9 * 4 * 2.2 * 2 / (2 * 4e9), rel=0.01)
        assert found["bytes"]["gpu"]["back"] == pytest.approx(7e9 * (2 + 0.8 * 2))
        assert not any("orthogonalization" in text for text in found["advice"])
    assert cpu_of_a_server == []
    assert "orthogonalization" not in run_json(run, *TWO)["request"]


def test_command_warns_of_a_slow_orthogonalization(run, cpu_of_a_server):
    code, out, _ = run("plan", *TWO, "--optimizer=CSDMuon", "--width=4096")
    assert code == 0
    said = " ".join(out.split())
    assert "orthogonalization takes 716.8 s of a 716.9 s step on this CPU, 14.0 s of I/O; move the parameters" in said
    assert "100% of the parameters, in blocks of width 4096, orthogonalized at 1 TFLOP/s in fp32, measured" in said
    out = " ".join(run("plan", *TWO, "--optimizer=CSDMuon", "--width=4096", "--orthogonalize=10T/s")[1].split())
    assert "orthogonalization takes 71.7 s of a 71.7 s step at 10 TFLOP/s, 14.0 s of I/O" in out
    assert "a faster one, or lower ns_steps" in out


def test_width_is_that_of_the_config(run, tmp_path, cpu_of_a_server):
    for number, (config, params) in enumerate(CONFIGS):
        file = tmp_path / f"{number}.json"
        file.write_text(json.dumps(config))
        found = run_json(run, "--config", file, "--optimizer=CSDMuon")["request"]
        assert found["params"] == params
        assert found["orthogonalization"]["width"] == config.get("hidden_size", config.get("n_embd"))


@pytest.mark.parametrize(("params", "width"), [(124e6, 768), (1.3e9, 2048), (6.7e9, 4096), (70e9, 8192), (1, 64)])
def test_usual_width(params, width):
    """Within a half of the width of GPT-2 and GPT-3 and of Llama 2, which differ as much from each other."""
    assert abs(model.usual_width(params) / width - 1) < 0.5


def test_command_knows_all_optimizers():
    public = {name: getattr(csd_optim, name) for name in csd_optim.__all__}
    optimizers = {n for n, what in public.items() if isinstance(what, type) and issubclass(what, torch.optim.Optimizer)}
    assert {*OPTIMIZERS} == optimizers


def test_command_says_what_cards_have_no_kernel_for(run, monkeypatch):
    xrt = plan.BACKENDS["xrt"]
    monkeypatch.setitem(plan.BACKENDS, "xrt", plan.replace(xrt, rules=frozenset({"adamw"})))
    for text, missing in (("CSDSGD", True), ("CSDAdam", False)):
        out = run("plan", "--params=7B", "--csd=smartssd", "--optimizer", text)[1]
        assert (f"SmartSSDs have no kernel for {text} yet" in out) == missing
    assert "kernel" not in run("plan", "--params=7B", "--optimizer=CSDSGD")[1]


def test_command_for_people(run):
    code, out, err = run("plan", "--params", "7B", "--devices", "2", "--forward", "0.4", "--backward", "0.8")
    assert (code, err) == (0, "")
    for word in ("84.0 GB on each", "CSDAdam on drives", "waits for", "--accumulate", "with ZeRO-Infinity"):
        assert word in out
    for words in ("2400.0 TB of endurance (assumed) are used up after 57,143 steps", "2 plain drives $1,560"):
        assert words in out
    assert "1000.0 TB of endurance are used up after" in (out := run("plan", "--params", "7B", "--tbw", "1PB")[1])
    assert "of nothing but steps" in out


def test_command_with_prices_and_watts(run):
    two = ("--params=7B", "--devices=2", "--cpu=1.4G/s")
    found = run_json(run, *two, "--prices=dram=10,drive=1e3", "--watts", "cpu=200,drive=9")
    assert (found["request"]["prices"], found["request"]["watts"]) == (
        {"dram": 10, "drive": 1000},
        {"cpu": 200, "drive": 9},
    )
    assert found["costs"]["dollars"]["dram"] == pytest.approx(840)
    out = run("plan", *two, "--prices=dram=10,drive=1e3", "--watts", "cpu=200,drive=9")[1]
    out = " ".join(out.split())
    for words in (
        "drives $2,000, and $35.00 of wear",
        "DRAM $840",
        "GPU memory $340/GB (2026-Q1)",
        "--prices, --watts",
    ):
        assert words in out
    for words in ("DRAM $32", "CPU 150 W", "too small"):
        assert words not in out
    assert "$2,000 (too small), and" in " ".join(run("plan", *two, "--prices=drive=1e3,capacity=0.01")[1].split())
    whole = "dram=1,gpu=1,drive=1,capacity=1", "cpu=1,drive=1,idle=1,dram=1,gpu=1"
    assert "assumed" not in run("plan", *two, "--tbw=1PB", "--prices", whole[0], "--watts", whole[1])[1]


def test_command_measures_this_cpu_unless_a_rate_is_given(run, measured):
    found = run_json(run, "--params=7B", "--dtype=fp16")
    assert measured == [(torch.float16, "fp32", ADAMS)]
    assert (found["request"]["host"]["update"], found["request"]["cpu_measured"]) == (1.4e9, True)
    assert "1.40 G parameters/s, measured here" in run("plan", "--params=7B")[1]
    measured.clear()
    found = run_json(run, "--params=7B", "--devices=40", "--cpu=2.5G/s")
    assert (found["request"]["host"]["update"], found["request"]["cpu_measured"]) == (2.5e9, False)
    assert own(found)["stages"]["update"] == pytest.approx(7 / 2.5)
    assert "2.50 G parameters/s, as given" in run("plan", "--params=7B", "--csd=smartssd", "--cpu=2.5G/s")[1]
    assert measured == []


def test_cpu_is_measured_once_with_the_engine(monkeypatch):
    made = []

    class Small(engine_rate.EngineWithoutDrive):
        def __init__(self, elems, dtype, state_dtype, sections, in_memory):
            made.append((elems, dtype, state_dtype))
            super().__init__(elems, dtype, state_dtype=state_dtype, sections=sections, in_memory=in_memory)

    monkeypatch.setattr(engine_rate, "ENGINE_ELEMS", 1 << 16)
    monkeypatch.setattr(engine_rate, "EngineWithoutDrive", Small)
    measured = engine_rate._engine_rate
    measured.cache_clear()
    for state_dtype in ("fp32", "8bit"):
        assert 0 < ENGINE_RATE(torch.bfloat16, state_dtype) == ENGINE_RATE(torch.bfloat16, state_dtype)
    assert made == [(1 << 16, torch.bfloat16, "fp32"), (1 << 16, torch.bfloat16, "8bit")]
    measured.cache_clear()


@pytest.mark.parametrize(
    ("text", "state_dtype"),
    [
        *(("CSDAdam", "fp32"), ("CSDAdam", "8bit"), ("CSDSGD", "fp32"), ("CSDRMSprop,momentum,centered", "fp32")),
        ("CSDAdagrad", "8bit"),
    ],
)
def test_engine_without_drives_updates_and_verifies(text, state_dtype):
    """EngineWithoutDrive gives the same bits as a drive, and its reads are verified like a drive's."""
    p = torch.nn.Parameter(torch.zeros(300_000).bfloat16())
    planned, sections, hyper = described(text, state_dtype)
    engine = engine_rate.EngineWithoutDrive(p.numel(), p.dtype, state_dtype=state_dtype, sections=sections)
    of, kwargs = OPTIMIZERS[planned.name], dict.fromkeys(planned.options, True)
    with of([p], devices=["file:"], state_dtype=state_dtype, **kwargs) as opt, engine:
        for t in range(1, 4):
            p.grad = torch.randn(p.numel()).bfloat16()
            engine.grad.copy_(p.grad)
            engine.hyper[0] = of._rule.constants(opt.param_groups[0], sections, t, 1.0)
            opt.step()
            engine.step(seed=t)
            assert torch.equal(engine.param, p)
    options = {"cached": False, "state_dtype": state_dtype, "sections": sections}
    with engine_rate.EngineWithoutDrive(4096, torch.bfloat16, **options) as engine:
        engine.hyper[0] = hyper
        engine.step()
        with pytest.raises(CSDStoreError, match="of tile 0 is not what was written there"):
            engine.step()  # reads zeros


def test_command_measures_named_devices(run, tmp_path, monkeypatch):
    monkeypatch.setattr(facts, "PROBE_BYTES", 16 << 20)
    (tmp_path / "a").mkdir()
    found = run_json(run, "--params", "1e5", f"file:{tmp_path}/a?tbw=1TB", tmp_path / "b")
    request = found["request"]
    assert (request["devices"], request["on"], request["measured"], request["tbw"]) == (2, "drive", True, 1e12)
    assert request["drive"]["read"] > 0
    assert request["free"] > 0
    assert not list((tmp_path / "a").iterdir())
    assert not (tmp_path / "b").exists()
    code, _, err = run("plan", "--params", "1e5", "ram:")
    assert (code, err.strip()) == (1, "error: 'ram:' has no drive that could be measured")
    code, _, err = run("plan", "--params", "1e5", tmp_path / "no" / "where")
    assert code == 1
    assert "no such directory" in err


def test_command_says_when_there_is_too_little_room(run, tmp_path, monkeypatch):
    monkeypatch.setattr(facts, "PROBE_BYTES", 16 << 20)
    assert "too little" in run("plan", "--params", "1e15", tmp_path)[1]
    assert "too little" not in run("plan", "--params", "1e5", tmp_path)[1]


def test_command_sweeps_and_plots(run, tmp_path):
    png = tmp_path / "sweep.png"
    found = run_json(run, "--params=70e9", "--link=8GB/s", "--sweep=devices=1..16", "--plot", png)
    assert [row["devices"] for row in found["sweep"] if row["chosen"]] == [*range(1, 17)]
    assert png.read_bytes().startswith(b"\x89PNG")
    code, out, _ = run("plan", "--params", "70e9", "--sweep", "devices=3..5")
    assert code == 0
    assert [line.split()[0] for line in out.splitlines() if line.strip()[:1] in ("3", "4", "5")] == ["3", "4", "5"]


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--params", "1B", "--config", "x"],
        ["--params", "1B", "--plot", "x.png"],
        ["--params", "1B", ".", "--devices", "2"],
        ["--params", "some"],
    ],
)
def test_wrong_commands(run, arguments):
    code, out, err = run("plan", *arguments)
    assert (code, out) == (2, "")
    assert "Usage" in err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--drive", "gen9"], "gen3, gen4, gen5"),
        (["--csd", "gen4"], "smartssd"),
        (["--link", "fast"], "Invalid rate: 'fast'"),
        (["--link", "0GB/s"], "link 0.0"),
        (["--topk", "2"], "topk: 2"),
        (["--dtype", "fp8"], "fp16, bf16, fp32"),
        (["--optimizer", "SGD"], "there are CSDAdam, CSDAdamL2, CSDSGD"),
        (["--optimizer", "CSDSGD,nesterov"], "'nesterov' adds no state to CSDSGD, but momentum does"),
        (["--optimizer", "CSDLion", "--state-dtype", "8bit"], "no code for the exp_avg of lion"),
        (["--group", "sophia=0.1"], "write RULE=SHARE, the rules are adamw, adam, sgd, adagrad, rmsprop, lion, muon"),
        (["--optimizer", "CSDMuon", "--place", "--orthogonalize=1T/s", "ram:"], "lack the orthogonalization of muon"),
        (["--group", "muon=0.1", "--topk=0.1"], "muon needs whole gradients"),
        (["--group", "muon=0.1", "--orthogonalize", "200TB/s"], "Invalid rate: '200TB/s'"),
        (["--group", "muon=0.1", "--orthogonalize", "0T/s"], "orthogonalize 0.0"),
        (["--group", "lion"], "'lion'; its share of the parameters is a number such as 0.2 or 20%"),
        (["--group", "lion=100%"], "its share of the parameters is a number"),
        (["--group", "lion=0.6", "--group", "sgd=0.6"], "their shares are 1.2 of the parameters"),
        (["--group", "lion,momentum=0.6"], "'momentum' adds no state to lion, but nothing does"),
        (["--group", "lion=0.1", "--state-dtype", "8bit"], "no code for the exp_avg of lion"),
        (["--group", "rmsprop,centered=0.1", "--state-dtype", "8bit"], "no code for the grad_avg of rmsprop"),
        (["--sweep", "devices=4"], "devices=1..16"),
        (["--tbw", "much"], "Invalid size"),
        (["--prices", "dram"], "Invalid --prices: 'dram'; write NAME=NUMBER, of dram ($/GB), gpu ($/GB), drive ($)"),
        (["--prices", "dram=-1"], "'dram=-1'"),
        (["--prices", "dram=1,dram=2"], "'dram=2'"),
        (["--prices", "tbw=1"], "'tbw=1'"),  # is an option of its own
        (["--watts", "cpu=inf"], "Invalid --watts: 'cpu=inf'; write NAME=NUMBER, of cpu (W), drive (W)"),
        (["--watts", "disk=3"], "'disk=3'"),
    ],
)
def test_bad_values_are_one_line(run, arguments, said):
    code, out, err = run("plan", "--params", "1B", *arguments)
    assert (code, out) == (1, "")
    assert err.startswith("error: Invalid")
    assert err.count("\n") == 1
    assert said in err


def test_a_config_that_is_not_there(run, tmp_path):
    code, _, err = run("plan", "--config", tmp_path / "none.json")
    assert (code, err) == (1, f"error: {tmp_path}/none.json: No such file or directory\n")

"""`python -m bench.ranks_plan`: the simulation compared with closed formulas and with measurements, and the command."""

import itertools
import json
import math
import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from bench import ranks_model as ranks
from bench import ranks_plan
from bench.ranks_model import DRIVES, LINKS, Fleet, Stage, at_least, iteration, parse_link, plan_ranks, simulate
from csd_optim import CSDValueError
from csd_optim.planning.advice import PlanRequest
from csd_optim.planning.model import Host
from csd_optim.rates import Rates

GBIT = 1e9 / 8
PAGE = Path(__file__).parents[2] / "docs/plan.md"


def request(params=7e9, devices=4, drive=5e9, cpu=1.4e9, **gpu):
    """Return a request with drives that read and write `drive` bytes per second at once."""
    return PlanRequest(int(params), devices, Host(update=cpu), drive=Rates(drive, drive, drive, on_host=True), **gpu)


FREE = {"drive": math.inf, "cpu": math.inf}  # infinitely fast owners


# ---- closed formulas -----------------------------------------------------------------


def moved(way, n, m, s):
    """Return the bytes of a step on the links of a trainer and of an owner, each way, for s bytes of parameters."""
    among, share, at_owner = s * (n - 1) / n, s / n, s * math.ceil(n / m) / n
    return {
        "adamw": (2 * among, 0),
        "local": (3 * among, 0),
        "local hook": (2 * among, 0),
        "owners": (3 * among + share, at_owner),
        "owners hook": (2 * among + share, at_owner),
    }[way]


@pytest.mark.parametrize("way", ranks.WAYS)
@pytest.mark.parametrize(("n", "m"), [(1, 1), (4, 1), (8, 3), (125, 16)])
def test_bytes_per_link(way, n, m):
    found = plan_ranks(request(1e9), Fleet(n, m, 3e9, 12e9))
    row = next(row for row in found["ways"] if row["way"] == way)
    trainer, owner = moved(way, n, m, 2e9)
    wanted = {"trainer out": trainer, "trainer in": trainer, "owner in": owner, "owner out": owner}
    assert {link: row["bytes"].get(link, 0) for link in LINKS} == pytest.approx(wanted)
    assert row["busy"]["trainer out"] == pytest.approx(trainer / 3e9)
    assert row["busy"].get("owner in", 0) == pytest.approx(owner / 12e9)
    share = {"adamw": None, "local": 1 / n, "local hook": 1 / n}.get(way, math.ceil(n / m) / n)
    assert row["busy"].get(DRIVES) == (pytest.approx(24e9 * share / 20e9) if share else None)


@pytest.mark.parametrize("way", ranks.WAYS)
def test_no_simulation_is_below_the_formula(way):
    fleets = [Fleet(*f) for f in itertools.product((4, 7, 64), (1, 4), (1e9, 50e9), (1e9, 50e9))]
    for fleet, backward, drive in itertools.product(fleets, (0, 3.0), (1e9, math.inf)):
        r = request(1e9, drive=drive, forward=backward / 2, backward=backward)
        assert at_least(way, r, fleet) * (1 - 1e-9) <= iteration(way, r, fleet)


@pytest.mark.parametrize("way", ranks.WAYS)
@pytest.mark.parametrize(
    ("bound", "fleet", "made"),
    [
        ("trainer", Fleet(8, 2, 1e8, 1e12), FREE),
        ("owner", Fleet(8, 2, 1e12, 1e8), FREE),
        (DRIVES, Fleet(8, 2, 1e12, 1e12), {"drive": 1e8}),
        ("update", Fleet(8, 2, 1e12, 1e12), {"cpu": 1e7, "drive": math.inf}),
        ("compute", Fleet(8, 2, 1e12, 1e12), {"forward": 10.0, "backward": 20.0} | FREE),
    ],
)
def test_simulation_is_the_formula_where_one_thing_dominates(way, bound, fleet, made):
    r = request(1e9, **made)
    busy = ranks.busy(way, r, fleet)
    name = max(busy, key=lambda name: busy[name])
    if not name.startswith(bound):
        assert way in ranks.BESIDE  # ways without owners
        return
    assert iteration(way, r, fleet) == pytest.approx(at_least(way, r, fleet), rel=0.05)


# ---- the simulation ------------------------------------------------------------------


def test_simulation_by_hand():
    fleet = Fleet(2, 1, 1.0, 1.0)
    a, b = Stage("a", {"trainer out": 4.0}, {}), Stage("b", {"owner in": 8.0}, {"update": 2.0})
    assert simulate([a], fleet, [0, 0]) == 4  # one after another
    assert simulate([a], fleet, [0, 10]) == 12  # the second comes late
    assert simulate([a, b], fleet, [0, 0]) == 10  # the second waits for the owner from 4 to 6
    assert simulate([a, replace(b, after=0)], fleet, [0, 0]) == 12
    assert simulate([replace(a, window=1), b], fleet, [0, 0]) == 10
    assert simulate([a, b, Stage("e", {"trainer in": 1.0}, {}, after=0)], fleet, [0, 0]) == 10.5
    back = Stage("c", {"trainer out": 4.0}, {})  # as the link is busy with other buckets: 0 to 4, then 4 to 8
    assert simulate([a, back], fleet, [0, 0]) == 8
    assert simulate([a, Stage("d", {"trainer in": 4.0}, {})], fleet, [0, 0]) == 6  # it works both ways at once


def test_what_waits():
    """Gradients are reduced in backward; all else comes after it."""
    r, fleet = request(1e9, forward=1.0, backward=4.0, drive=3e9, cpu=math.inf), Fleet(4, 2, 1e12, 1e12)
    update = 12e9 * 2 / (2 * 4 * 3e9)
    for way in ranks.OWNERS:
        assert iteration(way, r, fleet) == pytest.approx(1 + 4 + update, rel=0.01)
        assert iteration(way, replace(r, accumulate=3), fleet) == pytest.approx(15 + update, rel=0.01)
        assert iteration(way, r, replace(fleet, owners=3)) == pytest.approx(1 + 4 + update, rel=0.01)  # 2, 1 and 1
        narrow = replace(fleet, owner_link=1e9)
        free = request(1e9, forward=1.0, backward=4.0, **FREE)
        assert iteration(way, free, narrow) == pytest.approx(1 + 4 + 2e9 / 2 / 1e9, rel=0.04)  # both ways at once


def test_one_trainer_with_several_owners():
    """Their drives and links add up; of three owners of two trainers, one trainer has one."""
    r = request(1e9, forward=1.0, backward=4.0, drive=3e9, cpu=math.inf)
    update = 12e9 * 2 / (4 * 3e9)
    for n, m, part in ((1, 1, 1), (1, 2, 1 / 2), (1, 3, 1 / 3), (2, 3, 1 / 2), (2, 4, 1 / 4)):
        found = iteration("owners", r, Fleet(n, m, 1e12, 1e12))
        assert found == pytest.approx(5 + update * part, rel=0.01)
        free = request(1e9, forward=1.0, backward=4.0, **FREE)
        assert iteration("owners", free, Fleet(n, m, 1e12, 1e9)) == pytest.approx(5 + 2 * part, rel=0.04)


def test_measured_on_paced_links():
    """Four trainers with 400 Mb/s, 20 MB: an all-reduce's measured time, to which nothing was fitted."""
    found = iteration("adamw", request(10e6, **FREE), Fleet(4, 1, 0.4 * GBIT, 0.4 * GBIT))
    assert 0.75 * 0.64 <= found <= 0.64


# ---- what is advised -----------------------------------------------------------------


def test_how_many_owners_are_enough():
    r, fleet = request(7e9, forward=2.0, backward=4.0), Fleet(64, 1, 100 * GBIT, 100 * GBIT)
    for way in ranks.OWNERS:
        enough = plan_ranks(r, fleet)["enough_owners"][way]
        free = request(7e9, forward=2.0, backward=4.0, **FREE)
        without = iteration(way, free, replace(fleet, owner_link=1e30))
        slower, faster = (iteration(way, r, replace(fleet, owners=n)) for n in (enough - 1, enough))
        assert faster <= ranks.HIDDEN * without < slower
    assert ranks.enough_owners("owners", request(1e12, drive=1e6), fleet) is None


def test_how_many_drives_in_the_trainers_are_as_fast():
    r, fleet = request(7e9), Fleet(8, 4, 200 * GBIT, 100 * GBIT)
    for way, beside in (("owners", "local"), ("owners hook", "local hook")):
        drives = plan_ranks(r, fleet)["drives_per_trainer"][way]
        ours = iteration(way, r, fleet)
        few, many = (iteration(beside, replace(r, devices=drives + k), fleet) for k in (-1, 0))
        assert many <= ours < few
    assert ranks.drives_per_trainer("owners", request(7e9, drive=1e3, devices=128), Fleet(1, 1, 1e30, 1e30)) is None


@pytest.mark.parametrize(
    ("r", "fleet", "said"),
    [
        (request(), Fleet(0, 1, 1, 1), "trainers: 0"),
        (request(), Fleet(1, 0, 1, 1), "owners: 0"),
        (request(), Fleet(1, 1, 0, 1), "trainer_link 0"),
        (request(), Fleet(1, 1, 1, -1), "owner_link -1"),
        (request(), Fleet(2, 10**6 + 1, 1, 1), "owners: 1000001"),
        (replace(request(), topk=0.01), Fleet(1, 1, 1, 1), "topk: 0.01"),
        (replace(request(), devices=0), Fleet(1, 1, 1, 1), "devices: 0"),
    ],
)
def test_refused(r, fleet, said):
    with pytest.raises(CSDValueError, match=re.escape(said)):
        plan_ranks(r, fleet)


# ---- the command ---------------------------------------------------------------------

COMMAND = "--params 7B --devices 4 --cpu 1.4G/s --trainers 8 --owners 2 --trainer-link 25Gb/s --owner-link 100Gb/s"


@pytest.fixture
def plan(capsys, monkeypatch):
    """A function that runs the command in this process. It returns (exit code, stdout, stderr)."""

    def plan(*arguments):
        monkeypatch.setattr("sys.argv", ["bench.ranks_plan", *arguments])
        try:
            ranks_plan.main()
        except SystemExit as e:
            return e.code, *capsys.readouterr()
        return 0, *capsys.readouterr()

    return plan


def test_links_are_parsed():
    assert parse_link("25Gb/s") == 25 * GBIT == parse_link("25 Gbit/s")
    assert (parse_link("3GB/s"), parse_link("400Mb/s"), parse_link("1kb/s")) == (3e9, 50e6, 125)
    for text in ("25Gbps", "25G", "Gb/s", "1.2.3Gb/s", "25gb"):
        with pytest.raises(CSDValueError, match="25Gb/s"):
            parse_link(text)


def test_command_for_programs(plan):
    code, out, err = plan(*shlex.split(COMMAND), "--json")
    assert (code, err.strip()) == (0, "")
    found = json.loads(out, parse_constant=pytest.fail)  # no Infinity, no NaN
    assert found["schema"] == "csd_optim.bench.ranks_plan/2"
    asked = found["request"]
    assert (asked["trainers"], asked["owners"], asked["devices"], asked["params"]) == (8, 2, 4, 7e9)
    assert (asked["trainer_link"], asked["owner_link"]) == (25 * GBIT, 100 * GBIT)
    assert [row["way"] for row in found["ways"]] == list(ranks.WAYS)
    wanted = plan_ranks(PlanRequest(int(7e9), 4, Host(update=1.4e9)), Fleet(8, 2, 25 * GBIT, 100 * GBIT))
    assert found["ways"] == json.loads(json.dumps(wanted["ways"]))


def test_command_for_people(plan):
    code, out, err = plan(*shlex.split(COMMAND), "--forward", "2", "--backward", "4")
    assert (code, err.strip()) == (0, "")
    for text in (
        "8 trainers, 2 owners",
        "25 Gb/s each way; forward 2 s, backward 4 s",
        "the same, csd_optim.push reduces ",
        "the trainers' links, out",
        "38.5 GB",
        "enough ",
    ):
        assert text in out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--trainer-link 25Gbps", "Invalid rate: '25Gbps'"),
        ("--owners 0", "Invalid owners"),
        ("--devices 0", "Invalid devices"),
        ("--params many", "no number of parameters"),
        ("--optimizer CSDMuon", "has no steps of two passes"),
    ],
)
def test_wrong_commands(plan, arguments, said):
    code, out, err = plan(*shlex.split(COMMAND), *shlex.split(arguments))
    assert (code, out) == (2, "")
    assert said in err


ROW = re.compile(r"^\| `(--params [^`]+)` \| (.+) \|$", re.M)


@pytest.mark.parametrize(("options", "cells"), ROW.findall(PAGE.read_text()))
def test_the_table_of_the_page(plan, options, cells):
    code, out, _ = plan(*shlex.split(options), "--cpu", "1.4G/s", "--json")
    assert code == 0
    rows = {row["way"]: row for row in json.loads(out)["ways"]}
    wanted = [f"{rows[way]['iteration']:.1f}" for way in ranks.WAYS]
    assert cells.split(" | ") == wanted


def test_the_page_has_a_table():
    assert [re.search("--trainers ([0-9]+)", options)[1] for options, _ in ROW.findall(PAGE.read_text())] == [
        "8",
        "125",
        "125",
        "1000",
    ]

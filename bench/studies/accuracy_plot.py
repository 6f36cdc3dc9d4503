"""The figure of bench/studies/accuracy.py. The panels of a task depend on its runs:

* With weights at several marks: the drift over time, and the mean of sqrt(exp_avg_sq).
* With Top-K on fp32 states: accuracy against bytes pushed.
* Otherwise: how far each variant's accuracy is from AdamW's with the same seed.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from bench.studies.accuracy_training import ADAMW, DENSE, EIGHT_BIT, NUDGED, TOP_K, TORCHAO, Row

Found = dict[str, Row]  # the rows of a task, by variant
COLOURS = {
    ADAMW.name: "black",
    NUDGED.name: "tab:gray",
    DENSE.name: "tab:blue",
    EIGHT_BIT[0].name: "tab:purple",
    EIGHT_BIT[1].name: "tab:pink",
    TORCHAO.name: "tab:orange",
}


def plot(rows: list[Row], path: Path) -> None:
    """Write the figure: the panels of all tasks in two columns."""
    panels: list[Callable[[Axes], None]] = []
    for task in dict.fromkeys(r["task"] for r in rows):
        found = {r["variant"]: r for r in rows if r["task"] == task}
        if "marks" in found[ADAMW.name]:
            panels += [partial(drift_over_time, task, found), partial(root_over_time, task, found)]
        elif found.keys() & {v.name for v in TOP_K}:
            panels.append(partial(against_bytes, task, found))
        else:
            panels.append(partial(differences, task, found))
    height = math.ceil(len(panels) / 2)
    figure, grid = plt.subplots(height, 2, figsize=(10, 1 + 3 * height), layout="constrained", squeeze=False)
    named = {}
    for axis, panel in zip(grid.flat, panels, strict=False):
        panel(axis)
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
        named.update({label: handle for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)})
    for axis in grid.flat[len(panels) :]:
        axis.set_axis_off()
    figure.legend(named.values(), named.keys(), loc="outside lower center", ncols=4, frameon=False)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def against_bytes(task: str, found: Found, axis: Axes) -> None:
    """Plot accuracy against bytes pushed: mean and range over seeds."""
    adamw = found[ADAMW.name]["accuracy"]
    axis.axhspan(min(adamw), max(adamw), color="tab:gray", alpha=0.3, lw=0, label=ADAMW.name)
    axis.axhline(statistics.fmean(adamw), color="tab:gray", lw=1)
    lines = {
        "dense": ("tab:blue", "s", [DENSE]),
        "Top-K with error feedback": ("tab:green", "o", [v for v in TOP_K if v.error_feedback]),
        "8-bit states": ("tab:purple", "D", EIGHT_BIT),
        "Top-K, what is not sent is dropped": ("tab:red", "v", [v for v in TOP_K if not v.error_feedback]),
    }
    for label, (colour, marker, variants) in lines.items():
        if own := [found[v.name] for v in variants if v.name in found]:
            pushed = [r["link_bytes_per_param"]["push"] for r in own]
            means = [statistics.fmean(r["accuracy"]) for r in own]
            error = [
                [m - min(r["accuracy"]) for m, r in zip(means, own, strict=True)],
                [max(r["accuracy"]) - m for m, r in zip(means, own, strict=True)],
            ]
            axis.errorbar(pushed, means, error, color=colour, marker=marker, ms=5, lw=1, capsize=3, label=label)
    axis.set(title=f"{task}: mean and range over seeds", xscale="log", ylabel="accuracy, %")
    axis.set_xlabel("gradient bytes per parameter and step")
    axis.set_xticks(ticks := [0.05, 0.1, 0.2, 0.5, 1, 2], [f"{t:g}" for t in ticks])
    axis.minorticks_off()
    axis.set_xlim(0.04, 2.6)


def differences(task: str, found: Found, axis: Axes) -> None:
    """Plot each variant's difference to AdamW: a dot per seed, and a line at the mean."""
    adamw = found[ADAMW.name]["accuracy"]
    spread = statistics.stdev(adamw) if len(adamw) > 1 else 0.0
    axis.axvspan(-spread, spread, color="tab:gray", alpha=0.25, lw=0, label="AdamW from seed to seed: ± 1 deviation")
    axis.axvline(0, color="tab:gray", lw=1)
    for side in (-1, 1):
        by_chance = "standard error of one accuracy, by its held-out examples" if side > 0 else None
        axis.axvline(side * found[ADAMW.name]["held_out_noise"], color="tab:gray", lw=1, ls=":", label=by_chance)
    others = [name for name in found if name != ADAMW.name]
    for at, name in enumerate(others):
        colour, difference = COLOURS.get(name, "tab:green"), found[name]["difference"]
        axis.plot(difference, [at] * len(difference), "o", color=colour, ms=5, alpha=0.6, mew=0)
        axis.plot(statistics.fmean(difference), at, "|", color=colour, ms=14, mew=2)
    axis.set(title=task, xlabel="accuracy minus AdamW's, points")
    axis.xaxis.set_major_locator(MaxNLocator(6))
    axis.set_yticks(range(len(others)), others)
    axis.set_ylim(len(others) - 0.5, -0.5)


def drift_over_time(task: str, found: Found, axis: Axes) -> None:
    over_time(found, "drift_over_time", [n for n in found if n != ADAMW.name], axis)
    axis.set(title=f"{task}: drift", ylabel="distance from AdamW / AdamW's way")


def root_over_time(task: str, found: Found, axis: Axes) -> None:
    over_time(found, "mean_root", list(found), axis)
    axis.set(title=f"{task}: size of recent gradients", ylabel="mean of sqrt(exp_avg_sq)")


def over_time(found: Found, key: str, variants: list[str], axis: Axes) -> None:
    """Plot a figure over time, a line per seed. Dashed lines leave visible what they cover, as curves may coincide."""
    for name in variants:
        style = (0, (4, 3)) if name in {v.name for v in EIGHT_BIT} else "-"
        for i, (marks, values) in enumerate(zip(found[name]["marks"], found[name][key], strict=True)):
            label = None if i else name
            axis.plot(marks, values, ls=style, color=COLOURS.get(name, "tab:green"), lw=1.4, alpha=0.8, label=label)
    axis.set(xlabel="steps", yscale="log")

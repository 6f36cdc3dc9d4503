"""The figure of bench/accuracy.py."""

from __future__ import annotations

import math
import statistics
from pathlib import Path

from matplotlib import pyplot as plt

from bench.accuracy_training import ADAMW, DENSE, EIGHT_BIT, TOP_K, Row


def plot(rows: list[Row], path: Path) -> None:
    """Accuracy against bytes pushed, a panel for each task."""
    tasks = list(dict.fromkeys(r["task"] for r in rows))
    figure, grid = plt.subplots(
        math.ceil(len(tasks) / 2),
        2,
        figsize=(9, 1 + 3 * math.ceil(len(tasks) / 2)),
        layout="constrained",
        squeeze=False,
    )
    lines = {
        "dense": ("tab:blue", "s", [DENSE]),
        "Top-K with error feedback": ("tab:green", "o", [v for v in TOP_K if v.error_feedback]),
        "8-bit states": ("tab:purple", "D", EIGHT_BIT),
        "Top-K, what is not sent is dropped": ("tab:red", "v", [v for v in TOP_K if not v.error_feedback]),
    }
    for axis, task in zip(grid.flat, tasks, strict=False):
        found = {r["variant"]: r for r in rows if r["task"] == task}
        adamw = found[ADAMW.name]["accuracy"]
        axis.axhspan(min(adamw), max(adamw), color="tab:gray", alpha=0.3, lw=0, label="AdamW fp32")
        axis.axhline(statistics.fmean(adamw), color="tab:gray", lw=1)
        for label, (colour, marker, variants) in lines.items():
            if own := [found[v.name] for v in variants if v.name in found]:
                pushed = [r["link_bytes_per_param"]["push"] for r in own]
                means = [statistics.fmean(r["accuracy"]) for r in own]
                error = [
                    [m - min(r["accuracy"]) for m, r in zip(means, own, strict=True)],
                    [max(r["accuracy"]) - m for m, r in zip(means, own, strict=True)],
                ]
                axis.errorbar(pushed, means, error, color=colour, marker=marker, ms=5, lw=1, capsize=3, label=label)
        axis.set(title=task, xscale="log", ylabel="accuracy, %")
        axis.set_xticks(ticks := [0.05, 0.1, 0.2, 0.5, 1, 2], [f"{t:g}" for t in ticks])
        axis.minorticks_off()
        axis.set_xlim(0.04, 2.6)
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    for axis in grid.flat[len(tasks) :]:
        axis.set_axis_off()
    figure.suptitle("Held-out accuracy against gradient bytes per parameter and step: mean and range over seeds")
    figure.legend(*grid.flat[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
    figure.savefig(path, dpi=120)
    plt.close(figure)

"""Shows what the trainings of bench/big.py reported: tables, a plot and a summary."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from rich.table import Table

from bench.demo import RATED, megabytes, table
from csd_optim.devices.spec import days_left

KINDS = {  # kinds of memory and their colours, from the bottom of the plot to the top
    "Python, torch, transformers": "#b8b8b8",
    "parameters": "#1f5fa8",
    "gradients, activations": "#2a8f3c",
    "AdamW's moments, CSDAdam's buffers": "#e8871e",
}


@dataclass
class Run:
    """What one process reported. Times are seconds since the first process began."""

    name: str
    began: float
    ended: float = 0.0
    ending: str = ""  # why it ended early; empty if it did not
    facts: dict[str, Any] = field(default_factory=dict)
    losses: dict[int, float] = field(default_factory=dict)
    seconds: list[dict[str, float]] = field(default_factory=list)  # per step, by part
    memory: list[dict[str, float]] = field(default_factory=list)  # at times `at`: resident bytes, bytes of states
    stats: dict[str, Any] = field(default_factory=dict)  # CSDAdam.stats() of the last step
    checksum: int | None = None  # of the parameters before the step in which a process is killed

    @property
    def peak(self) -> float:
        return max((m["resident"] for m in self.memory), default=0.0)

    def kinds(self, params: int) -> list[list[float]]:
        """Return the bytes of each of KINDS over time. Gradients and activations are the rest: nothing counts them."""
        rows = []
        for m in self.memory:
            base = min(self.facts["base"], m["resident"])
            weights = min(2 * params, m["resident"] - base)
            states = min(m["states"], m["resident"] - base - weights)
            rows.append([base, weights, m["resident"] - base - weights - states, states])
        return [*map(list, zip(*rows, strict=True))]


def plot(runs: dict[str, Run], params: int, limit: float, path: Path) -> None:
    """Plot memory by kind over time (top) and the losses (bottom)."""
    figure, (upper, lower) = plt.subplots(2, 1, figsize=(10, 7.5), height_ratios=(1.6, 1), layout="constrained")
    top = 1.3 * limit / 1e9
    for run in runs.values():
        at = [m["at"] for m in run.memory]
        gigabytes = [[n / 1e9 for n in kind] for kind in run.kinds(params)]
        upper.stackplot(at, gigabytes, colors=KINDS.values(), labels=KINDS if run.name == "AdamW" else ())
        upper.text(run.began, 0.97 * top, f" {run.name}", va="top", weight="bold")
        if run.name != "AdamW":
            upper.axvline(run.began, color="#666666", lw=0.8, ls=":")
        if run.ending:
            what, end = "kill -9" if run.name == "killed" else "refused", (at[-1], run.memory[-1]["resident"] / 1e9)
            upper.plot(*end, "x", color="#c00000", ms=10, mew=2.5, clip_on=False)
            upper.annotate(what, end, (8, 6), textcoords="offset points", color="#c00000", weight="bold")
    upper.axhline(limit / 1e9, color="#c00000", lw=1.2, ls="--", label=f"limit of each process: {megabytes(limit)}")
    upper.set(xlabel="seconds", ylabel="resident memory (GB)", ylim=(0, top), xlim=(0, runs["resumed"].ended))
    upper.legend(frameon=False, fontsize=9, loc="center right")
    title = f"Llama, {params / 1e9:.2f} B parameters in bf16, Hugging Face's code: memory of each training"
    upper.set_title(title, fontsize=11)
    looks = {
        "CSDAdam": {"color": "#e8871e", "lw": 6, "alpha": 0.5, "label": "not killed"},
        "killed": {"color": "#1f5fa8", "marker": "o", "label": "killed"},
        "resumed": {"color": "#2a8f3c", "marker": "x", "ms": 8, "mew": 2, "label": "resumed"},
    }
    for name, look in looks.items():
        lower.plot([*runs[name].losses], [*runs[name].losses.values()], **look)
    lower.axvline(max(runs["killed"].losses), color="#c00000", lw=1, ls=":", label="kill -9")
    lower.set(xlabel="step", ylabel="loss (nats per byte)")
    lower.xaxis.get_major_locator().set_params(integer=True)
    lower.legend(frameon=False)
    for axes in (upper, lower):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def runs_table(runs: dict[str, Run]) -> Table:
    made = table("Four processes", "", "most memory", "steps", "last loss", "seconds", "ending")
    for run in runs.values():
        steps = f"{min(run.losses)} to {max(run.losses)}" if run.losses else "none"
        loss = f"{[*run.losses.values()][-1]:.4f}" if run.losses else ""
        end = run.ending if run.name == "killed" else "out of memory" if run.ending else "done"
        made.add_row(run.name, megabytes(run.peak), steps, loss, f"{run.ended - run.began:.0f}", end)
    return made


def parts_table(run: Run, params: int) -> Table:
    """Return a table of where the time and bytes of CSDAdam's step go."""
    made = table("A step of CSDAdam, median", "", "seconds", "bytes", "bytes per parameter")
    stats = run.stats
    for part in ("forward", "backward", "step"):
        name = {"backward": "backward, including the update", "step": "step()"}.get(part, part)
        made.add_row(name, f"{statistics.median(s[part] for s in run.seconds):.1f}", "", "")
    made.add_section()
    kinds = {
        "read": ("drive reads", stats["seconds"]["read"], stats["flash_read_bytes"]),
        "update": ("CPU decodes, updates, encodes", stats["seconds"]["update"], 0),
        "write": ("drive writes", stats["seconds"]["write"], stats["flash_write_bytes"]),
        "push": ("gradients to the engine", None, stats["push_bytes"]),
        "pull": ("parameters back", None, stats["pull_bytes"]),
    }
    for name, seconds, nbytes in kinds.values():
        each = f"{nbytes / params:.2f}" if nbytes else ""
        made.add_row(name, "" if seconds is None else f"{seconds:.1f}", megabytes(nbytes) if nbytes else "", each)
    return made


def apart(runs: dict[str, Run]) -> float:
    """Return the largest difference between the losses of the killed and resumed training and of the other one."""
    whole = runs["CSDAdam"].losses
    return max(abs(loss - whole[s]) for name in ("killed", "resumed") for s, loss in runs[name].losses.items())


def conclusion(runs: dict[str, Run], params: int, limit: float, took: float) -> str:
    whole, resumed = runs["CSDAdam"], runs["resumed"]
    written = whole.stats["written_bytes"]
    days = days_left(int(RATED), written, sum(sum(s.values()) for s in whole.seconds))
    losses = "Its losses are those of the training without a kill, to the last bit"
    if apart(runs):
        losses = f"Its losses are within {apart(runs):.4f} of those of the training without a kill: torch's matrix "
        losses += "products, and with them the forward, had other bits in another process"
    return (
        f"\n[bold]Shown in {took:.0f} s:[/] {params / 1e9:.2f} B parameters trained with at most "
        f"{megabytes(whole.peak)} of memory; for torch.optim.AdamW {megabytes(limit)} are not enough. Killed in step "
        f"{max(runs['killed'].losses)} and started again, it continued at step {min(resumed.losses)}, with the same "
        f"parameters to the last bit. {losses}. Wear: {megabytes(written)} written in "
        f"{len(whole.seconds)} steps; at this rate, without a pause, a drive rated for {RATED / 1e12:.0f} TB "
        f"would last {days:,.0f} days. Only steps wear it: with larger batches it lasts longer."
    )

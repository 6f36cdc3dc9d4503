"""What bench/big.py was told of each training, as tables, a plot and a sentence."""

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

KINDS = {  # colours of the kinds of memory, from below
    "Python, torch, transformers": "#b8b8b8",
    "parameters": "#1f5fa8",
    "gradients, activations": "#2a8f3c",
    "AdamW's moments, CSDAdam's buffers": "#e8871e",
}


@dataclass
class Run:
    """What one process told. Times are seconds since the first one began."""

    name: str
    began: float
    ended: float = 0.0
    ending: str = ""  # what ended it before its time
    facts: dict[str, Any] = field(default_factory=dict)
    losses: dict[int, float] = field(default_factory=dict)
    seconds: list[dict[str, float]] = field(default_factory=list)  # of each step, by part
    memory: list[dict[str, float]] = field(default_factory=list)  # at times `at`: bytes resident, and of states
    stats: dict[str, Any] = field(default_factory=dict)  # of the last step
    checksum: int | None = None  # of the parameters before the step in which one is killed

    @property
    def peak(self) -> float:
        return max((m["resident"] for m in self.memory), default=0.0)

    def kinds(self, params: int) -> list[list[float]]:
        """Bytes of each of KINDS at each time. Nobody counts gradients and activations: they are what is left."""
        rows = []
        for m in self.memory:
            base = min(self.facts["base"], m["resident"])
            weights = min(2 * params, m["resident"] - base)
            states = min(m["states"], m["resident"] - base - weights)
            rows.append([base, weights, m["resident"] - base - weights - states, states])
        return [*map(list, zip(*rows, strict=True))]


def plot(runs: dict[str, Run], params: int, limit: float, path: Path) -> None:
    """Memory by kind over time above, the losses below."""
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
    made = table("Four processes", "", "most memory", "steps", "last loss", "seconds", "its end")
    for run in runs.values():
        steps = f"{min(run.losses)} to {max(run.losses)}" if run.losses else "none"
        loss = f"{[*run.losses.values()][-1]:.4f}" if run.losses else ""
        end = run.ending if run.name == "killed" else "refused: no memory" if run.ending else "done"
        made.add_row(run.name, megabytes(run.peak), steps, loss, f"{run.ended - run.began:.0f}", end)
    return made


def parts_table(run: Run, params: int) -> Table:
    """Of CSDAdam's training: where a step's time and bytes go."""
    made = table("A step of CSDAdam, median", "", "seconds", "bytes", "bytes per parameter")
    stats = run.stats
    for part in ("forward", "backward", "step"):
        name = {"backward": "backward, with the update in it", "step": "step()"}.get(part, part)
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
    """The largest difference between the losses of the training that was killed and of the one that was not."""
    whole = runs["CSDAdam"].losses
    return max(abs(loss - whole[s]) for name in ("killed", "resumed") for s, loss in runs[name].losses.items())


def conclusion(runs: dict[str, Run], params: int, limit: float, took: float) -> str:
    whole, resumed = runs["CSDAdam"], runs["resumed"]
    written = whole.stats["written_bytes"]
    days = days_left(int(RATED), written, sum(sum(s.values()) for s in whole.seconds))
    losses = "Its losses are those of the training that nobody killed, to the last bit"
    if apart(runs):
        losses = f"Its losses are within {apart(runs):.4f} of those of the training that nobody killed: torch's matrix "
        losses += "products, and so a forward, had other bits in another process"
    return (
        f"\n[bold]Shown in {took:.0f} s:[/] {params / 1e9:.2f} B parameters trained with at most "
        f"{megabytes(whole.peak)} of memory, where torch.optim.AdamW is refused {megabytes(limit)}. Killed in step "
        f"{max(runs['killed'].losses)} and started again, it went on at step {min(resumed.losses)}, with the same "
        f"parameters to the last bit. {losses}. Wear: {megabytes(written)} written in "
        f"{len(whole.seconds)} steps; going on like this without a pause, a drive rated for {RATED / 1e12:.0f} TB "
        f"would last {days:,.0f} days. It is steps that wear it: with larger batches it lasts longer."
    )

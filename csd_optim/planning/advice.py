"""A plan for a user's model and drives: times (from model.py), space, wear, costs, break-even, advice."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from ..compression.policy import DENSE_FROM
from ..devices.backends import BACKENDS
from ..devices.spec import DEFAULT_BUFFERS
from ..devices.units import parse_rate
from ..errors import CSDUnavailableError, CSDValueError
from ..rates import Rates
from ..store.sections import FP32, STATE_DTYPES
from .costs import costs_of
from .model import (
    ADAMS,
    DRIVES,
    ITEM_BYTES,
    PUBLISHED_UPDATE,
    SMARTSSD,
    VARIANTS,
    ZERO_UPDATE,
    Host,
    Orthogonalization,
    Prediction,
    predict,
    published_update,
    slot_bytes,
    tiles_per_device,
    traffic,
)

MOST_DEVICES = 64  # the search for break-even ends here
WORTH_OVERLAP = 0.98  # overlap is worth it if an iteration takes at most this share of its time without


# ---- a plan ----------------------------------------------------------------------


@dataclass(frozen=True)
class PlannedOptimizer:
    """The optimizer of a plan: everything that determines the size of the states, and which devices can update them."""

    name: str = "CSDAdam"
    options: tuple[str, ...] = ()  # options that add a state
    rule: str = "adamw"
    sections: float = ADAMS  # including the master; with groups of other rules the mean over all parameters
    groups: tuple[tuple[str, float], ...] = ()  # of other rules, as "sgd,momentum", with their shares of the parameters

    def __str__(self) -> str:
        others = "".join(f", {share:.0%} {text.replace(',', ' with ', 1)}" for text, share in self.groups)
        return self.name + (f"({', '.join(self.options)})" if self.options else "") + others

    @property
    def rules(self) -> tuple[str, ...]:
        return (self.rule, *(text.partition(",")[0] for text, _ in self.groups))


@dataclass(frozen=True)
class PlanRequest:
    """The model, devices and options that a plan is for."""

    params: int
    devices: int
    host: Host
    on: str = "drive"  # or "csd": the kind of device to plan for; the other kind is for comparison
    drive: Rates = DRIVES["gen4"]
    csd: Rates = SMARTSSD
    dtype: str = "bf16"
    optimizer: PlannedOptimizer = PlannedOptimizer()
    state_dtype: str = FP32  # or "8bit": how CSDAdam's states are kept
    topk: float | None = None
    error_feedback: bool = True
    orthogonalization: Orthogonalization | None = None  # of the groups whose rule is muon
    forward: float = 0.0  # seconds of the GPU for one batch
    backward: float = 0.0
    accumulate: int = 1  # batches per step
    tbw: float | None = None  # a device's endurance rating in bytes
    prices: dict[str, float] = field(default_factory=dict)  # given prices, as in costs.PRICES
    watts: dict[str, float] = field(default_factory=dict)  # given watts, as in costs.WATTS
    free: float | None = None  # free bytes of the fullest device
    measured: bool = False  # whether the devices' rates were measured
    cpu_measured: bool = False  # whether host.update was measured, on this machine

    @property
    def variant(self) -> str:
        return "csdadam_topk" if self.topk else "csdadam"

    def to_dict(self) -> dict[str, Any]:
        """Return plain values. A plain CSDAdam as `optimizer`, and None as `orthogonalization`, are left out."""
        found = {k: v for k, v in asdict(self).items() if k != "optimizer" or self.optimizer != PlannedOptimizer()}
        if not self.optimizer.groups:
            found.get("optimizer", {}).pop("groups", None)
        if not self.orthogonalization:
            del found["orthogonalization"]
        return found | {"drive": rates_of(self.drive), "csd": rates_of(self.csd)}


def plan(request: PlanRequest, sweep: Sequence[int] = ()) -> dict[str, Any]:
    """Return everything that `csd-optim plan` shows, as plain values; None stands for no bound, or not given.

    `sweep`: further numbers of devices to predict for. Raises CSDValueError.
    """
    check(request)
    r, item = request, ITEM_BYTES[request.dtype]
    rows = _rows(r, r.devices)
    own = next(row for row in rows if row["chosen"])
    states: dict[str, Any] = {"state_dtype": r.state_dtype, "sections": r.optimizer.sections}
    ns = r.orthogonalization
    there: dict[str, Any] = {"on_host": r.on == "drive", "orthogonal": ns.share if ns else 0.0}
    moved = traffic(r.variant, r.params, item_bytes=item, topk=r.topk, **there, **states)
    written, slot = moved["flash"][0] / r.devices, slot_bytes(item_bytes=item, **states)
    tile = math.ceil(r.params / r.devices / tiles_per_device(r.params, r.devices, **states))
    owed = r.error_feedback and r.topk is not None and r.topk < DENSE_FROM
    costs = costs_of(
        r.prices | ({"tbw": r.tbw / 1e12} if r.tbw else {}),
        r.watts,
        on_csd=r.on == "csd",
        devices=r.devices,
        state_bytes=slot * r.params,
        stored_bytes=2 * slot * r.params / r.devices,
        written_bytes=written,
        step=own["step"],
        iteration=own["seconds"],
    )
    steps = costs["tbw_bytes"] / written
    found = {
        "request": r.to_dict(),
        "bytes": {name: {"towards_flash": there, "back": back} for name, (there, back) in moved.items()},
        "capacity_bytes_per_device": 2 * slot * r.params / r.devices,
        "memory_bytes": {
            "parameters": item * r.params,
            "gradients": item * r.params,
            "residuals": 2 * r.params if owed else 0,  # bfloat16
            "buffers": DEFAULT_BUFFERS * slot * tile * r.devices,
            **({"orthogonalization": ns.memory_bytes(r.params, tile)} if ns else {}),
        },
        "predictions": rows,
        "overlap": overlapped(r, own["step"], own["seconds"]),
        "break_even": _break_even(r),
        "wear": {
            "bytes_per_step_and_device": written,
            "bytes_per_day_and_device": written / own["seconds"] * 86400,
            "tbw_bytes": costs["tbw_bytes"],
            "steps": steps,
            "days": steps * own["seconds"] / 86400,
        },
        "costs": costs,
        "advice": _advice(r, own),
        "sweep": [row for n in sweep for row in _rows(r, n)],
    }
    return {name: _plain(value) for name, value in found.items()}


def rates_of(device: Rates) -> dict[str, Any]:
    """Return the rates of a device that a plan uses."""
    return {name: getattr(device, name) for name in ("read", "write", "mixed", "update", "on_host")}


def check(r: PlanRequest) -> None:
    """Raise CSDValueError for the first invalid value."""
    if r.dtype not in ITEM_BYTES:
        raise CSDValueError(f"Invalid dtype: {r.dtype!r}; there are {', '.join(ITEM_BYTES)}")
    if r.state_dtype not in STATE_DTYPES:
        raise CSDValueError(f"Invalid state_dtype: {r.state_dtype!r}; there are {', '.join(STATE_DTYPES)}")
    if r.topk is not None and not 0 < r.topk <= 1:
        raise CSDValueError(f"Invalid topk: {r.topk!r}; it is the share of gradients to send, such as 0.01")
    if r.topk is not None and r.orthogonalization:
        raise CSDValueError(f"Invalid topk: {r.topk!r}; muon needs whole gradients")
    if r.orthogonalization and r.orthogonalization.width < 1:
        raise CSDValueError(f"Invalid width: {r.orthogonalization.width!r}; it is 1 or more")
    for name, least in (("params", 1), ("devices", 1), ("accumulate", 1), ("forward", 0), ("backward", 0)):
        value = getattr(r, name)
        if not (math.isfinite(value) and value >= least):
            raise CSDValueError(f"Invalid {name}: {value!r}; it is {least} or more")
    rates = asdict(r.host) | ({"orthogonalize": r.orthogonalization.rate} if r.orthogonalization else {})
    for name, rate in rates.items():
        if not rate > 0:
            raise CSDValueError(f"Invalid rate: {name} {rate!r}; it is more than 0")


def _predict(r: PlanRequest, variant: str, on: str, devices: int) -> Prediction:
    """Predict `variant` on `devices` plain drives (`on` is "drive") or CSDs ("csd")."""
    device, host = (r.drive if on == "drive" else r.csd), r.host
    if variant == "base":
        # ZeRO-Infinity's states are fp32, so a rate for 8-bit states does not apply.
        host = replace(host, update=min(ZERO_UPDATE, host.update) if r.state_dtype == FP32 else ZERO_UPDATE)
    elif variant in PUBLISHED_UPDATE:
        device = replace(device, update=published_update(variant, r.optimizer.sections))
    gpu = {"forward": r.forward * r.accumulate, "backward": r.backward * r.accumulate}
    return predict(
        variant,
        r.params,
        devices,
        device,
        host,
        item_bytes=ITEM_BYTES[r.dtype],
        topk=r.topk,
        state_dtype=r.state_dtype,
        sections=r.optimizer.sections,
        orthogonalization=r.orthogonalization,
        **gpu,
    )


def _rows(r: PlanRequest, devices: int) -> list[dict[str, Any]]:
    """Return a row for every way to run the step on `devices` devices; the plan's own row has `chosen` set."""
    ours = ["csdadam", "csdadam_topk"] if r.topk else ["csdadam"]
    smart = ["su_o", "su_o_c"] if r.topk else ["su_o"]
    ways = [(v, "drive") for v in ("base", *ours)] + [(v, "csd") for v in (*smart, *ours)]
    rows = []
    for variant, on in ways:
        p = _predict(r, variant, on, devices)
        states = r.state_dtype if variant in ours else FP32
        chosen = (variant, on) == (r.variant, r.on)
        rows.append({**asdict(p), "seconds": p.seconds, "on": on, "state_dtype": states, "chosen": chosen})
    return rows


def overlapped(r: PlanRequest, step: float, seconds: float) -> dict[str, float] | None:
    """Return the seconds of an iteration with `overlap(model)` as "forward", with `backward=True` as "backward".

    `step`, `seconds`: time of the step and of an iteration without overlap. The part of the step that runs beside the
    next forward, or the last backward before it, takes no extra time. Returns None if the GPU's times are not given.
    """
    if not r.forward + r.backward:
        return None
    # With Top-K, or with Muon, nothing happens before step(): backward hides nothing.
    in_step = r.topk or r.orthogonalization
    beside = {"forward": r.forward, "backward": r.forward + (0 if in_step else r.backward)}
    return {how: seconds - min(step, hidden) for how, hidden in beside.items()}


def describe_overlap(r: dict[str, Any], seconds: float, overlap: dict[str, float]) -> str:
    """Return the result of overlapped() as text. `r`: the request. `seconds`: time of an iteration without overlap."""
    forward, backward = overlap["forward"], overlap["backward"]
    if backward > WORTH_OVERLAP * seconds:
        batches = f" of {r['accumulate']}" if r["accumulate"] > 1 else ""
        return f"gains little: {_seconds(seconds - backward)}, as much as fits beside one batch{batches}"
    said = f"an iteration takes {forward:.2f} s with overlap(model), "
    if forward == backward:
        return f"{said}with backward=True as well: {seconds / backward:.2f} times as fast"
    gains = f"{seconds / forward:.2f} and {seconds / backward:.2f} times as fast"
    return f"{said}{backward:.2f} s with backward=True: {gains}"


def optimizer_of(request: dict[str, Any]) -> PlannedOptimizer:
    """Return the optimizer of a plan's request."""
    return PlannedOptimizer(**request.get("optimizer", {}))


def label(row: dict[str, Any], name: str) -> str:
    """Return a readable name of a row. `name`: the optimizer's."""
    states = "" if row["state_dtype"] == FP32 else ", 8-bit,"
    return f"{VARIANTS[row['variant']].replace('CSDAdam', name)}{states} on {KINDS[row['on']].removeprefix('plain ')}"


def _break_even(r: PlanRequest) -> dict[str, int | None]:
    """Return the number of CSDs from which CSDAdam's step is shorter than a step on as many plain drives.

    `base`: than ZeRO-Infinity's step there. `csdadam`: than CSDAdam's. None: not up to MOST_DEVICES.
    """

    def pays(n: int, rival: str) -> bool:
        theirs = _predict(r, rival, "drive", n)
        return _predict(r, r.variant, "csd", n).step < theirs.gradients + theirs.step

    rivals = {"base": "base", "csdadam": r.variant}
    return {name: next((n for n in _counts() if pays(n, rival)), None) for name, rival in rivals.items()}


def _counts() -> range:
    return range(1, MOST_DEVICES + 1)


def _advice(r: PlanRequest, own: dict[str, Any]) -> list[str]:
    """Return sentences about changes that would make the step faster, or would not."""
    said = []
    bound, step, many = own["bound"], own["step"], KINDS[r.on]

    def other(devices: int = r.devices, on: str = r.on, **changes: Any) -> Prediction:
        changed = replace(r, **changes)
        return _predict(changed, changed.variant, on, devices)

    if ns := r.orthogonalization:
        said += _of_orthogonalization(own, ns)
    if bound == "orthogonalize":
        said.append(f"the orthogonalization is the limit: more {many} change nothing")
    elif bound in ("read", "write", "drive") or (bound == "update" and r.on == "csd"):
        said.append(f"with twice as many {many} a step takes {_seconds(other(2 * r.devices).step)}")
        if enough := next((n for n in _counts() if other(n).bound != bound), None):
            there = other(enough)
            said.append(f"from {enough} on it waits for {BOUNDS[there.bound]}: {_seconds(there.step)}")
    elif bound.startswith("gpu"):
        said.append("the GPU's link is the limit: more devices change nothing")
    else:
        what = "CPU" if bound == "update" else "shared link"
        said.append(f"the {what} is the limit: more {many} change nothing")
        if r.on == "drive":
            said.append(f"on as many CSDs a step takes {_seconds(other(on='csd').step)}")
    if r.on == "csd" and not {*r.optimizer.rules} <= (BACKENDS["xrt"].rules or {*r.optimizer.rules}):
        said.append(f"SmartSSDs have no kernel for {r.optimizer} yet")
    if r.topk and other(topk=None).step <= 1.02 * step:
        said.append("Top-K buys no time here: the step does not wait for gradients")
    compute = r.forward + r.backward
    if not compute:
        said.append(
            "--forward and --backward, the GPU's seconds per batch, would show the step's share of an iteration"
        )
    elif step > 0.25 * own["seconds"]:
        batches = math.ceil(4 * step / compute)
        said.append(
            f"the step is {step / own['seconds']:.0%} of an iteration; accumulating {batches} batches makes it a fifth "
            f"(--accumulate {batches})"
        )
    return said


def _of_orthogonalization(own: dict[str, Any], ns: Orthogonalization) -> list[str]:
    """Warn if the orthogonalization takes more than twice as long as the devices."""
    devices, found = max(own["stages"][stage] for stage in ("read", "write", "drive")), own["stages"]["orthogonalize"]
    if found <= 2 * devices:
        return []
    where = "on this CPU" if ns.measured else f"at {ns.rate / 1e12:.3g} TFLOP/s"
    instead = "move the parameters to an accelerator" if ns.measured else "move the parameters to a faster one"
    return [
        f"orthogonalization takes {_seconds(found)} of a {_seconds(own['step'])} step {where}, {_seconds(devices)} of "
        f"I/O; {instead}, or lower ns_steps"
    ]


BOUNDS = {
    "read": "reads from flash",
    "write": "writes to flash",
    "drive": "flash, both ways",
    "update": "the update",
    "orthogonalize": "the orthogonalization",
    "link": "the link to the drives",
    "link down": "the link to the devices",
    "link up": "the link from the devices",
    "gpu link down": "the link from the GPU",
    "gpu link up": "the link to the GPU",
}
KINDS = {"drive": "plain drives", "csd": "CSDs"}


def _seconds(s: float) -> str:
    return f"{s:.1f} s" if s >= 1 else f"{1e3 * s:.0f} ms"


def _plain(value: Any) -> Any:
    """Return `value` with None for infinities and NaN, which JSON does not have."""
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_plain(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


# ---- what people write -----------------------------------------------------------


def parse_rates(text: str, presets: dict[str, Rates], like: Rates) -> Rates:
    """Parse `gen4` or `read=7GB/s,write=5GB/s[,mixed=6GB/s][,update=240M/s]`. Raises CSDValueError.

    `presets`: devices by name. `like`: the device whose rates are taken where the text has none.
    """
    if text in presets:
        return presets[text]
    wrong = CSDValueError(
        f"Invalid rates: {text!r}; name one of {', '.join(presets)}, or write for example read=7GB/s,write=5GB/s"
    )
    given: dict[str, float] = {}
    for part in text.split(","):
        name, _, rate = part.strip().partition("=")
        if name not in ("read", "write", "mixed", "update") or name in given:
            raise wrong
        given[name] = parse_rate(rate, "" if name == "update" else "B")
        if given[name] <= 0:
            raise wrong
    if not {"read", "write"} <= given.keys() or (like.on_host and "update" in given):
        raise wrong
    device = Rates.in_turn(given["read"], given["write"], given.get("update", like.update), like.on_host)
    if (mixed := given.get("mixed", device.mixed)) > device.read + device.write:
        raise CSDValueError(
            f"Invalid rates: {text!r}; mixed, read plus written at once, exceeds the sum of read and write"
        )
    return replace(device, mixed=mixed)


def parse_sweep(text: str) -> range:
    """Parse `devices=1..16`. Raises CSDValueError."""
    match = re.fullmatch(r"\s*devices\s*=\s*([0-9]{1,4})\s*\.\.\s*([0-9]{1,4})\s*", text)
    if not match or not 1 <= int(match[1]) <= int(match[2]) <= 1024:
        raise CSDValueError(f"Invalid sweep: {text!r}; write for example devices=1..16, at most to 1024")
    return range(int(match[1]), int(match[2]) + 1)


def measured(entries: Sequence[dict[str, Any]]) -> Rates:
    """Return the slowest rates among devices. `entries`: as `csd-optim devices --probe` shows them.

    All devices have the same amount of work, so the slowest device counts. Devices on one file system share its speed,
    though each was measured alone. Raises CSDValueError if there are both cards and plain drives, or a device without a
    drive.
    """
    found = []
    places = [entry["storage"]["mounted_at"] for entry in entries if "storage" in entry]
    for entry in entries:
        if problem := entry.get("problem"):
            raise CSDValueError(f"{entry['device']}: {problem}")
        if "speed" not in entry:
            raise CSDValueError(f"'{entry['device']}' has no drive that could be measured")
        share = places.count(entry["storage"]["mounted_at"])
        drive = {k: entry["speed"][f"{k}_bytes_per_second"] / share for k in ("read", "write", "mixed")}
        if card := entry.get("card_speed"):
            # Without P2P, states go through the host, at the rate of the drive or of the DMA.
            read = card["drive_to_card"] or min(drive["read"], card["to_card"])
            write = card["card_to_drive"] or min(drive["write"], card["from_card"])
            found.append(replace(Rates.in_turn(read, write), update=card["kernel"]))
        else:
            found.append(Rates(**drive, on_host=True))
    if len({device.on_host for device in found}) > 1:
        raise CSDValueError("there are both plain drives and cards: plan for one kind at a time")
    slowest = {f.name: min(getattr(d, f.name) for d in found) for f in fields(Rates)}
    return Rates(**slowest)


def count_params(config: Path) -> int:
    """Return the number of parameters of the decoder in a Hugging Face config.json. Raises CSDValueError, OSError."""
    try:
        c = json.loads(config.read_text())
        kind = c["model_type"]
        if kind not in FAMILIES:
            raise CSDValueError(f"{config}: model_type {kind!r} is not one of {', '.join(FAMILIES)}: give --params")
        if kind == "gpt2":
            h, layers, inner = c["n_embd"], c["n_layer"], c.get("n_inner") or 4 * c["n_embd"]
            block = 4 * h * h + 4 * h + 2 * h * inner + h + inner + 4 * h  # attention, MLP, biases, two norms
            return int((c["vocab_size"] + c["n_positions"]) * h + layers * block + 2 * h)
        h, heads = c["hidden_size"], c["num_attention_heads"]
        kv, dim = c.get("num_key_value_heads") or heads, c.get("head_dim") or h // heads
        experts = c.get("num_local_experts", 1) if kind == "mixtral" else 1
        attention = 2 * h * heads * dim + 2 * h * kv * dim
        if kind == "qwen2" or c.get("attention_bias"):
            attention += (heads + 2 * kv) * dim + (h if kind != "qwen2" else 0)  # biases
        if kind == "qwen3":
            attention += 2 * dim  # norms of queries and keys
        mlp = experts * 3 * h * c["intermediate_size"] + (h * experts if kind == "mixtral" else 0)
        tied = c.get("tie_word_embeddings", False)
        block = attention + mlp + 2 * h
        return int((1 if tied else 2) * c["vocab_size"] * h + c["num_hidden_layers"] * block + h)
    except CSDValueError:
        raise
    except (KeyError, TypeError, ValueError) as e:
        missing = f"no {e}" if isinstance(e, KeyError) else "nothing that could be read"
        raise CSDValueError(f"{config}: {missing}; a model's config.json is expected, or give --params") from None


def width_of(config: Path) -> int:
    """Return the width of the model in a Hugging Face config.json that count_params() takes."""
    c = json.loads(config.read_text())
    return int(c["n_embd"] if c["model_type"] == "gpt2" else c["hidden_size"])


FAMILIES = ("gpt2", "llama", "mistral", "mixtral", "qwen2", "qwen3")


def plot(found: dict[str, Any], path: Path) -> None:
    """Plot seconds per iteration over the number of devices. `found`: of plan(), with a sweep.

    Raises CSDUnavailableError without matplotlib.
    """
    try:
        import matplotlib
    except ImportError:
        raise CSDUnavailableError("a plot needs matplotlib: pip install matplotlib") from None
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    lines: dict[str, list[dict[str, Any]]] = {}
    name = optimizer_of(found["request"]).name
    for row in found["sweep"]:
        lines.setdefault(label(row, name), []).append(row)
    figure, axis = plt.subplots(figsize=(8, 5), layout="constrained")
    for name, rows in lines.items():
        style = "--" if rows[0]["on"] == "drive" else "-"
        width = 1.5 if "Top-K" in name else 3.5  # curves often coincide: the lower one stays visible
        x, y = [r["devices"] for r in rows], [r["seconds"] for r in rows]
        axis.plot(x, y, marker=".", label=name, linestyle=style, linewidth=width, alpha=0.8)
    axis.set(xlabel="devices", ylabel="seconds per iteration", yscale="log")
    axis.yaxis.set_major_formatter("{x:g}")
    axis.yaxis.set_minor_formatter("{x:g}")
    axis.set_title(f"{found['request']['params'] / 1e9:.3g} B parameters, {found['request']['dtype']}: predicted")
    axis.legend(fontsize="small")
    axis.grid(which="both", alpha=0.3)
    figure.savefig(path, dpi=120)
    plt.close(figure)

"""The commands' output for people; with `--json`, programs get the same facts."""

from __future__ import annotations

import sys
import time
from collections import Counter
from typing import Any

from rich import box
from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.table import Table

from ..checkpoint.verify import Verdict
from ..devices.backends import BACKENDS
from ..devices.machine import MEMORY_FILE_SYSTEMS
from ..planning import advice
from ..planning.costs import describe_assumed
from ..store.layout import MEMORY_STATE_BYTES, STORE_BYTES
from . import benchmark
from .doctor import Finding, Status
from .top import process

LONG = 16  # parameters that are listed in full; of a longer list only both ends are shown


def show_devices(machine: dict[str, Any], updater: dict[str, Any], found: list[dict[str, Any]]) -> None:
    out = console()
    out.print(describe_machine(machine))
    out.print(f"updater: {updater['isa']} ({', '.join(updater['isas'])} available), {updater['threads']} threads")
    for entry in found:
        rows = [("back end", f"{entry['backend']}, {BACKENDS[entry['backend']].about}")]
        if card := entry.get("card"):
            rows += describe_card(card, entry.get("xclbin"))
        if place := entry.get("storage"):
            disk = ", ".join(filter(None, (place["source"], place["model"])))
            in_memory = "; this is memory, not a disk" if place["filesystem"] in MEMORY_FILE_SYSTEMS else ""
            rows += [
                ("directory", entry["directory"] + ("" if entry["exists"] else " (the device's is created in it)")),
                ("file system", f"{place['filesystem']} on {disk}, mounted at {place['mounted_at']}{in_memory}"),
            ]
            free = place["free_bytes"]
        else:
            free = entry.get("free_bytes")
        if free is not None:
            each = STORE_BYTES if place else MEMORY_STATE_BYTES
            rows.append(("free", f"{size(free)}: room for {number(free // each)} parameters, {each} B each"))
        if "direct_io" in entry:
            direct = "yes" if entry["direct_io"] else "no: slower, through the page cache; ext4 and xfs support it"
            rows += [("direct I/O", direct), ("store", store_there_text(entry["store"]))]
        if speed := entry.get("speed"):
            read, write, mixed = (speed[f"{k}_bytes_per_second"] / 1e9 for k in ("read", "write", "mixed"))
            rows += [
                ("speed", f"read {read:.2f} GB/s, write {write:.2f} GB/s, both at once {mixed:.2f} GB/s"),
                ("", f"so at most {1e3 * mixed / STORE_BYTES:.0f} M parameters per second"),
            ]
        if speed := entry.get("card_speed"):
            rows += describe_card_speed(speed, entry["card"])
        if "warning" in entry:
            rows.append(("warning", entry["warning"]))
        if "problem" in entry:
            rows.append(("problem", entry["problem"]))
        out.print()
        out.print(escape(entry["device"]), style="bold")
        out.print(facts(rows))
    places = [(e["storage"]["mounted_at"]) for e in found if "storage" in e]
    if len(set(places)) < len(places):
        out.print("\nDevices on one file system share its room and its speed.")


def describe_card(card: dict[str, Any], xclbin: dict[str, Any] | None) -> list[tuple[str, str]]:
    known = (("index", "XRT's number"), ("bdf", "at"), ("serial", "serial number"))
    rows = [
        ("card", ", ".join(f"{what} {card[key]}" for key, what in known if card[key] not in ("", None))),
        ("shell", card["shell"] or "unknown"),
    ]
    if card["xclbin_uuid"]:
        rows.append(("loaded", f"xclbin {card['xclbin_uuid']}"))
    if xclbin:
        rows.append(("xclbin", f"{xclbin['file']}, {xclbin['uuid']}, for {xclbin['platform']}"))
        rows.append(("kernels", ", ".join(xclbin["kernels"])))
    if nvme := card["nvme"]:
        rows.append(("drive", ", ".join(filter(None, (nvme["name"], nvme["bdf"], nvme["model"], *nvme["blocks"])))))
    rows.append(("P2P", card["p2p"]))
    rows += [("warning", text) for text in card["warnings"]]
    return rows


def describe_card_speed(speed: dict[str, float], card: dict[str, Any]) -> list[tuple[str, str]]:
    rates = {name: f"{speed[name] / 1e9:.2f} GB/s" for name in speed}
    p2p = f"drive to card {rates['drive_to_card']}, card to drive {rates['card_to_drive']}"
    rows = [
        ("P2P speed", p2p if speed["drive_to_card"] else "none"),
        ("DMA", f"host to card {rates['to_card']}, card to host {rates['from_card']}"),
        ("kernel", f"{speed['kernel'] / 1e6:.0f} M parameters per second"),
    ]
    if card["emulated"]:
        rows.append(("", "the card is emulated: these rates mean nothing"))
    return rows


def describe_machine(machine: dict[str, Any]) -> str:
    return (
        f"machine: {machine['cpu']}, {machine['cores']} cores, {size(machine['memory_bytes'])} of memory; "
        f"torch {machine['torch']}"
    )


def store_there_text(described: dict[str, Any] | None) -> str:
    if described is None:
        return "none"
    owner = f"in use by process {described['owner']}" if described["owner"] is not None else ""
    if "problem" in described:
        return ", ".join(filter(None, (described["problem"], owner)))
    state = owner or describe_end(described)
    place = f"device {described['device']} of {described['devices']}"
    return f"step {described['step']}, {place}, {size(described['bytes'])}, {state}"


def show_top(found: list[dict[str, Any]]) -> Group:
    """Return one line and a table of the devices for each process that trains."""
    shown: list[RenderableType] = []
    for who in dict.fromkeys(map(process, found)):
        devices = [d for d in found if process(d) == who]
        shown += [describe_training(devices), top_table(devices)]
    return Group(*shown)


def describe_training(devices: list[dict[str, Any]]) -> str:
    """Return the line about a training. `devices`: reports on the devices of one process, which may have ended."""
    d = devices[0]
    rank = f", rank {d['rank']} of {d['world_size']}" if d["world_size"] > 1 else ""
    who = "no process trains here now" if d["pid"] is None else f"process {d['pid']}"
    text = f"[bold]{who}{rank}[/]: step {d['committed_step'] if d['step'] is None else d['step']}, "
    text += f"committed {min(e['committed_step'] for e in devices)}"
    if d["step"] is None:
        return f"{text}; no report: it has made no step yet, or its csd_optim is older than `top`"
    text += f"; a step takes {d['step_seconds']:.2f} s"
    if d["iteration_seconds"]:
        text += f", an iteration {d['iteration_seconds']:.2f} s"
    text += f", the last step was {duration(time.time() - d['at'])} ago"
    if d["waits_for"]:
        kind, _, where = d["waits_for"].partition(" ")
        text += f"; waits for {WAITING[kind]}{escape(f' of {where}' if where else '')}"
    return text


WAITING = {
    "model": "the model",
    "gradients": "gradients",
    "read": "reads",
    "update": "the update",
    "write": "writes",
    "ranks": "ranks not listed here, gradients or the model",
}


def top_table(devices: list[dict[str, Any]]) -> Table:
    """Return a table with a row per device: its drive's current rates, its part of the last step, its wear."""
    made = Table(box=box.SIMPLE_HEAD)
    heads = ("drive reads", "writes", "queue", "step: read", "update", "write", "Mparam/s", "written", "lasts")
    made.add_column("device", overflow="fold")  # never truncated: directories often differ only at the end
    for head in heads:
        made.add_column(head, justify="right")
    for d in devices:
        rates = (f"{d[key] / 1e9:.2f} GB/s" if d[key] is not None else "" for key in ("drive_read", "drive_written"))
        busy, speed = [""] * 3, ""
        if d["seconds"]:
            busy = [f"{s:.2f} s" for s in d["seconds"].values()]
            speed = f"{d['params'] / d['seconds']['update'] / 1e6:.0f}" if d["seconds"]["update"] else ""
        written = "" if d["written_bytes"] is None else short(d["written_bytes"])
        lasts = "" if d["days_left"] is None else f"{d['days_left']:,.0f} days"
        queue = "" if d["queue"] is None else str(d["queue"])
        made.add_row(escape(d["directory"]), *rates, queue, *busy, speed, written, lasts)
    return made


def duration(seconds: float) -> str:
    """Return a time span as text. Negative values (another machine's clock is ahead) count as 0."""
    for unit, length in (("days", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


def show_findings(found: dict[str, list[Finding]]) -> None:
    out = console()
    colours: dict[Status, str] = {"ok": "green", "slow": "yellow", "no": "red", "unknown": "dim"}
    for where, findings in found.items():
        out.print(f"[bold]{escape(where)}[/]")
        grid = Table.grid(padding=(0, 2))
        for f in findings:
            grid.add_row(f"  [{colours[f.status]}]{f.status}[/]", escape(f.what), escape(f.found))
            if f.remedy:
                grid.add_row("", "", escape(f"-> {f.remedy}"))
        out.print(grid)
    counts = Counter(f.status for findings in found.values() for f in findings)
    out.print(", ".join(f"{counts[status]} {status}" for status in colours if counts[status]))


def show_store(described: dict[str, Any], everything: bool) -> None:
    out = console()
    owner = f", in use by process {described['owner']}" if described["owner"] is not None else ""
    closed = describe_end(described)
    of_rank = f", of rank {described['rank']} of {described['world_size']}" if described["world_size"] > 1 else ""
    tiles, origin = described["tiles"], described["origin"]
    present = [p for p in described["params"] if p["group"] >= 0]  # the others have left the optimizer
    params = described["params"] if everything else present
    if origin:
        was = f"{origin['world_size']} ranks" if origin["world_size"] > 1 else "a process on its own"
        origin = f"made from store {origin['store_id']} of {was}, at step {origin['step']}"
    kept = described["residuals"]
    residuals = f"{kept['count']} here, {size(kept['bytes'])} in bf16, two spaces for each"
    sizes = sorted({e["tile_elems"] for e in described["extents"]})
    out.print(escape(described["file"]), style="bold")
    free = f"; {size(described['free_bytes'])} of the file free" if described["free_bytes"] else ""
    out.print(
        facts(
            [
                ("format", f"{described['format']}, store {described['store_id']}"),
                (
                    "device",
                    f"{described['device']} of {described['devices']}{of_rank}, with {described['share']:.0%} of the "
                    "parameters",
                ),
                *([("origin", origin)] if origin else []),
                ("step", f"{described['step']}{owner or ', ' + closed}"),
                ("model", f"{len(present)} parameters of {number(described['total_params'])} elements on all devices"),
                ("updated by", _rules_text(described["rules"])),
                *zip(("states", *[""] * len(described["states"])), states_text(described["states"]), strict=False),
                (
                    "tiles",
                    f"{tiles['count']} here, of {' and '.join(f'{n:,}' for n in sizes)} elements; "
                    f"{tiles['in_slot'][0]} in slot 0, {tiles['in_slot'][1]} in slot 1, "
                    f"{tiles['with_checksum']} with a checksum",
                ),
                *([("residuals", residuals)] if kept["count"] else []),
                (
                    "on disk",
                    f"{size(described['allocated_bytes'])}, {described['bytes_per_param']:.2f} B per parameter of its "
                    f"share{free}",
                ),
                ("wear", describe_wear(described)),
            ]
        )
    )
    out.print()
    for k, group in enumerate(described["groups"]):
        shown = {name: v for name, v in group.items() if v is not None and v is not False}
        values = ", ".join(f"{name} {v:g}" if isinstance(v, float) else f"{name} {v}" for name, v in shown.items())
        out.print(f"group {k}: {sum(p['group'] == k for p in params)} parameters; {escape(values)}")
    made = Table(box=box.SIMPLE_HEAD)
    for head in ("parameter", "shape", "dtype", "group", "step"):
        made.add_column(head, justify="right" if head in ("group", "step") else "left")
    listed = params if everything or len(params) <= LONG else [*params[: LONG - 4], None, *params[-3:]]
    for p in listed:
        if p is None:
            made.add_row(f"... {len(params) - LONG + 1} more; --all lists them")
        else:
            shape = " x ".join(map(str, p["shape"])) or "scalar"
            made.add_row(escape(p["name"]), shape, p["dtype"], str(p["group"]), f"{p['step']:g}")
    out.print(made)


def _rules_text(rules: dict[str, int]) -> str:
    """Return the text about a store's update rules. `rules`: elements by rule."""
    if len(rules) < 2:
        return ", ".join(rules) or "nothing yet"
    return ", ".join(f"{name} ({number(n)})" for name, n in rules.items())


def states_text(states: list[dict[str, Any]]) -> list[str]:
    in_fp32 = ", ".join(dict.fromkeys(name for how in states if how["of"] is None for name in how["names"]))
    coded = [
        f"{', '.join(how['names'])} in {how['codec']} codes of {how['of']} parameters: "
        f"{how['bytes_per_param']:.2f} B per parameter in a slot"
        for how in states
        if how["of"]
    ]
    return [*([f"{in_fp32} in fp32"] if in_fp32 or not coded else []), *coded]


def describe_end(described: dict[str, Any]) -> str:
    """Return how the last process left a store that is not in use now."""
    if described["torn"]:
        return "cut short in the middle of a step, which one slot per tile cannot undo"
    if described["clean"]:
        return "closed cleanly"
    if described.get("world_size", 1) > 1:
        return "not closed cleanly: resume=True goes on from this step, or the one before if a rank lacks it"
    return "not closed cleanly: resume=True goes on from this step"


def show_verdicts(found: list[Verdict]) -> None:
    for verdict in found:
        for problem in verdict.damage:
            print(problem)
        if not verdict.damage:
            which = f", device {verdict.device} of {verdict.devices}" if verdict.devices != 1 else ""
            loose = f", {verdict.unchecked} of them without a checksum" if verdict.unchecked else ""
            print(f"{verdict.file}: ok, step {verdict.step}, {verdict.tiles} tiles{loose}{which}")


def describe_wear(described: dict[str, Any]) -> str:
    written, seconds, rating = described["written_bytes"], described["training_seconds"], described["tbw_bytes"]
    text = f"{size(written)} written, {size(described['step_bytes'])} a step"
    if seconds:
        text += f", {size(86400 * written / seconds)} a day of training"
    if rating:
        text += f"; rated for {size(rating)}: {described['days_left']:,.1f} days of training are left"
    return text


def show_bench(result: dict[str, Any]) -> None:
    out = console()
    out.print(describe_machine(result["machine"]))
    out.print(
        f"{number(result['params'])} {result['dtype']} parameters on {len(result['devices'])} device(s), "
        f"{result['steps']} steps; all rates: median (least to largest)"
    )
    difference = result["largest_relative_difference"]
    out.print(
        "not verified: null: computes nothing"
        if difference is None
        else f"verified against torch.optim.AdamW: largest relative difference {difference:.1e} after 10 steps"
    )
    if result["emulated"]:
        out.print("cards are emulated: times and rates mean nothing", style="bold")
    rows: list[tuple[str, str]] = []
    for d in result["devices"]:
        out.print()
        out.print(escape(d["device"]), style="bold")
        rows = [("back end", f"{d['backend']}, {BACKENDS[d['backend']].about}")]
        if place := d.get("storage"):
            disk = ", ".join(filter(None, (place["source"], place["model"])))
            direct = "direct I/O" if d["direct_io"] else "no direct I/O: through the page cache"
            rows.append(("storage", f"{place['filesystem']} on {disk}, {direct}"))
            for kind, label in (("read", "read alone"), ("write", "write alone"), ("mixed", "both at once")):
                rows.append((label, span(d[f"{kind}_bytes_per_second"], 1e9, "GB/s", 2)))
        if d["p2p"] is not None:
            rows.append(("P2P", "yes" if d["p2p"] else "no: the host stands between drive and card"))
        if d["params"]:
            rows.append(("in the step", span(d["params_per_second"], 1e6, "Mparam/s", 1)))
        out.print(facts(rows))
    updater, moved = result["updater"], result["bytes_per_param"]
    on = f"{updater['threads']} threads, {updater['isa']}"
    rows = [
        ("step", span(result["step_seconds"], 1e-3, "ms", 1) + ", until all states are written"),
        ("", span(result["params_per_second"], 1e6, "Mparam/s", 1)),
        ("CPU's updater alone", f"{span(updater['params_per_second'], 1e6, 'Mparam/s', 0)}: {on}"),
        (
            "moved",
            f"push {moved['push']:.2f}, pull {moved['pull']:.2f}, flash read {moved['flash_read']:.2f}, "
            f"flash write {moved['flash_write']:.2f} B per parameter",
        ),
        ("tile buffers", size(result["buffer_bytes"])),
    ]
    each = {"disk": benchmark.DISK_BYTES, "memory": benchmark.MEMORY_BYTES}
    for name, limit in result["limits"].items():
        what = "reads and writes at once on all devices, no update" if name == "disk" else "read and written in place"
        rows.append((f"{name} alone", f"{span(limit['bytes_per_second'], 1e9, 'GB/s', 2)}: {what}"))
        rows.append(("", f"{span(limit['seconds'], 1e-3, 'ms', 1)} for {each[name]} B per parameter"))
    if ratio := result["ratio_to_limit"]:
        rows.append(("ratio", f"{span(ratio, 1, '', 2)} of that speed, which is measured again after each step"))
    out.print()
    out.print("CSDAdam.step(), all devices", style="bold")
    out.print(facts(rows))


def show_plan(found: dict[str, Any]) -> None:
    out = console()
    r, memory = found["request"], found["memory_bytes"]
    own = next(row for row in found["predictions"] if row["chosen"])
    d, kind = r[r["on"]], advice.KINDS[r["on"]]
    optimizer = advice.optimizer_of(r)
    of = "" if optimizer == advice.PlannedOptimizer() else f" of {optimizer}"
    states = "" if r["state_dtype"] == "fp32" else " with 8-bit states"
    out.print(
        f"{number(r['params'])} {r['dtype']} parameters{of}{states} on "
        f"{r['devices']} {kind[:-1] if r['devices'] == 1 else kind}, "
        f"{'as measured' if r['measured'] else 'with the rates below'}; all predicted (docs/plan.md)",
        style="bold",
    )
    capacity = found["capacity_bytes_per_device"]
    room = "" if r["free"] is None else f"; {short(r['free'])} free{': too little' if r['free'] < capacity else ''}"
    described = [f"{name} {short(memory[name])}" for name in ("parameters", "gradients", "residuals") if memory[name]]
    cpu = f"{r['host']['update'] / 1e9:.2f} G parameters/s, {'measured here' if r['cpu_measured'] else 'as given'}"
    rows = [
        ("each", describe_rates(d)),
        ("updated by", "the CPU" if d["on_host"] else f"each CSD itself, {d['update'] / 1e6:.0f} Mparam/s"),
        ("CPU", cpu),
        *([("matrices", describe_orthogonalization(ns))] if (ns := r.get("orthogonalization")) else []),
        ("space", f"{short(capacity)} on each{room}"),
        ("memory", f"{', '.join(described)} where the model lives; buffers {short(memory['buffers'])}"),
    ]
    if ns:
        rows.append(("", f"to orthogonalize, at most {short(memory['orthogonalization'])} beside the parameters"))
    for name, what in (("flash", "to and from flash"), ("link", "host to devices"), ("gpu", "GPU to host")):
        moved, rate = found["bytes"][name], r["host"].get({"link": "link", "gpu": "gpu_link"}.get(name))
        at = f", {rate / 1e9:.1f} GB/s each way" if rate else ", own lanes" if name == "link" else ""
        rows.append((what, f"{short(moved['towards_flash'])} there, {short(moved['back'])} back a step{at}"))
    out.print(facts(rows))
    out.print(predictions_table(found["predictions"], optimizer.name))
    rows = [("waits for", f"{advice.BOUNDS[own['bound']]}: {own['stages'][own['bound']]:.2f} of {own['step']:.2f} s")]
    rows += [("" if i else "to change", text) for i, text in enumerate(found["advice"])]
    if found["overlap"]:
        rows.append(("overlap", advice.describe_overlap(r, own["seconds"], found["overlap"])))
    base, ours = (
        f"from {n} on" if n else f"never (up to {advice.MOST_DEVICES})"
        for n in (found["break_even"][other] for other in ("base", "csdadam"))
    )
    rows += [
        ("CSDs", f"each {describe_rates(r['csd'])}; a plain drive {describe_rates(r['drive'])}"),
        ("break even", f"CSDs beat as many plain drives with ZeRO-Infinity: {base}; with {optimizer.name}: {ours}"),
    ]
    rows += describe_costs(found, f"{r['devices']} {kind[:-1] if r['devices'] == 1 else kind}")
    out.print(facts(rows))
    if found["sweep"]:
        out.print("\nseconds per iteration", style="bold")
        out.print(sweep_table(found["sweep"], optimizer.name))


def describe_costs(found: dict[str, Any], devices: str) -> list[tuple[str, str]]:
    """Return rows on wear, money and energy. `devices`: what they are, such as "2 plain drives"."""
    r, wear, costs = found["request"], found["wear"], found["costs"]
    dollars, joules = costs["dollars"], costs["joules_per_step"]
    trains = r["forward"] + r["backward"] > 0
    a_day = f", {short(wear['bytes_per_day_and_device'])} a day" if trains else ""
    days = f"{wear['days']:,.0f} days{'' if trains else ' of nothing but steps'}"
    assumed = "" if r["tbw"] else " (assumed)"
    small = "" if costs["drives_are_large_enough"] else " (too small)"
    used = f"{(joules['cpu'] + joules['drives']) / 1e3:.1f} kJ"
    parts = f"CPU {joules['cpu'] / 1e3:.1f}, drives {joules['drives'] / 1e3:.1f}"
    rows = [
        ("wear", f"{short(wear['bytes_per_step_and_device'])} written to each in a step{a_day}"),
        ("", f"{short(wear['tbw_bytes'])} of endurance{assumed} are used up after {wear['steps']:,.0f} steps, {days}"),
        (
            "money",
            f"{devices} {money(dollars['drives'])}{small}, and {money(dollars['wear_of_1000_steps'])} of wear in 1000 "
            f"steps; the states in DRAM {money(dollars['dram'])}, in GPU memory {money(dollars['gpu_memory'])}",
        ),
        (
            "energy",
            f"{used} a step ({parts}), beside {joules['waiting_gpu'] / 1e3:.1f} kJ of a waiting GPU; DRAM for the "
            f"states {costs['dram_watts']:.0f} W all the time",
        ),
    ]
    if costs["assumed"]:
        rows.append(("assumed", f"{describe_assumed(costs['assumed'])}: see --prices, --watts, --tbw"))
    return rows


def money(dollars: float) -> str:
    return f"${dollars:,.0f}" if dollars >= 100 else f"${dollars:.2f}"


def show_placement(params: int, found: dict[str, Any]) -> None:
    out = console()
    out.print(f"{number(params)} parameters, placed so that all devices finish a step at the same time", style="bold")
    table = Table(box=box.SIMPLE_HEAD)
    for head in ("device", "Mparam/s", "room", "share", "parameters", "seconds", "limited by"):
        table.add_column(head, justify="left" if head in ("device", "limited by") else "right")
    for device, room in zip(found["devices"], found["rooms"], strict=True):
        rate = device["params_per_second"]
        table.add_row(
            escape(device["device"]),
            f"{rate / 1e6:.0f}" if rate else "",
            short(room),
            f"{device['share']:.1%}",
            number(device["params"]),
            f"{device['seconds']:.2f}" if device["seconds"] else "",
            device["limited_by"],
        )
    out.print(table)
    rows = [
        ("a step", f"{found['seconds']:.2f} s, as predicted; the CPU updates for {found['host_seconds']:.2f} s of it")
    ]
    if found.get("link_seconds"):
        rows.append(("link", f"busy for {found['link_seconds']:.2f} s of it, between the accelerator and host memory"))
    if found["cache_bytes"]:
        rows.append(
            ("memory", f"{short(found['cache_bytes'])} to cache the durable store's states, so that drives read less")
        )
    if alone := found["drives_alone"]:
        rows.append(("drives alone", f"{alone:.2f} s: {alone / found['seconds']:.2f} times as long"))
    out.print(facts(rows))


def short(n: float) -> str:
    """Return bytes as text, in decimal units only."""
    return size(n).partition(" (")[0]


def describe_rates(d: dict[str, Any]) -> str:
    return ", ".join(f"{what} {d[what] / 1e9:.1f}" for what in ("read", "write", "mixed")) + " GB/s"


def describe_orthogonalization(ns: dict[str, Any]) -> str:
    whence = "measured on this CPU" if ns["measured"] else "as given"
    rate = f"{ns['rate'] / 1e12:.3g} TFLOP/s in {ns['dtype']}, {whence}"
    return f"{ns['share']:.0%} of the parameters, in blocks of width {ns['width']}, orthogonalized at {rate}"


def predictions_table(predictions: list[dict[str, Any]], name: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)  # to fit 80 columns
    for head in (" seconds", "GPU", "gradients", "step", "iteration", "waits for"):
        table.add_column(head, justify="left" if head.endswith(("seconds", "for")) else "right")
    for row in predictions:
        parts = (row["forward"] + row["backward"], row["gradients"], row["step"], row["seconds"])
        table.add_row(
            f" {advice.label(row, name)}",
            *(f"{s:.2f}" if s else "" for s in parts),
            advice.BOUNDS[row["bound"]],
            style="bold" if row["chosen"] else None,
        )
    return table


def sweep_table(sweep: list[dict[str, Any]], name: str) -> Table:
    ways = list(dict.fromkeys(advice.label(row, name) for row in sweep))
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("devices", justify="right")
    for way in ways:
        table.add_column(way, justify="right")
    for first in range(0, len(sweep), len(ways)):
        rows = sweep[first : first + len(ways)]
        table.add_row(str(rows[0]["devices"]), *(f"{row['seconds']:.2f}" for row in rows))
    return table


def facts(rows: list[tuple[str, str]]) -> Table:
    """Return a table of names and values without a frame."""
    grid = Table.grid(padding=(0, 2))
    for name, value in rows:
        grid.add_row(f"  {name}", escape(value))
    return grid


def size(n: float) -> str:
    """Return bytes as text, in decimal and in binary units."""
    for unit, binary, power in (("TB", "TiB", 4), ("GB", "GiB", 3), ("MB", "MiB", 2)):
        if n >= 1000**power:
            return f"{n / 1000**power:.1f} {unit} ({n / 1024**power:.1f} {binary})"
    return f"{n / 1e3:.1f} kB ({n / 1024:.1f} KiB)"


def number(n: float) -> str:
    for unit, power in (("B", 9), ("M", 6), ("k", 3)):
        if n >= 10**power:
            return f"{n / 10**power:.2f} {unit}"
    return str(n)


def span(values: dict[str, float], scale: float, unit: str, digits: int) -> str:
    median, least, most = (f"{values[k] / scale:.{digits}f}" for k in ("median", "min", "max"))
    return f"{median}{' ' + unit if unit else ''} ({least} to {most})"


def console() -> Console:
    """Return a console on stdout, 120 columns wide if that is no terminal: rich would assume 80 and cut tables."""
    return Console(highlight=False, soft_wrap=False, width=None if sys.stdout.isatty() else 120)

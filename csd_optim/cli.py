"""The command line. Data on stdout, messages and progress on stderr; `--json` prints one object with a `schema`.

Exit codes: 0 done, 1 it failed and one line says why, 2 the command was wrong (130: interrupted).
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import warnings
from collections.abc import Iterator
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from . import benchmark, checkpoint, convert, probe
from .devices import DEFAULT_BLOCK, DeviceSpec, days_left, parse_bytes, parse_devices
from .errors import CSDError, CSDOSError, CSDStoreError, CSDValueError, CSDWarning
from .store import lock_owner
from .store_format import CLEAN, FILE_NAME, UNDER_WAY, VERSION, read_contents, store_file
from .verify import Verdict
from .verify import verify as verify_stores

STORE_BYTES = 24  # of a store per parameter: three fp32 states in two slots
MEMORY_STATE_BYTES = 12  # of `ram:` per parameter: one slot
PROBE_BYTES = 1 << 30  # of scratch space for a speed check; less where it does not last a second
LONG = 16  # parameters; more are listed in part
BACKENDS = {
    "file": "an emulated CSD: tiles in a file, updated by the CPU",
    "ram": "states in host memory, updated by the CPU",
    "null": "keeps and computes nothing: times the rest",
}

app = typer.Typer(
    help="Inspect and measure computational storage devices for CSDAdam, real or emulated.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Devices = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="DEVICE",
        help="Directories or device strings such as file:/mnt/nvme0 or ram: (default: CSD_OPTIM_DEVICES, else .)",
        show_default=False,
    ),
]
Stores = Annotated[
    list[Path],
    typer.Argument(
        metavar="STORE...",
        help="A snapshot's directory, or the directories of all devices of a store.",
        show_default=False,
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


def main() -> None:
    app()


def show_version(wanted: bool) -> None:
    if wanted:
        print(f"csd_optim {version('csd_optim')}")
        raise typer.Exit


@app.callback()
def options(
    _: Annotated[
        bool, typer.Option("--version", callback=show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


# ---- commands --------------------------------------------------------------------


@app.command()
def devices(
    names: Devices = None,
    check: Annotated[bool, typer.Option("--probe", help="Measure each disk for a few seconds.")] = False,
    as_json: Json = False,
) -> None:
    """What is there: devices, the disks behind them, room, stores, the updater."""
    with reported():
        found = [describe_device(spec) for spec in specs_of(names)]
        if check:
            with progress(sum(e["backend"] == "file" and "problem" not in e for e in found)) as tick:
                for entry in found:
                    if entry["backend"] == "file" and "problem" not in entry:
                        tick(f"measuring {entry['device']}")
                        entry["speed"] = check_speed(Path(entry["directory"]), entry["storage"]["free_bytes"])
        machine, updater = probe.machine(), probe.updater()
        if as_json:
            print_json("devices", machine=machine, updater=updater, devices=found)
        else:
            show_devices(machine, updater, found)
    if any("problem" in entry for entry in found):
        raise typer.Exit(1)


@app.command()
def inspect(
    store: Annotated[Path, typer.Argument(help="A store's file, or the directory that holds it.", show_default=False)],
    everything: Annotated[bool, typer.Option("--all", help="List every parameter.")] = False,
    tbw: Annotated[
        str | None, typer.Option(help="What the drive is rated to take, for example 600TB: how long will it last?")
    ] = None,
    as_json: Json = False,
) -> None:
    """What a store holds. Reads only, also while it is in use."""
    with reported():
        held = describe_store(store, parse_bytes(tbw) if tbw else None)
        if as_json:
            print_json("inspect", **held)
        else:
            show_store(held, everything)


@app.command()
def verify(stores: Stores, as_json: Json = False) -> None:
    """Reads everything in stores and snapshots that has a checksum, and names what is damaged.

    Not while they are in use: make a snapshot then, by save(), and verify that.
    """
    with reported():
        found = verify_stores(stores, checkpoint.bar)
        ok = not any(verdict.damage for verdict in found)
        if as_json:
            print_json("verify", ok=ok, stores=[asdict(verdict) for verdict in found])
        else:
            show_verdicts(found)
    if not ok:
        raise typer.Exit(1)


@app.command()
def export(
    stores: Stores,
    out: Annotated[Path, typer.Argument(help="What to make; nothing is overwritten.", show_default=False)],
    form: Annotated[
        str, typer.Option("--format", help="torch: one file for torch.load(). safetensors: a directory of shards.")
    ] = "torch",
    shard_size: Annotated[str, typer.Option(help="safetensors: of a shard, at least one tensor each.")] = "5GB",
    as_json: Json = False,
) -> None:
    """Turns a store or snapshot into a state dict of AdamW, with `master`, the fp32 parameters.

    Takes the memory of a few tiles, whatever the size of the model, and checks every tile.
    """
    if form not in ("torch", "safetensors"):
        raise typer.BadParameter(f"{form!r} is not one of torch, safetensors", param_hint="--format")
    with reported():
        if form == "torch":
            files = convert.export_torch(stores, out, checkpoint.bar)
        else:
            files = convert.export_safetensors(stores, out, parse_bytes(shard_size), checkpoint.bar)
        total = sum(file.stat().st_size for file in files)
        if as_json:
            print_json("export", format=form, files=[str(file) for file in files], bytes=total)
        else:
            print(f"{out}: {len(files)} file{'s' * (len(files) > 1)}, {size(total)}")


@app.command("import")
def import_(
    source: Annotated[
        Path, typer.Argument(metavar="FILE_OR_DIR", help="What `export` made, in either format.", show_default=False)
    ],
    names: Annotated[
        list[str],
        typer.Argument(
            metavar="DEVICE...", help="Directories of the new store, as many as you like.", show_default=False
        ),
    ],
    tile_size: Annotated[int | None, typer.Option(min=1, help="Elements per tile.", show_default="chosen")] = None,
    as_json: Json = False,
) -> None:
    """Makes a store from an export: CSDAdam(..., devices=[...], resume=True) goes on from there.

    To change the number of devices: export, then import.
    """
    with reported():
        held = convert.import_store(source, names, tile_size, checkpoint.bar)
        if as_json:
            print_json("import", **held)
        else:
            devices = f"{len(names)} device{'s' * (len(names) > 1)}"
            print(f"step {held['step']}, {number(held['params'])} parameters on {devices}; continue with resume=True")


def count(text: str) -> int:
    """`100e6`, `100M`, `1.3B` → a number of parameters."""
    units = {"K": 1e3, "M": 1e6, "G": 1e9, "B": 1e9, "T": 1e12}
    unit = units.get(text[-1:].upper())
    try:
        n = int(float(text[:-1]) * unit) if unit else int(float(text))
    except (ValueError, OverflowError):
        n = 0
    if n < 1:
        raise typer.BadParameter(f"{text!r} is no number of parameters; write for example 100e6, 100M or 1.3B")
    return n


@app.command()
def bench(
    names: Devices = None,
    params: Annotated[int, typer.Option(parser=count, metavar="N", help="Parameters: 100e6, 100M ...")] = "100e6",  # type: ignore[assignment]
    dtype: Annotated[str, typer.Option(help="Of parameters and gradients: fp16, bf16 or fp32.")] = "bf16",
    steps: Annotated[int, typer.Option(min=5, help="Steps to time.")] = 5,
    as_json: Json = False,
) -> None:
    """Measures a step on these devices beside what they do with nothing to compute.

    Uses nameless scratch files in the devices' directories, 48 bytes per parameter; a store there is not touched.
    """
    if dtype not in benchmark.DTYPES:
        raise typer.BadParameter(f"{dtype!r} is not one of {', '.join(benchmark.DTYPES)}", param_hint="--dtype")
    with reported():
        specs = specs_of(names)
        with progress(benchmark.ticks(specs, steps)) as tick:
            result = benchmark.bench(specs, params, dtype, steps, tick)
        if as_json:
            print_json("bench", **result)
        else:
            show_bench(result)


# ---- facts ---------------------------------------------------------------------------


def specs_of(names: list[str] | None) -> list[DeviceSpec]:
    """The devices named, else those of CSD_OPTIM_DEVICES, else the current directory."""
    return parse_devices(names or (None if os.environ.get("CSD_OPTIM_DEVICES") else "."))


def describe_device(spec: DeviceSpec) -> dict[str, Any]:
    """What is known of a device; `problem` says what keeps it from being used."""
    entry: dict[str, Any] = {"device": str(spec), "backend": spec.backend}
    if spec.backend == "ram":
        entry["free_bytes"] = probe.available_memory()
        entry["room_for_params"] = entry["free_bytes"] // MEMORY_STATE_BYTES  # as the only device
    if spec.directory is None:
        return entry
    directory = spec.directory
    entry["exists"] = directory.is_dir()
    # CSDAdam makes a directory that is not there, but not its parents.
    entry["directory"] = str((directory if entry["exists"] else directory.parent).resolve())
    try:
        if not entry["exists"] and (directory.exists() or not directory.parent.is_dir()):
            raise CSDValueError("no such directory")
        entry["storage"] = probe.storage(Path(entry["directory"]))
        entry["room_for_params"] = entry["storage"]["free_bytes"] // STORE_BYTES
        entry["store"] = describe_held(directory / FILE_NAME) if entry["exists"] and spec.durable else None
        with probe.Scratch(Path(entry["directory"]), 0, 4096) as scratch:
            entry["direct_io"] = scratch.direct
    except (CSDError, OSError) as e:
        entry["problem"] = message(e)
    return entry


def describe_held(file: Path) -> dict[str, Any] | None:
    """The store in a device's directory, in short; None if there is none."""
    if not file.exists():
        return None
    owner = lock_owner(file.stat())
    try:
        block = read_contents(file).superblock
    except CSDStoreError as e:
        return {"owner": owner, "problem": str(e)}
    return {
        "owner": owner,
        "step": block.step,
        "device": block.device,
        "devices": block.devices,
        "clean": bool(block.flags & CLEAN),
        "torn": bool(block.flags & UNDER_WAY),
        "bytes": file.stat().st_size,
    }


def check_speed(directory: Path, free: int) -> dict[str, float]:
    """Bytes per second of direct reads, writes and both at once, on scratch space; about four seconds."""
    with probe.Scratch(directory, min(PROBE_BYTES, free // 4), DEFAULT_BLOCK) as scratch:
        scratch.fill(seconds=1.5)
        return {f"{kind}_bytes_per_second": probe.rate([scratch], kind, 1.0) for kind in ("read", "write", "mixed")}


def describe_store(path: Path, tbw_bytes: int | None = None) -> dict[str, Any]:
    """Everything `inspect` shows. `tbw_bytes`: the drive's rating. Raises CSDStoreError, CSDOSError."""
    try:
        contents = read_contents(path)
    except OSError as e:
        held = "there is no store" if isinstance(e, FileNotFoundError) else "cannot read the store"
        raise CSDOSError(e.errno, f"{held} in {path}: {e.strerror}") from e
    block, manifest = contents.superblock, contents.manifest
    file = store_file(path)
    stat = file.stat()
    total = sum(p["numel"] for p in manifest["params"])
    slots = contents.tiles["slot"]
    return {
        "file": str(file),
        "format": VERSION,
        "store_id": block.store_id.hex(),
        "device": block.device,
        "devices": block.devices,
        "step": block.step,
        "clean": bool(block.flags & CLEAN),
        "torn": bool(block.flags & UNDER_WAY),
        "owner": lock_owner(stat),
        "total_params": total,
        "file_bytes": stat.st_size,
        "allocated_bytes": 512 * stat.st_blocks,
        # A device has an equal share of the parameters.
        "bytes_per_param": 512 * stat.st_blocks * block.devices / max(1, total),
        "tiles": {
            "count": len(slots),
            "in_slot": [int((slots == s).sum()) for s in range(2)],
            "with_checksum": int(contents.tiles["summed"].sum()),
        },
        # When every parameter has a gradient.
        "step_bytes": sum(4 * e["tile_elems"] * len(e["sections"]) * e["tiles"] for e in manifest["extents"]),
        "written_bytes": contents.record.written_bytes,
        "training_seconds": contents.record.seconds,
        "tbw_bytes": tbw_bytes,
        "days_left": days_left(tbw_bytes, contents.record.written_bytes, contents.record.seconds)
        if tbw_bytes
        else None,
        "extents": manifest["extents"],
        "groups": contents.record.groups,
        "params": [
            {k: p[k] for k in ("name", "shape", "dtype", "group", "numel")} | {"step": float(step)}
            for p, step in zip(manifest["params"], contents.steps, strict=True)
        ],
    }


# ---- what a person sees --------------------------------------------------------------


def show_devices(machine: dict[str, Any], updater: dict[str, Any], found: list[dict[str, Any]]) -> None:
    out = console()
    out.print(describe_machine(machine))
    out.print(f"updater: {updater['isa']} ({', '.join(updater['isas'])} available), {updater['threads']} threads")
    for entry in found:
        rows = [("back end", f"{entry['backend']}, {BACKENDS[entry['backend']]}")]
        if place := entry.get("storage"):
            disk = ", ".join(filter(None, (place["source"], place["model"])))
            in_memory = "; this is memory, not a disk" if place["filesystem"] in ("tmpfs", "ramfs") else ""
            rows += [
                ("directory", entry["directory"] + ("" if entry["exists"] else " (the device's own is made there)")),
                ("file system", f"{place['filesystem']} on {disk}, mounted at {place['mounted_at']}{in_memory}"),
            ]
            free = place["free_bytes"]
        else:
            free = entry.get("free_bytes")
        if free is not None:
            each = STORE_BYTES if place else MEMORY_STATE_BYTES
            rows.append(("free", f"{size(free)}: room for {number(free // each)} parameters, {each} B each"))
        if "direct_io" in entry:
            direct = "yes" if entry["direct_io"] else "no: slower, through the page cache; ext4 and xfs have it"
            rows += [("direct I/O", direct), ("store", describe_held_text(entry["store"]))]
        if speed := entry.get("speed"):
            read, write, mixed = (speed[f"{k}_bytes_per_second"] / 1e9 for k in ("read", "write", "mixed"))
            rows += [
                ("speed", f"read {read:.2f} GB/s, write {write:.2f} GB/s, both at once {mixed:.2f} GB/s"),
                ("", f"so at most {1e3 * mixed / STORE_BYTES:.0f} M parameters per second"),
            ]
        if "problem" in entry:
            rows.append(("problem", entry["problem"]))
        out.print()
        out.print(escape(entry["device"]), style="bold")
        out.print(facts(rows))
    places = [(e["storage"]["mounted_at"]) for e in found if "storage" in e]
    if len(set(places)) < len(places):
        out.print("\nDevices on one file system share its room and its speed.")


def describe_machine(machine: dict[str, Any]) -> str:
    return (
        f"machine: {machine['cpu']}, {machine['cores']} cores, {size(machine['memory_bytes'])} of memory; "
        f"torch {machine['torch']}"
    )


def describe_held_text(held: dict[str, Any] | None) -> str:
    if held is None:
        return "none"
    owner = f"in use by process {held['owner']}" if held["owner"] is not None else ""
    if "problem" in held:
        return ", ".join(filter(None, (held["problem"], owner)))
    state = owner or describe_end(held)
    return f"step {held['step']}, device {held['device']} of {held['devices']}, {size(held['bytes'])}, {state}"


def show_store(held: dict[str, Any], everything: bool) -> None:
    out = console()
    owner = f", in use by process {held['owner']}" if held["owner"] is not None else ""
    closed = describe_end(held)
    tiles, params = held["tiles"], held["params"]
    sizes = sorted({e["tile_elems"] for e in held["extents"]})
    out.print(escape(held["file"]), style="bold")
    out.print(
        facts(
            [
                ("format", f"{held['format']}, store {held['store_id']}"),
                ("device", f"{held['device']} of {held['devices']}"),
                ("step", f"{held['step']}{owner or ', ' + closed}"),
                ("model", f"{len(params)} parameters of {number(held['total_params'])} elements on all devices"),
                ("states", ", ".join(dict.fromkeys(s for e in held["extents"] for s in e["sections"])) + " in fp32"),
                (
                    "tiles",
                    f"{tiles['count']} here, of {' and '.join(f'{n:,}' for n in sizes)} elements; "
                    f"{tiles['in_slot'][0]} in slot 0, {tiles['in_slot'][1]} in slot 1, "
                    f"{tiles['with_checksum']} with a checksum",
                ),
                (
                    "on disk",
                    f"{size(held['allocated_bytes'])}, {held['bytes_per_param']:.2f} B per parameter of its share",
                ),
                ("wear", describe_wear(held)),
            ]
        )
    )
    out.print()
    for k, group in enumerate(held["groups"]):
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


def describe_end(held: dict[str, Any]) -> str:
    """How a store was left that nobody uses."""
    if held["torn"]:
        return "cut short in the middle of a step, which shadow=False cannot undo"
    return "closed cleanly" if held["clean"] else "not closed cleanly: resume=True goes on from this step"


def show_verdicts(found: list[Verdict]) -> None:
    for verdict in found:
        for problem in verdict.damage:
            print(problem)
        if not verdict.damage:
            which = f", device {verdict.device} of {verdict.devices}" if verdict.devices != 1 else ""
            loose = f", {verdict.unchecked} of them without a checksum" if verdict.unchecked else ""
            print(f"{verdict.file}: ok, step {verdict.step}, {verdict.tiles} tiles{loose}{which}")


def describe_wear(held: dict[str, Any]) -> str:
    written, seconds, rating = held["written_bytes"], held["training_seconds"], held["tbw_bytes"]
    text = f"{size(written)} of states written, {size(held['step_bytes'])} a step"
    if seconds:
        text += f", {size(86400 * written / seconds)} a day of training"
    if rating:
        text += f"; of {size(rating)} it takes, {held['days_left']:,.1f} days of training are left"
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
        "nothing to verify: null: computes nothing"
        if difference is None
        else f"verified against torch.optim.AdamW: largest relative difference {difference:.1e} after 10 steps"
    )
    rows: list[tuple[str, str]] = []
    for d in result["devices"]:
        out.print()
        out.print(escape(d["device"]), style="bold")
        rows = [("back end", f"{d['backend']}, {BACKENDS[d['backend']]}")]
        if place := d.get("storage"):
            disk = ", ".join(filter(None, (place["source"], place["model"])))
            direct = "direct I/O" if d["direct_io"] else "no direct I/O: through the page cache"
            rows.append(("storage", f"{place['filesystem']} on {disk}, {direct}"))
            for kind, label in (("read", "read alone"), ("write", "write alone"), ("mixed", "both at once")):
                rows.append((label, span(d[f"{kind}_bytes_per_second"], 1e9, "GB/s", 2)))
        if d["params"]:
            rows.append(("in the step", span(d["params_per_second"], 1e6, "Mparam/s", 1)))
        out.print(facts(rows))
    updater, moved = result["updater"], result["bytes_per_param"]
    on = f"{updater['threads']} threads, {updater['isa']}"
    rows = [
        ("step", span(result["step_seconds"], 1e-3, "ms", 1) + ", until the last state is in its place"),
        ("", span(result["params_per_second"], 1e6, "Mparam/s", 1)),
        ("updater alone", f"{span(updater['params_per_second'], 1e6, 'Mparam/s', 0)}: {on}"),
        (
            "moved",
            f"push {moved['push']:.2f}, pull {moved['pull']:.2f}, flash read {moved['flash_read']:.2f}, "
            f"flash write {moved['flash_write']:.2f} B per parameter",
        ),
        ("tile buffers", size(result["buffer_bytes"])),
    ]
    each = {"disk": benchmark.DISK_BYTES, "memory": benchmark.MEMORY_BYTES}
    for name, limit in result["limits"].items():
        what = "requests alone, both at once, all devices" if name == "disk" else "read and written back in place"
        rows.append((f"{name} alone", f"{span(limit['bytes_per_second'], 1e9, 'GB/s', 2)}: {what}"))
        rows.append(("", f"{span(limit['seconds'], 1e-3, 'ms', 1)} for {each[name]} B per parameter"))
    if ratio := result["ratio_to_limit"]:
        rows.append(("ratio", f"{span(ratio, 1, '', 2)} of that speed, step by step"))
    out.print()
    out.print("CSDAdam.step(), all devices", style="bold")
    out.print(facts(rows))


def facts(rows: list[tuple[str, str]]) -> Table:
    """Names and values below each other."""
    grid = Table.grid(padding=(0, 2))
    for name, value in rows:
        grid.add_row(f"  {name}", escape(value))
    return grid


def size(n: float) -> str:
    """Bytes as people and as machines count them."""
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


# ---- input and output ------------------------------------------------------------------


def console() -> Console:
    """stdout; where that is no terminal, wide enough that nothing is cut (rich would assume 80 columns)."""
    return Console(highlight=False, soft_wrap=False, width=None if sys.stdout.isatty() else 120)


def print_json(command: str, **content: Any) -> None:
    print(json.dumps({"schema": f"csd_optim.{command}/1", **content}))


@contextlib.contextmanager
def progress(total: int) -> Iterator[benchmark.Tick]:
    """A bar on stderr, gone when it is done; each call of what it yields begins one more of `total` parts."""
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=total)
        begun = 0

        def tick(what: str) -> None:
            nonlocal begun
            bar.update(task, description=what, completed=begun)
            begun += 1

        yield tick


@contextlib.contextmanager
def reported() -> Iterator[None]:
    """Errors and warnings become one line each on stderr."""
    err = Console(stderr=True, highlight=False, soft_wrap=True)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=CSDWarning)  # what they say is part of what is shown
        try:
            yield
        except BrokenPipeError:
            raise
        except (CSDError, OSError) as e:
            err.print(f"[red]error:[/] {escape(message(e))}")
            raise typer.Exit(1) from None
        except KeyboardInterrupt:
            err.print("interrupted; the scratch files are gone")
            raise typer.Exit(130) from None


def message(e: BaseException) -> str:
    """An error's text without the errno's number."""
    if isinstance(e, OSError) and e.strerror:
        return e.strerror if isinstance(e, CSDError) or not e.filename else f"{e.filename}: {e.strerror}"
    return str(e)

"""The command line. Data on stdout, messages and progress on stderr; `--json` prints one object with a `schema`.

Exit codes: 0 done, 1 it failed and one line says why, 2 the command was wrong (130: interrupted).
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from ..checkpoint import export as convert
from ..checkpoint.files import bar
from ..checkpoint.verify import verify as verify_stores
from ..devices import emulation, machine
from ..devices import smartssd as cards
from ..devices.spec import DEFAULT_BLOCK, DeviceSpec, days_left, parse_device, parse_devices
from ..devices.units import parse_bytes, parse_rate
from ..devices.xclbin import find_kernels, read_xclbin
from ..engine import tuning as probe
from ..errors import CSDError, CSDOSError, CSDStoreError, CSDValueError, CSDWarning
from ..planning import advice, model
from ..store.file import lock_owner
from ..store.format import CLEAN, FILE_NAME, RESIDUAL_BYTES, UNDER_WAY, read_contents, rows_with_residual, store_file
from ..store.layout import MEMORY_STATE_BYTES, STORE_BYTES
from . import benchmark, measure
from .output import number, show_bench, show_devices, show_plan, show_store, show_verdicts, size

P2P_SHARE = 0.6  # of the drive's rate, at which a way to the card is suspected to be a detour
PROBE_BYTES = 1 << 30  # of scratch space for a speed check; less where it does not last a second

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
        help="Directories, or device strings such as file:/mnt/nvme0, xrt:0, ram: (default: CSD_OPTIM_DEVICES or .)",
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
    check: Annotated[bool, typer.Option("--probe", help="Measure each disk and card for a few seconds.")] = False,
    as_json: Json = False,
) -> None:
    """What is there: devices, the disks behind them, room, stores, the updater; unless some are named, all cards."""
    with reported():
        specs = specs_of(names)
        if not names and not os.environ.get("CSD_OPTIM_DEVICES"):
            specs += [parse_device(f"xrt:{card.name}") for card in cards.there_are()]
        known = cards.ask_pyxrt() if any(spec.card for spec in specs) else {}
        found = [describe_device(spec, known) for spec in specs]
        if check:
            measurable = [(s, e) for s, e in zip(specs, found, strict=True) if "storage" in e and "problem" not in e]
            with progress(len(measurable)) as tick:
                for spec, entry in measurable:
                    tick(f"measuring {spec}")
                    entry |= measure_device(spec, entry)
        here, updater = machine.machine(), machine.updater()
        if as_json:
            print_json("devices", machine=here, updater=updater, devices=found)
        else:
            show_devices(here, updater, found)
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
        described = describe_store(store, parse_bytes(tbw) if tbw else None)
        if as_json:
            print_json("inspect", **described)
        else:
            show_store(described, everything)


@app.command()
def verify(stores: Stores, as_json: Json = False) -> None:
    """Reads everything in stores and snapshots that has a checksum, and names what is damaged.

    Not while they are in use: make a snapshot then, by save(), and verify that.
    """
    with reported():
        found = verify_stores(stores, bar)
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
            files = convert.export_torch(stores, out, bar)
        else:
            files = convert.export_safetensors(stores, out, parse_bytes(shard_size), bar)
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
        described = convert.import_store(source, names, tile_size, bar)
        if as_json:
            print_json("import", **described)
        else:
            devices = f"{len(names)} device{'s' * (len(names) > 1)}"
            print(
                f"step {described['step']}, {number(described['params'])} parameters on {devices}; "
                "continue with resume=True"
            )


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


@app.command()
def plan(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="DEVICE", help="Measured for a few seconds each.", show_default=False)
    ] = None,
    params: Annotated[
        int | None, typer.Option(parser=count, metavar="N", help="Parameters: 7B, 70e9 ...", show_default=False)
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="Or a Hugging Face config.json to count them.", show_default=False)
    ] = None,
    n_devices: Annotated[
        int | None, typer.Option("--devices", min=1, max=1024, help="How many, where none are named.", show_default="1")
    ] = None,
    drive: Annotated[
        str, typer.Option(help="A plain drive: gen3, gen4, gen5, or rates: read=7GB/s,write=5GB/s[,mixed=6GB/s].")
    ] = "gen4",
    csd: Annotated[
        str | None,
        typer.Option(help="Plan for CSDs: smartssd, or rates, also update=240M/s.", show_default="for plain drives"),
    ] = None,
    link: Annotated[
        str | None, typer.Option(help="Shared by all devices, each way: 8GB/s.", show_default="each has its own lanes")
    ] = None,
    gpu_link: Annotated[str, typer.Option(help="Between GPU and host, each way.")] = "25GB/s",
    cpu: Annotated[
        str | None,
        typer.Option(
            help="Parameters per second that the CPU updates: 1.4G/s.", show_default="measured on this machine"
        ),
    ] = None,
    dtype: Annotated[str, typer.Option(help="Of parameters and gradients: fp16, bf16 or fp32.")] = "bf16",
    topk: Annotated[
        float | None, typer.Option(help="Share of gradients to send, such as 0.01.", show_default="all")
    ] = None,
    error_feedback: Annotated[bool, typer.Option(help="Keep what Top-K does not send: 2 B per parameter.")] = True,
    forward: Annotated[float, typer.Option(metavar="S", help="Seconds of the GPU for one batch.")] = 0,
    backward: Annotated[float, typer.Option(metavar="S", help="The same.")] = 0,
    accumulate: Annotated[int, typer.Option(min=1, help="Batches per step.")] = 1,
    tbw: Annotated[
        str | None, typer.Option(help="What a device is rated to take: 600TB.", show_default="7PB for smartssd")
    ] = None,
    sweep: Annotated[str | None, typer.Option(metavar="devices=A..B", help="The same for each number.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Of the sweep, as PNG.", show_default=False)] = None,
    as_json: Json = False,
) -> None:
    """Predicts steps on devices you have, or think of buying: time, what bounds it, space, wear, what to change.

    Example: csd-optim plan --params 7B --devices 2 --drive gen4 --forward 0.4 --backward 0.8
    """
    if (params is None) == (config is None):
        raise typer.BadParameter("give --params, or --config", param_hint="--params")
    if names and n_devices:
        raise typer.BadParameter("name devices to be measured, or say how many", param_hint="--devices")
    if plot and not sweep:
        raise typer.BadParameter("plots a sweep: add --sweep devices=1..16", param_hint="--plot")
    with reported():
        request = advice.Request(
            params=params or advice.count_params(config or Path()),
            devices=n_devices or 1,
            on="csd" if csd else "drive",
            drive=advice.parse_rates(drive, model.DRIVES, model.DRIVES["gen4"]),
            csd=advice.parse_rates(csd or "smartssd", model.CSDS, model.SMARTSSD),
            host=model.Host(
                link=parse_rate(link) if link else math.inf,
                gpu_link=parse_rate(gpu_link),
                update=parse_rate(cpu, "") if cpu else math.inf,  # until it is measured
            ),
            dtype=dtype,
            topk=topk,
            error_feedback=error_feedback,
            forward=forward,
            backward=backward,
            accumulate=accumulate,
            tbw=parse_bytes(tbw) if tbw else model.SMARTSSD_TBW if csd == "smartssd" and not names else None,
        )
        advice.check(request)
        counts = advice.parse_sweep(sweep) if sweep else ()
        if names:
            request = measured_request(request, names)
        if not cpu:
            rate = measure.engine_rate(benchmark.DTYPES[dtype])
            request = replace(request, host=replace(request.host, update=rate), cpu_measured=True)
        found = advice.plan(request, counts)
        if plot:
            advice.plot(found, plot)
        if as_json:
            print_json("plan", **found)
        else:
            show_plan(found)


@app.command(context_settings={"allow_interspersed_args": False})
def emu(
    command: Annotated[
        list[str], typer.Argument(metavar="COMMAND...", help="A program and its arguments.", show_default=False)
    ],
    devices: Annotated[
        int | None,
        typer.Option("--devices", min=1, max=emulation.MAX_DEVICES, help="Emulated cards.", show_default="1"),
    ] = None,
    drives: Annotated[
        list[Path] | None,
        typer.Option(
            "--drive", metavar="DIR", help="Stands for a card's NVMe, once for each card.", show_default="temporary"
        ),
    ] = None,
    timeout: Annotated[
        float | None, typer.Option(min=0, metavar="S", help="Seconds until it is ended, with status 124.")
    ] = None,
) -> None:
    """Runs a command with emulated SmartSSDs: devices=["xrt:0"] works without a card.

    XRT is the real one, in its software emulation (apt install libxrt1); the FPGA's kernels run on the CPU.

    For trying things out: times mean nothing. Example: csd-optim emu --devices 2 -- python train.py
    """
    with reported():
        try:
            status = emulation.run(command, devices, drives, timeout)
        except (FileNotFoundError, PermissionError) as e:  # as env(1) and timeout(1) do
            typer.echo(f"error: {message(e)}", err=True)
            status = 127 if isinstance(e, FileNotFoundError) else 126
    raise typer.Exit(status)


# ---- facts ---------------------------------------------------------------------------


def specs_of(names: list[str] | None) -> list[DeviceSpec]:
    """The devices named, else those of CSD_OPTIM_DEVICES, else the current directory."""
    return parse_devices(names or (None if os.environ.get("CSD_OPTIM_DEVICES") else "."))


def describe_device(spec: DeviceSpec, told: Mapping[str, cards.Facts]) -> dict[str, Any]:
    """What is known of a device, and by pyxrt; `problem` says what keeps it from being used."""
    entry: dict[str, Any] = {"device": str(spec), "backend": spec.backend}
    if spec.card:
        try:
            card = cards.find(spec.card, told=told)
            facts = asdict(card) | {"emulated": card.emulated}
            entry["card"] = json.loads(json.dumps(facts, default=str))  # paths as text
            spec = replace(spec, directory=card.place(spec.directory))
            entry["xclbin"] = describe_xclbin(find_kernels(spec.xclbin))
        except CSDError as e:
            return entry | {"problem": message(e)}
    if spec.backend == "ram":
        entry["free_bytes"] = machine.available_memory()
        entry["room_for_params"] = entry["free_bytes"] // MEMORY_STATE_BYTES  # as the only device
    if spec.directory is None:
        return entry
    directory = spec.directory
    entry["exists"] = directory.is_dir()
    # CSDAdam makes a directory that is not there, but not its parents.
    entry["directory"] = str((directory if entry["exists"] else directory.parent).resolve())
    try:
        if not entry["exists"] and (directory.exists() or not directory.parent.is_dir()):
            raise CSDValueError(f"no such directory: {directory}")
        entry["storage"] = machine.storage(Path(entry["directory"]))
        entry["room_for_params"] = entry["storage"]["free_bytes"] // STORE_BYTES
        entry["store"] = describe_store_there(directory / FILE_NAME) if entry["exists"] and spec.durable else None
        with probe.Scratch(Path(entry["directory"]), 0, 4096) as scratch:
            entry["direct_io"] = scratch.direct
    except (CSDError, OSError) as e:
        entry["problem"] = message(e)
    return entry


def describe_xclbin(path: Path) -> dict[str, Any]:
    """The program that is going to be loaded."""
    program = read_xclbin(path)
    return {"file": str(path), "uuid": str(program.uuid), "platform": program.platform, "mode": program.mode}


def measure_device(spec: DeviceSpec, entry: dict[str, Any]) -> dict[str, Any]:
    """What `--probe` adds to what is known of a device: how fast it is."""
    directory, free = Path(entry["directory"]), entry["storage"]["free_bytes"]
    speed = check_speed(directory, free)
    if not spec.card:
        return {"speed": speed}
    try:
        rates = measure.card_rates(replace(spec, directory=directory), free)
    except CSDError as e:
        return {"speed": speed, "problem": message(e)}
    added: dict[str, Any] = {"speed": speed, "card_speed": rates}
    # The card's drive as the host reads it, beside the way to the card: that should be no slower.
    if not rates["drive_to_card"] and spec.p2p != "0":
        added["problem" if spec.p2p == "1" else "warning"] = (
            f"its drive cannot reach its memory (P2P, says the driver: {entry['card']['p2p']}): the host stands between"
        )
    slow = rates["drive_to_card"] < P2P_SHARE * speed["read_bytes_per_second"]
    if rates["drive_to_card"] and slow and not entry["card"]["emulated"]:
        added["warning"] = (
            "P2P is much slower than the drive: it goes through the host, or the IOMMU (docs/smartssd.md, step 1)"
        )
    return added


def measured_request(request: advice.Request, names: list[str]) -> advice.Request:
    """What is measured of the named devices takes the place of what was assumed. Raises CSDError."""
    specs = parse_devices(names)
    entries = [describe_device(spec, {}) for spec in specs]
    with progress(len(specs)) as tick:
        for spec, entry in zip(specs, entries, strict=True):
            tick(f"measuring {spec}")
            if "storage" in entry and "problem" not in entry:
                entry |= measure_device(spec, entry)
    device = advice.measured(entries)
    places = [entry["storage"]["mounted_at"] for entry in entries]
    ratings = [spec.tbw_bytes for spec in specs if spec.tbw_bytes]
    return replace(
        request,
        devices=len(specs),
        on="drive" if device.on_host else "csd",
        drive=device if device.on_host else request.drive,
        csd=request.csd if device.on_host else device,
        tbw=request.tbw or (min(ratings) if ratings else None),
        free=min(entry["storage"]["free_bytes"] / places.count(entry["storage"]["mounted_at"]) for entry in entries),
        measured=True,
    )


def describe_store_there(file: Path) -> dict[str, Any] | None:
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
        described = "there is no store" if isinstance(e, FileNotFoundError) else "cannot read the store"
        raise CSDOSError(e.errno, f"{described} in {path}: {e.strerror}") from e
    block, manifest = contents.superblock, contents.manifest
    file = store_file(path)
    stat = file.stat()
    total = sum(p["numel"] for p in manifest["params"])
    shares = next((e["shares"] for e in manifest["extents"] if "shares" in e), [1.0] * block.devices)
    share = shares[block.device] / sum(shares)  # of the parameters
    slots = contents.tiles["slot"]
    rows = rows_with_residual(manifest, block.device)
    residual_bytes = [RESIDUAL_BYTES * manifest["params"][row]["numel"] for row in rows]
    return {
        "file": str(file),
        "format": block.version,
        "store_id": block.store_id.hex(),
        "device": block.device,
        "devices": block.devices,
        "rank": contents.rank,
        "world_size": contents.world_size,
        "share": share,
        "step": block.step,
        "clean": bool(block.flags & CLEAN),
        "torn": bool(block.flags & UNDER_WAY),
        "owner": lock_owner(stat),
        "total_params": total,
        "file_bytes": stat.st_size,
        "allocated_bytes": 512 * stat.st_blocks,
        "bytes_per_param": 512 * stat.st_blocks / max(1.0, total * share),
        "tiles": {
            "count": len(slots),
            "in_slot": [int((slots == s).sum()) for s in range(2)],
            "with_checksum": int(contents.tiles["summed"].sum()),
        },
        "residuals": {"count": len(residual_bytes), "bytes": sum(residual_bytes)},
        # When every parameter has a gradient.
        "step_bytes": sum(4 * e["tile_elems"] * len(e["sections"]) * e["tiles"] for e in manifest["extents"])
        + sum(residual_bytes),
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


# ---- input and output ------------------------------------------------------------------


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

"""How long a step takes on devices that one may not have: bytes divided by rates, and what works at the same time.

    traffic()   what a step moves over every link
    predict()   the seconds that takes, phase by phase, and what bounds it

All sizes are in bytes, all times in seconds, all rates per second, prefixes are decimal. docs/plan.md explains it and
says how far off it is; the tests compare it with the times that Smart-Infinity's authors have published.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from ..compression.policy import DENSE_FROM
from ..errors import CSDValueError
from ..store.layout import MAX_MAPPINGS, TILE_ELEMS, TILES_PER_DEVICE
from ..store.sections import EIGHT_BIT, FP32, SECTIONS, elem_bytes

VARIANTS = {
    "base": "ZeRO-Infinity",  # RAID0, updated by the CPU, gradients through flash
    "su_o": "Smart-Infinity",  # as published: gradients through flash, updated by the CSDs
    "su_o_c": "Smart-Infinity, Top-K",
    "csdadam": "CSDAdam",
    "csdadam_topk": "CSDAdam, Top-K",
}
ITEM_BYTES = {"fp16": 2, "bf16": 2, "fp32": 4}
STATE_DTYPES = (FP32, EIGHT_BIT)
ADAMS = 3  # fp32 sections of a tile, the master among them, which a step reads and writes; other rules have 1 to 4
PUBLISHED_ITEM = 4  # bytes of the gradients and parameters that the published systems send
# Of an entry of a sparse gradient: index and value of 16 bits each; of 32 bits in what is published.
ENTRY, PUBLISHED_ENTRY = 4, 8

# Two numbers were fitted to published times, and no others; both only slow the published systems down.
#
# The share of its link's rate that they reach: 6.4 of the 8 GB/s measured on the testbed. From four drives on
# ZeRO-Infinity moves 28 B per parameter in 4.4 ns, however many drives and parameters there are.
LINK_SHARE = 0.8
# Parameters per second that ZeRO-Infinity updates on the CPU, all copies around it included, while drives wait: that
# takes 1.8 to 2.6 ns per parameter longer than its transfers, on one and on two drives of 3 GB/s.
ZERO_UPDATE = 450e6


@dataclass(frozen=True)
class Device:
    """A drive, or a CSD, and how fast it is."""

    read: float  # bytes per second from flash, nothing else going on
    write: float
    mixed: float  # bytes per second, read plus written, as much of both at once
    # Parameters per second. For a device `on_host` Host.update counts instead.
    update: float = math.inf
    # A plain drive (an emulated CSD): the CPU updates, and states cross the link.
    on_host: bool = False

    @staticmethod
    def in_turn(read: float, write: float, update: float = math.inf, on_host: bool = False) -> Device:
        """One that does not do both at once any faster than one after the other: careful, and true of most drives."""
        return Device(read, write, 2 / (1 / read + 1 / write), update, on_host)


@dataclass(frozen=True)
class Host:
    """What all devices share. `math.inf`: no bound."""

    # Parameters per second of the CPU, for devices `on_host` and for "base"; of this machine: cli/measure.py.
    update: float
    link: float = math.inf  # bytes per second each way at once, of the uplink behind which all devices are
    gpu_link: float = math.inf  # the same between GPU and host


@dataclass(frozen=True)
class Prediction:
    """Seconds of one iteration, which are those of its phases one after another."""

    variant: str
    devices: int
    forward: float  # of the GPU, all batches of a step
    backward: float
    gradients: float  # to flash, where the variant sends them there, after backward
    step: float
    stages: dict[str, float]  # how long the step keeps each thing busy: all at once for CSDAdam, in turn for the others
    bound: str  # the longest of the stages

    @property
    def seconds(self) -> float:
        return self.forward + self.backward + self.gradients + self.step


# The kernels of Smart-Infinity: 8.2 GiB/s of 16 B, with Top-K 2.92 GiB/s of 12.08 B per parameter (its figure 14).
PUBLISHED_UPDATE = {"su_o": 550e6, "su_o_c": 259e6}
# Plain drives as their makers' data sheets have it for long transfers, round about.
DRIVES = {
    "gen3": Device.in_turn(3.0e9, 2.0e9, on_host=True),
    "gen4": Device.in_turn(6.5e9, 4.0e9, on_host=True),
    "gen5": Device.in_turn(13e9, 6.5e9, on_host=True),
}
SMARTSSD_TBW = 7.008e15  # bytes: 3.84 TB, once a day for five years
CARD_MEMORY = 15.4e9  # bytes per second, of a SmartSSD's


def slot_bytes(state_dtype: str, item_bytes: int, sections: int = ADAMS) -> float:
    """Of a parameter's states, once. `item_bytes`: of the parameter; `sections`: with the master, 3 or 4 in 8 bits."""
    if state_dtype == FP32:
        return 4 * sections
    return elem_bytes(SECTIONS[:sections], state_dtype, torch.float32 if item_bytes == 4 else torch.bfloat16)


def smartssd(state_dtype: str = FP32, sections: int = ADAMS) -> Device:
    """Published peer-to-peer rates, and what the memory on the card allows an update of 16-bit parameters.

    States cross it four times: in from the drive, into the kernel, back, out to the drive. So do gradients and
    parameters together, in from the host, into the kernel, back and out; but codes have the parameter in them.
    """
    crossing = 4 * slot_bytes(state_dtype, 2, sections) + (8 if state_dtype == FP32 else 6)
    return Device.in_turn(2.9e9, 1.6e9, CARD_MEMORY / crossing // 5e6 * 5e6)


SMARTSSD, SMARTSSD_8BIT = smartssd(), smartssd(EIGHT_BIT)  # 275 and 590 million parameters per second


def published_update(variant: str, sections: int = ADAMS) -> float:
    """PUBLISHED_UPDATE, if kernels of other rules move as many bytes per second; that was published of Adam's only."""
    return PUBLISHED_UPDATE[variant] * (4 * ADAMS + PUBLISHED_ITEM) / (4 * sections + PUBLISHED_ITEM)


def traffic(
    variant: str,
    params: float,
    *,
    item_bytes: int = 2,
    topk: float | None = None,
    on_host: bool = False,
    state_dtype: str = FP32,
    sections: int = ADAMS,
) -> dict[str, tuple[float, float]]:
    """Bytes that a step moves over each link, all devices together: (towards flash, back).

    `gpu`: between GPU and host. `link`: between host and devices. `flash`: (written, read). `item_bytes`: of a gradient
    and of a parameter; only what the published systems send to their devices is always fp32. `on_host`: CSDAdam on
    plain drives. `sections`: of the rule, whoever applies it. `state_dtype`: of CSDAdam's states. 8-bit ones begin with
    the parameter, which plain drives need not read: a GPU sends it along with the gradient. Raises CSDValueError: no
    such variant, or one with Top-K and no share `topk`.
    """
    if variant not in VARIANTS:
        raise CSDValueError(f"Invalid variant: {variant!r}; there are {', '.join(VARIANTS)}")
    push: float = item_bytes if variant.startswith("csdadam") else PUBLISHED_ITEM
    if variant in ("csdadam_topk", "su_o_c"):
        if topk is None or not 0 < topk <= 1:
            raise CSDValueError(f"Invalid topk: {topk!r}; {variant} sends a share of the gradients, such as 0.01")
        if topk < DENSE_FROM:
            push = topk * (ENTRY if variant == "csdadam_topk" else PUBLISHED_ENTRY)
    per_param: dict[str, tuple[float, float]]
    if variant.startswith("csdadam"):
        gpu, slot = (push, float(item_bytes)), slot_bytes(state_dtype, item_bytes, sections)
        known = item_bytes if state_dtype != FP32 and on_host else 0
        flash = (slot, slot - known)
        per_param = {"gpu": (push + known, gpu[1]), "link": flash if on_host else gpu, "flash": flash}
    else:  # gradients go through flash
        flash = (4 * sections + push,) * 2
        link = flash if variant == "base" else (push, PUBLISHED_ITEM)
        per_param = {"gpu": (item_bytes, item_bytes), "link": link, "flash": flash}
    return {name: (params * there, params * back) for name, (there, back) in per_param.items()}


def predict(
    variant: str,
    params: float,
    devices: int,
    device: Device,
    host: Host,
    *,
    item_bytes: int = 2,
    topk: float | None = None,
    state_dtype: str = FP32,
    sections: int = ADAMS,
    forward: float = 0.0,
    backward: float = 0.0,
) -> Prediction:
    """The time of an iteration of `variant` with `params` parameters on so many equal devices.

    base         read, update, write in turn, unless that is more than the link takes; then the link alone counts
    su_o[_c]     every phase in turn: that is how the published times add up, whatever was meant to overlap
    csdadam[..]  everything at once: the slowest counts, and one tile's way through the others (pipeline fill and drain)

    `device`: for "base" the plain drive. Its CPU updates `host.update` parameters per second (published: ZERO_UPDATE).
    `state_dtype`, `sections`: see `traffic`; rates of updates are those with such states. `forward`, `backward`: the
    GPU's seconds. Raises CSDValueError as `traffic` does.
    """
    moved = traffic(
        variant,
        params,
        item_bytes=item_bytes,
        topk=topk,
        on_host=device.on_host,
        state_dtype=state_dtype,
        sections=sections,
    )
    (gpu_down, gpu_up), (down, up), (written, read) = moved["gpu"], moved["link"], moved["flash"]
    gradients = 0.0
    if variant.startswith("csdadam"):
        both = min(read, written)  # what is written beyond that, is written alone
        alone = (read - both) / device.read + (written - both) / device.write
        stages = {
            "read": read / (devices * device.read),
            "write": written / (devices * device.write),
            "drive": (2 * both / device.mixed + alone) / devices,
            "update": params / (host.update if device.on_host else devices * device.update),
            "link down": down / host.link,
            "link up": up / host.link,
            "gpu link down": gpu_down / host.gpu_link,
            "gpu link up": gpu_up / host.gpu_link,
        }
        step = max(stages.values())
        way = [stages[s] for s in ("gpu link down", "link down", "read", "update", "write", "link up", "gpu link up")]
        step += (sum(way) - max(way)) / tiles_per_device(params, devices, state_dtype, sections)
    else:
        link = LINK_SHARE * host.link
        states = 4 * sections * params
        pushed = written - states  # the gradients, to flash
        gradients = pushed / min(devices * device.write, link)
        stages = {
            "read": read / (devices * device.read),
            "update": params / (host.update if variant == "base" else devices * device.update),
            "write": states / (devices * device.write),
        }
        in_turn = sum(stages.values())
        if variant == "base":
            crossing = (read + states) / link
            step = max(in_turn, crossing)
            if crossing > in_turn:
                stages["link"] = crossing
        else:
            stages["link up"] = up / link
            step = in_turn + stages["link up"]
    # The first of equals: reads and writes say more than that the drive is busy.
    bound = max(stages, key=lambda stage: stages[stage])
    return Prediction(variant, devices, forward, backward, gradients, step, stages, bound)


def tiles_per_device(params: float, devices: int, state_dtype: str = FP32, sections: int = ADAMS) -> int:
    """As layout.plan_extent() cuts it."""
    mapped = sections if state_dtype == FP32 else 0
    largest = max(TILE_ELEMS, math.ceil(mapped * params / MAX_MAPPINGS))
    return max(TILES_PER_DEVICE, math.ceil(params / (devices * largest)))

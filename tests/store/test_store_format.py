"""Reads a store according to docs/store-format.md only: every field, every state, every checksum."""

import io
import json
import math
import struct

import numpy as np
import pytest
import torch
from support.codes import SHAPES, TILE, made
from support.inside import idle_engine_of
from support.store_page import crc32c, decoded, masters, ratios, region, roots, sections, superblock

from csd_optim import CSDAdam
from csd_optim.bindings import decode


@pytest.mark.at_hand("looks at states after the optimizer was closed")
@pytest.mark.fp32_states("reads fp32 states; codes are read below")
@pytest.mark.parametrize("kept", [(), ("columns", "late", "half", "weight")])  # parameters with residuals
@pytest.mark.parametrize("shares", [[1.0], [1.0] * 3, [1.0, 0.3, 2.5]], ids=str)
# Tiles have 3072 elements, so that their last chunk is shorter. None: formats 1 to 3.
@pytest.mark.parametrize("sum_elems", [2048, None])
def test_store_is_what_the_page_says(tmp_path, monkeypatch, sum_elems, shares, kept):
    monkeypatch.setattr("csd_optim.engine.open_devices.SUM_ELEMS", sum_elems)
    devices = len(shares)
    assert crc32c(b"123456789") == 0xE3069283
    torch.manual_seed(0)
    params = {
        "weight": torch.randn(40, 50),
        "columns": torch.randn(50, 40).t(),
        "half": torch.randn(1500).half(),
        "phase": torch.randn(5, dtype=torch.complex64),
        "late": torch.randn(2100).bfloat16(),
    }
    params = {name: torch.nn.Parameter(p) for name, p in params.items()}
    named = list(params.items())
    places = [tmp_path / f"csd{d}" for d in range(devices)]
    opt = CSDAdam(
        [{"params": named[:4]}, {"params": named[4:], "amsgrad": True}],
        devices=[f"file:{place}?share={share}" for place, share in zip(places, shares, strict=True)],
        tile_size=3072,
    )
    for _ in range(3):
        for p in params.values():
            p.grad = torch.randn_like(p)
        opt.user_state = {"epoch": 7}
        opt.step()
    engine, residuals = idle_engine_of(opt), {}
    for name in kept:
        residuals[name] = torch.randn(params[name].numel()).bfloat16()
        engine.committer.keep_residual([*params].index(name), residuals[name])
    engine.committer.flush()
    if kept:
        residuals["half"].mul_(2)  # the other residuals keep their space
    opt.close()

    flat, found = {}, {}
    ids = set()
    for d, place in enumerate(places):
        data = (place / "csd_optim.store").read_bytes()
        block = superblock(data, 0)
        assert superblock(data, 1) == block
        unequal = len({*shares}) > 1
        version = 4 if sum_elems else 3 if unequal else 2 if kept else 1
        assert (block["version"], block["order"]) == (version, 0x01020304)
        assert (block["device"], block["devices"], block["step"], block["flags"]) == (d, devices, 3, 1)
        ids.add(block["id"])
        manifest = json.loads(region(data, block["manifest"], 0))
        assert block["round"] == 0
        assert not {"rank", "world_size"} & {*manifest}
        has = {"chunk_sums": sum_elems, "residuals": kept, "shares": unequal, "tile_numbers": sum_elems}
        assert manifest.get("features") == ([name for name, there in has.items() if there] if version == 4 else None)
        table = region(data, block["table"], 0)
        for what, copy0 in (("manifest", json.dumps(manifest).encode()), ("table", table)):
            assert region(data, block[what], 1) == copy0
        here = [p for p in manifest["params"] if p.get("residual", {}).get("device") == d]
        sizes = [
            8 + 4 * math.ceil(3072 / sum_elems) * len(e["sections"]) if sum_elems else 24 for e in manifest["extents"]
        ]
        tiles_end = sum(size * e["tiles"] for size, e in zip(sizes, manifest["extents"], strict=True))
        entries = tiles_end + 8 * len(manifest["params"])
        for i, p in enumerate(here):
            space, checksum = struct.unpack_from("<2I", table, entries + 8 * i)
            base, room = p["residual"]["base"], p["residual"]["room"]
            assert base % 4096 == room % 4096 == 0
            assert 2 * p["numel"] <= room < 2 * p["numel"] + 4096
            assert base + 2 * room <= len(data)
            content = data[base + space * room :][: 2 * p["numel"]]
            assert crc32c(content) == checksum
            found[p["name"]] = space, content
        record = table[entries + 8 * len(here) :]
        end = 4 + struct.unpack_from("<I", record)[0]
        said = json.loads(record[4:end])
        assert [g["amsgrad"] for g in said["groups"]] == [False, True]
        assert said["groups"][0]["betas"] == [0.9, 0.999]
        assert said["seconds"] > 0
        rooms = [p["residual"]["room"] * (1 + (p["name"] == "half")) for p in here]
        # 3 steps; the first one writes the masters once more, so that it can be undone.
        sections = sum(e["tiles"] * e["tile_elems"] * 4 * (3 * len(e["sections"]) + 1) for e in manifest["extents"])
        assert said["written_bytes"] == sum(rooms) + sections
        assert torch.load(io.BytesIO(record[end:]), weights_only=True) == {"epoch": 7}
        assert struct.unpack_from(f"<{len(params)}d", table, tiles_end) == (3.0,) * len(params)
        row = at_row = 0
        for e, extent in enumerate(manifest["extents"]):
            n_bytes = 4 * extent["tile_elems"]
            assert extent.get("shares") == (shares if unequal else None)
            assert extent.get("sum_elems") == sum_elems
            given, numbers = [0] * devices, []  # number of tiles of each device; tiles of this one
            while len(numbers) < extent["tiles"]:
                to = min(range(devices), key=lambda i: (given[i] + 1) / shares[i])
                if to == d:
                    numbers.append(sum(given))
                given[to] += 1
            assert extent.get("tile_numbers") == (numbers if sum_elems else None)
            for j in range(extent["tiles"]):
                slot, summed, *sums = struct.unpack_from(f"<{sizes[e] // 4}I", table, at_row)
                row, at_row = row + 1, at_row + sizes[e]
                assert summed == 1
                at = extent["file_offset"] + (extent["slots"] * j + slot) * n_bytes * len(extent["sections"])
                for k, section in enumerate(extent["sections"]):
                    content = data[at + k * n_bytes : at + (k + 1) * n_bytes]
                    size = 4 * sum_elems if sum_elems else n_bytes
                    for chunk, first in enumerate(range(0, n_bytes, size)):
                        assert crc32c(content[first : first + size]) == sums[chunk * len(extent["sections"]) + k]
                    flat[e, numbers[j], section] = np.frombuffer(content, "<f4")
                if not sum_elems:
                    assert sums[len(extent["sections"]) :] == [0] * (4 - len(extent["sections"]))
        assert row == manifest["tiles"]
    assert len(ids) == 1

    assert {name: space for name, (space, _) in found.items()} == {name: int(name == "half") for name in kept}
    for name, (_, content) in found.items():
        assert content == residuals[name].view(torch.int16).numpy().tobytes()
    assert [p["name"] for p in manifest["params"]] == list(params)
    for entry in manifest["params"]:
        p, extent = params[entry["name"]], manifest["extents"][entry["extent"]]
        assert str(p.dtype) == "torch." + entry["dtype"]
        for section in extent["sections"]:
            tiles = [flat[key] for key in sorted(flat) if key[0] == entry["extent"] and key[2] == section]
            values = torch.from_numpy(np.concatenate(tiles)[entry["start"] :][: entry["numel"]].copy())
            if p.is_complex():
                values = torch.view_as_complex(values.view(-1, 2))
            values = values.as_strided(entry["shape"], entry["stride"])
            assert torch.equal(values, opt.state[p][section]), (entry["name"], section)
            if section == "master":
                assert torch.equal(values.to(p.dtype), p)


def read_tiles(data):
    """Yields for each tile its extent, its number there, and its sections by name. Verifies checksums."""
    block = superblock(data, 0)
    manifest, table = (json.loads(region(data, block["manifest"], 0)), region(data, block["table"], 0))
    at = 0
    for e, extent in enumerate(manifest["extents"]):
        slot_of = sections(extent)
        size = sum(n for _, _, n in slot_of)
        chunks = math.ceil(extent["tile_elems"] / extent["sum_elems"])
        for j, number in enumerate(extent["tile_numbers"]):
            slot, summed, *sums = struct.unpack_from(f"<{2 + chunks * len(slot_of)}I", table, at)
            at += 8 + 4 * chunks * len(slot_of)
            assert summed == 1
            first, content = extent["file_offset"] + (extent["slots"] * j + slot) * size, {}
            for k, (name, for_64, n) in enumerate(slot_of):
                content[name] = data[first : first + n]
                used = content[name][: extent["tile_elems"] // 64 * for_64]
                assert not any(content[name][len(used) :])
                each = extent["sum_elems"] // 64 * for_64
                for chunk in range(chunks):
                    assert crc32c(used[chunk * each : (chunk + 1) * each]) == sums[chunk * len(slot_of) + k]
                first += n
            yield e, number, content


@pytest.mark.at_hand("its store is made by the engine alone, with addresses of gradients and parameters")
@pytest.mark.parametrize("amsgrad", [False, True])
def test_codes_are_what_the_page_says(amsgrad, tmp_path):
    """Decodes stores of two devices, with parameters of all dtypes. Oracle: the same states in plain arrays."""
    places = [tmp_path / f"csd{d}" for d in range(2)]
    coded = made(places, amsgrad=amsgrad, steps=3)
    flat = {}
    for place in places:
        data = (place / "csd_optim.store").read_bytes()
        block = superblock(data, 0)
        manifest = json.loads(region(data, block["manifest"], 0))
        assert block["version"] == 4
        assert manifest["features"] == ["chunk_sums", "codec", "tile_numbers"]
        assert [extent["param_dtype"] for extent in manifest["extents"]] == [str(d)[6:] for d in SHAPES]
        for e, number, content in read_tiles(data):
            flat[e, number] = decoded(manifest["extents"][e], content)
    expected = coded.decoded()
    for e, extent in enumerate(manifest["extents"]):
        gaps = np.ones(TILE * sum(key[0] == e for key in flat), bool)
        for p in (p for p in manifest["params"] if p["extent"] == e):
            gaps[p["start"] :][: p["numel"]] = False
        for state in extent["sections"]:
            assert not np.concatenate([flat[key][state] for key in sorted(flat) if key[0] == e])[gaps].any()
    for p in manifest["params"]:
        assert p["start"] % 64 == 0
        extent = manifest["extents"][p["extent"]]
        assert extent["tile_elems"] == TILE
        assert extent["param_dtype"] == ("float32" if p["dtype"] == "complex64" else p["dtype"])
        for state in extent["sections"]:
            values = np.concatenate([flat[key][state] for key in sorted(flat) if key[0] == p["extent"]])
            here = torch.from_numpy(values[p["start"] :][: p["numel"]])
            assert torch.equal(here, expected[p["name"], state]), (p["name"], state)


@pytest.mark.parametrize("exponent", [90, 91, 127, 150, 191, 192])
def test_every_code_is_what_the_page_says(exponent):
    """All 256 roots with all 256 ratios."""
    root, ratio = (a.reshape(-1).astype(np.uint8) for a in np.meshgrid(range(256), range(256), indexing="ij"))
    codes = [np.zeros(1 << 16, np.float32), ratio, root, np.full(1 << 10, exponent, np.uint8)]
    states = [torch.empty(1 << 16) for _ in range(3)]
    decode("scalar", [torch.from_numpy(a) for a in codes], torch.float32, [*states, None])
    u = roots(root, codes[3].repeat(64))
    with np.errstate(invalid="ignore", over="ignore"):
        exp_avg, exp_avg_sq = np.where(root == 255, np.float32(0), ratios(ratio) * u), u * u
    for found, right in zip(states[1:], (exp_avg, exp_avg_sq), strict=True):
        assert right.dtype == np.float32
        assert np.array_equal(found.numpy(), right)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_master_is_what_the_page_says(dtype):
    """All 16-bit parameters with all corrections."""
    p = np.arange(1 << 16, dtype=np.uint16)
    unused, found = [torch.zeros(1 << 16, dtype=torch.uint8)] * 3, torch.empty(1 << 16)
    for correction in range(-127, 128):
        away = np.where(p & 0x7FFF, correction, abs(correction)).astype(np.int8)
        decode("scalar", [torch.from_numpy(p), torch.from_numpy(away), *unused], dtype, [found, None, None, None])
        right = masters(p.astype(np.uint32), away, str(dtype)[6:])
        same = found.numpy().view(np.uint32) == right.view(np.uint32)
        assert (same | (np.isnan(found.numpy()) & np.isnan(right))).all(), correction

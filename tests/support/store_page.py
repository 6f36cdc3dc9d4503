"""Reads a store as docs/store-format.md describes it, with NumPy and its own checksum: superblocks, regions, codes."""

import struct

import numpy as np

TABLE = [*range(256)]
for _ in range(8):
    TABLE = [c >> 1 ^ (0x82F63B78 if c & 1 else 0) for c in TABLE]


def crc32c(data):
    crc = 0xFFFFFFFF
    for byte in bytes(data):
        crc = TABLE[(crc ^ byte) & 0xFF] ^ crc >> 8
    return crc ^ 0xFFFFFFFF


def superblock(data, copy):
    block = data[4096 * copy : 4096 * copy + 4096]
    assert block[:8] == b"CSDOPTIM"
    assert crc32c(block[:4092]) == int.from_bytes(block[4092:], "little")
    names = ["version", "order", "id", "device", "devices", "sequence", "step", "flags"]
    fields = dict(zip(names, struct.unpack_from("<II16sIIQQI", block, 8), strict=True))
    fields["manifest"], fields["table"] = (struct.unpack_from("<QQQI", block, 60 + 28 * i) for i in range(2))
    (fields["round"],) = struct.unpack_from("<Q", block, 116)
    assert block[124:4092] == bytes(3968)
    return fields


def region(data, place, copy):
    base, room, size, crc = place
    assert base % 4096 == room % 4096 == 0
    offset = base + copy * room
    assert crc32c(data[offset : offset + size]) == crc
    return data[offset : offset + size]


def sections(extent):
    """Return the sections of a slot: name, bytes for 64 elements, bytes."""
    elems = extent["tile_elems"]
    if "codec" not in extent:
        return [(name, 256, 4 * elems) for name in extent["sections"]]
    assert extent["codec"] == "8bit"
    assert extent["sections"][:3] == ["master", "exp_avg", "exp_avg_sq"]
    wide = extent["param_dtype"] == "float32"
    found = {"master": 256} if wide else {"parameter": 128, "correction": 64}
    found |= {"ratio": 64, "root": 64, "exponent": 1}
    if extent["sections"][3:] == ["max_exp_avg_sq"]:
        found |= {"peak": 64, "peak exponent": 1}
    return [(name, n, -(-elems // 64 * n // 4096) * 4096) for name, n in found.items()]


def decoded(extent, content):
    """Return the fp32 states of a tile of codes. `content`: the bytes of each section, by name."""
    n, dtype = extent["tile_elems"], extent["param_dtype"]
    codes = {name: np.frombuffer(data, np.uint8) for name, data in content.items()}
    found = {}
    if dtype == "float32":
        found["master"] = np.frombuffer(content["master"], "<f4")[:n]
    else:
        p = np.frombuffer(content["parameter"], "<u2")[:n].astype(np.uint32)
        found["master"] = masters(p, np.frombuffer(content["correction"], np.int8)[:n], dtype)
    u = roots(codes["root"][:n], codes["exponent"][: n // 64].repeat(64))
    q = codes["ratio"][:n]
    with np.errstate(invalid="ignore"):
        found["exp_avg"] = np.where(codes["root"][:n] == 255, np.float32(0), ratios(q) * u)
    found["exp_avg_sq"] = u * u
    if "peak" in content:
        found["max_exp_avg_sq"] = roots(codes["peak"][:n], codes["peak exponent"][: n // 64].repeat(64)) ** 2
    assert all(values.dtype == np.float32 for values in found.values())
    return found


def power(exponent, mantissa):
    return np.ldexp(mantissa.astype(np.float32), exponent.astype(np.int32)).astype(np.float32)


def roots(c, b):
    c, b = c.astype(np.int32), b.astype(np.int32)
    u = np.where(c < 16, power(b - 141, c / 16), power(b - 142 + c // 16, 1 + c % 16 / 16))
    return np.where(c == 255, np.float32(np.inf), u)


def ratios(q):
    k = (q & 127).astype(np.int32)
    r = np.where(k < 16, (k / 128).astype(np.float32), power(k // 16 - 4, 1 + k % 16 / 16))
    return np.where(q & 128, -r, r)


def masters(p, correction, dtype):
    """Return the masters. `p`: the parameters' bits, uint32. `correction`: int8."""
    away = correction.astype(np.int32).astype(np.uint32)  # negative ones wrap around
    if dtype == "bfloat16":
        return ((p << 16) + (away << 8)).view(np.float32)
    m = ((p & 0x7FFF) << 8) + away
    bits = np.where((p & 0x7FFF) < 0x7C00, (m << 5) + (112 << 23), 0x7F800000 | (p & 0x3FF) << 13).astype(np.uint32)
    small = ((p & 0x7FFF) < 0x7C00) & (m < 1 << 18)
    size = np.where(small, power(np.full_like(correction, -32, np.int32), m.astype(np.int32)), bits.view(np.float32))
    return np.copysign(size, np.where(p & 0x8000, np.float32(-1), np.float32(1)))

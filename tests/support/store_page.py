"""Reads a store's superblocks and regions with nothing but docs/store-format.md and a checksum of its own."""

import struct

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

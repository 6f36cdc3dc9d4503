"""Top-K on an accelerator, by the kernels of native/gpu/topk.h: five launches for any number of tiles and parts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ..accelerator import on
from ..bindings import ELEMS_PER_BLOCK, ENTRY_LANES, topk_count
from ..kernels.library import KernelLibrary
from ..kernels.sources import KEEPS_SUBNORMALS, constant, layouts
from .selection import Tiles, TopK, table_of

SOURCE, DEFINES = "topk.h", (KEEPS_SUBNORMALS,)
CHUNK = 1 << 14  # elements of a tile for each block of threads; divides ELEMS_PER_BLOCK
CHUNK_BYTES = 128  # of tables and counts, at most, for each chunk; a part takes as much as 8 more
ALIGNMENT = 256  # bytes, of each table on the accelerator
# Memory on an accelerator for what is selected at once. At 1 % that suffices for 2.3 G parameters.
BATCH_BYTES = 128 << 20

Table = np.ndarray[Any, Any]


def _dtype_of(struct: str) -> np.dtype[Any]:
    """Return the dtype of a struct of topk.h that has only unsigned integers."""
    fields = layouts().typeof(struct).fields
    return np.dtype([(name, f"u{layouts().sizeof(field.type)}") for name, field in fields])


def _chunks_of(parts: Table) -> tuple[Table, Table]:
    """Cut parts into chunks. Returns the chunks, and per part where its chunks end."""
    begins, ends = parts["tile_first"].astype(np.int64), (parts["tile_first"] + parts["n"]).astype(np.int64)
    counts = (ends - 1) // CHUNK - begins // CHUNK + 1
    chunks_end = counts.cumsum()
    part = np.repeat(np.arange(len(parts)), counts)
    number = begins[part] // CHUNK + np.arange(len(part)) - (chunks_end - counts)[part]  # in the tile
    first = np.maximum(number * CHUNK, begins[part])
    chunks = np.empty(len(part), _dtype_of("TopKChunk"))
    chunks["part"], chunks["first"] = part, first - begins[part]
    chunks["n"] = np.minimum(number * CHUNK + CHUNK, ends[part]) - first
    chunks["block"] = number * CHUNK // ELEMS_PER_BLOCK
    return chunks, chunks_end


def _tables_of(tiles: Tiles) -> dict[str, Table]:
    """Return the tables of topk.h by their names in TopKArgs."""
    all_parts = [part for _, parts in tiles.values() for part in parts]
    parts = table_of(all_parts)
    chunks, chunks_end = _chunks_of(parts)
    places, rows = np.empty(len(parts), _dtype_of("TopKPlace")), np.empty(len(tiles), _dtype_of("TopKTile"))
    parts_end = np.cumsum([len(parts) for _, parts in tiles.values()])
    parts_begin = np.append(0, parts_end[:-1])
    places["tile"] = np.repeat(np.arange(len(tiles)), parts_end - parts_begin)
    places["chunks_begin"], places["chunks_end"] = np.append(0, chunks_end[:-1]), chunks_end
    places["first"] = [part.first for part in all_parts]
    places["feeds_back"] = [part.updates_residual for part in all_parts]
    rows["blocks"] = [-(-elems // ELEMS_PER_BLOCK) for elems, _ in tiles.values()]
    rows["row_words"] = np.add.reduceat(parts["k"], parts_begin) + ENTRY_LANES * rows["blocks"] + 1
    rows["row"] = np.append(0, rows["row_words"].astype(np.int64).cumsum()[:-1])
    rows["parts_begin"], rows["parts_end"] = parts_begin, parts_end
    rows["chunks_begin"], rows["chunks_end"] = places["chunks_begin"][parts_begin], chunks_end[parts_end - 1]
    return {"parts": parts, "places": places, "chunks": chunks, "tiles": rows}


class KernelSelection:
    """The entries of some tiles with parts on one accelerator. Everything is queued on the stream of the parts.

    `rows`: by tile its entries, with their number at the end; there is room for the most that a tile may have.
    """

    def __init__(self, library: KernelLibrary, tiles: Tiles) -> None:
        self._library = library
        self._parts = [part for _, parts in tiles.values() for part in parts]
        tables = _tables_of(tiles)
        self._chunks = len(tables["chunks"])
        with on(self._parts[0].stream):
            entries = self._select(tables)
        lengths = tables["tiles"]["row_words"].tolist()
        self.rows: dict[int, torch.Tensor] = dict(zip(tiles, entries.split_with_sizes(lengths), strict=True))

    def _select(self, tables: dict[str, Table]) -> torch.Tensor:
        """Launch the kernels that select. Returns all rows of entries, one after another."""
        device = self._library.device
        joined, begins = _joined([*tables.values()])
        there = joined.to(device, non_blocking=True)
        n_parts, n_chunks, n_tiles = (len(tables[name]) for name in ("parts", "chunks", "tiles"))
        words = {
            "high": n_parts * constant("kHighBins"),
            "low": n_parts * constant("kLowBins"),
            "bins": n_parts * layouts().sizeof("TopKBin") // 4,
            "counts": n_chunks * layouts().sizeof("TopKCounts") // 4,
        }
        counted = torch.zeros(sum(words.values()), dtype=torch.int32, device=device)
        sent = torch.empty(n_chunks * layouts().sizeof("TopKSent") // 4, dtype=torch.int32, device=device)
        entries = torch.empty(int(tables["tiles"]["row_words"].sum()), dtype=torch.int32, device=device)
        at = {name: there.data_ptr() + begin for name, begin in zip(tables, begins, strict=True)}
        at |= {name: t.data_ptr() for name, t in zip(words, counted.split_with_sizes([*words.values()]), strict=True)}
        at |= {"sent": sent.data_ptr(), "entries": entries.data_ptr()}
        types = {name: field.type for name, field in layouts().typeof("TopKArgs").fields}
        self._args = layouts().new("TopKArgs *", {name: layouts().cast(types[name], a) for name, a in at.items()})
        self._kept = there, sent  # feed_back() reads them
        for kernel, blocks in (
            ("count_high", n_chunks),
            ("find_high", n_parts),
            ("count_low", n_chunks),
            ("place", n_tiles),
            ("emit", n_chunks),
        ):
            self._library.launch(SOURCE, kernel, DEFINES, self._args, blocks)
        return entries

    def spread(self, to: torch.Tensor) -> None:
        """Write the values of all entries, dense, with zeros for the rest.

        `to`: int16, on the accelerator, as long as the parameter to which all parts belong. Reads `rows`.
        """
        with on(self._parts[0].stream):
            self._args.dense = layouts().cast("uint16_t *", to.data_ptr())
            self._library.launch(SOURCE, "spread", DEFINES, self._args, self._chunks)

    def feed_back(self) -> None:
        """Add what the step did not send to the residuals."""
        if any(part.updates_residual for part in self._parts):
            with on(self._parts[0].stream):
                self._library.launch(SOURCE, "feed_back", DEFINES, self._args, self._chunks)


def nbytes_of_part(topk: TopK, n: int) -> int:
    """Return about how much memory a part of `n` elements takes on the accelerator until its entries are sent."""
    of_bins = constant("kHighBins") + constant("kLowBins")
    return 4 * (of_bins + topk_count(topk.ratio, n)) + CHUNK_BYTES * (n // CHUNK + 8)


def _joined(tables: Sequence[Table]) -> tuple[torch.Tensor, list[int]]:
    """Return tables one after another, each aligned, as bytes in pinned memory, and where each begins."""
    ends = np.cumsum([table.nbytes + -table.nbytes % ALIGNMENT for table in tables])
    begins = [0, *ends[:-1].tolist()]
    joined = torch.empty(int(ends[-1]), dtype=torch.uint8, device="cpu", pin_memory=True)
    # Not by copy_(), which would wait for torch's threads: the engine's may have all cores.
    for table, begin in zip(tables, begins, strict=True):
        joined.numpy()[begin : begin + table.nbytes] = table.view(np.uint8)
    return joined, begins

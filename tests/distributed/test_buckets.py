"""Items are cut into buckets by rows: every row once and in order, aligned, and no bucket larger than allowed."""

import pytest
import torch

from csd_optim.distributed.buckets import ALIGN, aligned, pack, view_in


def test_by_hand():
    assert pack([(5, 4), (2, 10), (1, 100), (0, 7)], 32) == [
        [(0, 0, 5, 0)],  # 20 bytes; a row of ten would begin at 32
        [(1, 0, 2, 0)],
        [(2, 0, 1, 0)],  # a row is not cut
    ]
    assert pack([(5, 4), (2, 10)], 32, align=1) == [[(0, 0, 5, 0), (1, 0, 1, 20)], [(1, 1, 1, 0)]]
    assert pack([], 32) == []


@pytest.mark.parametrize("max_bytes", [64, 100, 4096])
def test_every_row_is_there_once(max_bytes):
    torch.manual_seed(max_bytes)
    items = torch.stack([torch.randint(0, 50, (40,)), torch.randint(1, 90, (40,))], 1).tolist()
    buckets = pack(items, max_bytes)
    rows = [(cut.item, cut.first + i) for cuts in buckets for cut in cuts for i in range(cut.rows)]
    assert rows == [(item, i) for item, (n, _) in enumerate(items) for i in range(n)]
    for cuts in buckets:
        ends = [cut.offset + cut.rows * items[cut.item][1] for cut in cuts]
        assert ends[-1] <= max_bytes or (len(cuts) == 1 and cuts[0].rows == 1)
        assert [cut.offset for cut in cuts] == [0, *map(aligned, ends[:-1])]
        assert not any(cut.offset % ALIGN for cut in cuts)


def test_views_share_the_buffer():
    buffer = torch.zeros(64, dtype=torch.uint8)
    view_in(buffer, 16, torch.float32, (2, 3)).fill_(1.0)
    assert view_in(buffer, 20, torch.float32, ()).item() == 1.0
    assert buffer[:16].sum() == buffer[40:].sum() == 0

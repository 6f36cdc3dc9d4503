"""Items are cut into buckets by rows: every row once and in order, aligned, and no bucket larger than allowed."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from csd_optim.distributed.buckets import ALIGN, aligned, pack, view_in


def test_by_hand():
    assert pack([(5, 4), (2, 10), (1, 100), (0, 7)], 32) == [
        [(0, 0, 5, 0)],  # 20 bytes; a row of ten would begin at 32
        [(1, 0, 2, 0)],
        [(2, 0, 1, 0)],  # a row is not cut
    ]
    assert pack([(5, 4), (2, 10)], 32, align=1) == [[(0, 0, 5, 0), (1, 0, 1, 20)], [(1, 1, 1, 0)]]
    assert pack([], 32) == []


ITEMS = st.lists(st.tuples(st.integers(0, 50), st.integers(1, 90)), max_size=40)  # rows, bytes of a row


@given(ITEMS, st.integers(1, 4096), st.sampled_from([1, ALIGN]))
def test_every_row_is_there_once(items, max_bytes, align):
    buckets = pack(items, max_bytes, align)
    rows = [(cut.item, cut.first + i) for cuts in buckets for cut in cuts for i in range(cut.rows)]
    assert rows == [(item, i) for item, (n, _) in enumerate(items) for i in range(n)]
    for cuts in buckets:
        ends = [cut.offset + cut.rows * items[cut.item][1] for cut in cuts]
        assert ends[-1] <= max_bytes or (len(cuts) == 1 and cuts[0].rows == 1)
        assert [cut.offset for cut in cuts] == [0, *(aligned(end, align) for end in ends[:-1])]
        assert not any(cut.offset % align for cut in cuts)


def test_views_share_the_buffer():
    buffer = torch.zeros(64, dtype=torch.uint8)
    view_in(buffer, 16, torch.float32, (2, 3)).fill_(1.0)
    assert view_in(buffer, 20, torch.float32, ()).item() == 1.0
    assert buffer[:16].sum() == buffer[40:].sum() == 0

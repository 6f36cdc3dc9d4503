"""The order of passes over tiles: each tile takes each pass once, and pass 2 after what it waits for."""

from hypothesis import given
from hypothesis import strategies as st

from csd_optim.muon.schedule import BEHIND, Matrix, groups_of


@st.composite
def matrices(draw):
    """Draw matrices one behind another, which share tiles, in any order, so that groups far apart share tiles, too."""
    made, begin, tile_elems = [], 0, draw(st.sampled_from([16, 64, 256, 1024]))
    for row, shape in enumerate(draw(st.lists(st.tuples(st.integers(1, 39), st.integers(1, 59)), max_size=11))):
        end = begin + shape[0] * shape[1]
        made.append(Matrix(row, shape, tuple(range(begin // tile_elems, (end - 1) // tile_elems + 1))))
        begin = end
    return draw(st.permutations(made))


LEAST = st.sampled_from([1, 100, 500, 1000, 10**6])  # elements of a group


@given(matrices(), LEAST)
def test_each_tile_takes_each_pass_once_and_in_order(made, least):
    groups = groups_of(made, least)
    assert [matrix for group in groups for matrix in group.matrices] == made
    assert all(group.numel >= least for group in groups[:-1])
    assert all(sum(m.numel for m in group.matrices[:-1]) < least for group in groups)
    tiles = {tile for matrix in made for tile in matrix.tiles}
    for due in ("first", "second"):
        listed = [tile for group in groups for tile in getattr(group, due)]
        assert sorted(listed) == sorted(tiles)
    done = set()
    for k, group in enumerate(groups):
        done.update(group.first)
        for matrix in group.matrices:
            assert done.issuperset(matrix.tiles)  # X is whole when the group is orthogonalized
        for tile in group.second:  # and all X of the tile are
            assert max(j for j, other in enumerate(groups) if any(tile in m.tiles for m in other.matrices)) == k


@given(matrices(), LEAST)
def test_no_buffer_is_used_again_before_the_passes_that_need_it_are_over(made, least):
    groups = groups_of(made, least)
    first = {tile: k for k, group in enumerate(groups) for tile in group.first}
    second = {tile: k for k, group in enumerate(groups) for tile in group.second}
    used = []  # by group: with which groups come the first and the last pass that need its X
    for group in groups:
        tiles = [tile for matrix in group.matrices for tile in matrix.tiles]
        used.append((min(map(first.get, tiles)), max(map(second.get, tiles))))
    for j, (begin, end) in enumerate(used):
        for k in range(j):
            if groups[j].buffer == groups[k].buffer:
                assert end + BEHIND <= used[k][0] or used[k][1] + BEHIND <= begin


def test_few_buffers_are_enough_where_neighbours_share_tiles():
    made = [Matrix(k, (10, 100), tuple(range(k * 10, k * 10 + 11))) for k in range(20)]
    assert max(group.buffer for group in groups_of(made, least=1000)) + 1 == 5

"""The order of passes over tiles: each tile takes each pass once, and pass 2 after what it waits for."""

import random

import pytest

from csd_optim.muon.schedule import Matrix, groups_of


def matrices(rng, tile_elems):
    """Matrices one behind another, which share tiles."""
    made, begin = [], 0
    for row in range(rng.randrange(1, 12)):
        shape = (rng.randrange(1, 40), rng.randrange(1, 60))
        end = begin + shape[0] * shape[1]
        made.append(Matrix(row, shape, tuple(range(begin // tile_elems, (end - 1) // tile_elems + 1))))
        begin = end
    return made


@pytest.mark.parametrize("seed", range(50))
def test_each_tile_takes_each_pass_once_and_in_order(seed):
    rng = random.Random(seed)
    made = matrices(rng, tile_elems=rng.choice([16, 256, 1024]))
    if rng.random() < 0.5:
        made.reverse()
    groups = groups_of(made, least=rng.choice([1, 500, 10**6]))
    assert [matrix for group in groups for matrix in group.matrices] == made
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


@pytest.mark.parametrize("least", [1, 100, 1000])
def test_groups_have_at_least_so_many_elements(least):
    made = matrices(random.Random(3), tile_elems=64)
    groups = groups_of(made, least)
    assert all(group.numel >= least for group in groups[:-1])
    assert all(sum(m.numel for m in group.matrices[:-1]) < least for group in groups)

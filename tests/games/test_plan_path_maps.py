"""Maps of Plan-Path: distances against a Python breadth-first search, generation within its bounds, disjoint splits (law 12)."""

import collections
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from marl_llm.games import PlanPath
from marl_llm.games.kit.grids import FAR
from marl_llm.games.plan_path import distances, map_from_rows, rows_of
from marl_llm.games.plan_path.maps import SPLITS, fingerprint, in_split

SMALL = PlanPath(height=3, width=3, min_distance=1, max_distance=8, wall_density=0.3)
WIDE = PlanPath(height=5, width=7, min_distance=3, max_distance=9, wall_density=0.2)


def search(walls, goal):
    """Breadth-first search by hand: moves to the goal from every cell."""
    found = np.full(walls.shape, FAR)
    found[tuple(goal)] = 0
    queue = collections.deque([tuple(goal)])
    while queue:
        r, c = queue.popleft()
        for cell in ((r - 1, c), (r + 1, c), (r, c - 1), (r, c + 1)):
            if 0 <= cell[0] < walls.shape[0] and 0 <= cell[1] < walls.shape[1] and not walls[cell] and found[cell] == FAR:
                found[cell] = found[r, c] + 1
                queue.append(cell)
    return found


@functools.cache
def maps(game, split, count=600, root=0):
    """Maps by number, as NumPy arrays, and their fingerprints."""
    keys = jax.random.split(jax.random.fold_in(jax.random.key(root), SPLITS.index(split)), count)
    draw = jax.jit(jax.vmap(lambda key: game.instance(key, split)))
    drawn = draw(keys)
    prints = jax.jit(jax.vmap(fingerprint))(drawn.walls, drawn.start, drawn.goal)
    return jax.tree.map(np.asarray, drawn), np.asarray(prints)


def contents(drawn):
    return [(w.tobytes(), *s, *g) for w, s, g in zip(drawn.walls, drawn.start, drawn.goal, strict=True)]


@pytest.mark.parametrize("shape", [(2, 5), (6, 6), (7, 4)])
def test_distances_equal_a_breadth_first_search(shape):
    rng = np.random.default_rng(0)
    walls = rng.random((60, *shape)) < rng.uniform(0, 0.6, (60, 1, 1))
    goals = np.stack([rng.integers(0, n, 60) for n in shape], -1)
    walls[np.arange(60), goals[:, 0], goals[:, 1]] = False
    got = np.asarray(jax.jit(jax.vmap(distances))(jnp.asarray(walls), jnp.asarray(goals, jnp.int32)))
    for i in range(60):
        np.testing.assert_array_equal(got[i], search(walls[i], goals[i]))
    assert (got == FAR).any()
    assert got[got < FAR].max() > max(shape)


@pytest.mark.parametrize("game", [SMALL, WIDE], ids=["3x3", "5x7"])
def test_generated_maps_are_solvable_and_within_every_bound(game):
    drawn, _ = maps(game, "train")
    rows = np.arange(len(drawn.start))
    start, goal = tuple(drawn.start.T), tuple(drawn.goal.T)
    for i in rows[:100]:
        np.testing.assert_array_equal(drawn.distance[i], search(drawn.walls[i], drawn.goal[i]))
    away = drawn.distance[rows, start[0], start[1]]
    assert away.min() >= game.min_distance
    assert away.max() <= game.max_distance
    assert len(set(away)) > 3
    assert not drawn.walls[rows, start[0], start[1]].any()
    assert not drawn.walls[rows, goal[0], goal[1]].any()
    assert drawn.walls.sum((1, 2)).max() <= game.wall_cap
    assert jax.vmap(game.valid)(jax.tree.map(jnp.asarray, drawn)).all()
    assert len(set(zip(*goal, strict=True))) == game.height * game.width  # every cell is a goal some time
    assert len(set(zip(*start, strict=True))) == game.height * game.width


@pytest.mark.parametrize("density", [0.0, 0.1, 0.25])
def test_the_share_of_walls_is_near_its_setting(density):
    game = PlanPath(height=5, width=7, min_distance=1, max_distance=30, wall_density=density)
    drawn, _ = maps(game, "train")
    # dense maps that cut the goal off are drawn again, so the share lies a little below the setting
    assert density * 0.75 - 0.005 <= drawn.walls.mean() <= density + 0.005


def test_a_cap_on_the_walls_is_kept():
    game = PlanPath(height=5, width=7, min_distance=1, max_distance=30, wall_density=0.2, max_walls=4)
    walls = maps(game, "train")[0].walls.sum((1, 2))
    assert walls.max() == 4


def test_law_12_no_map_is_in_two_splits():
    """On 3x3 the maps are so few that the same one is drawn many times within a split, and still never in two."""
    seen = {split: maps(SMALL, split) for split in SPLITS}
    sets = {split: set(contents(drawn)) for split, (drawn, _) in seen.items()}
    prints = {split: set(p.tolist()) for split, (_, p) in seen.items()}
    assert len(sets["test"]) < 600  # maps do repeat, so a leak would show
    for a, b in (("train", "validation"), ("train", "test"), ("validation", "test")):
        assert not sets[a] & sets[b]
        assert not prints[a] & prints[b]


def test_law_12_another_seed_keeps_the_splits_apart():
    train = set(contents(maps(SMALL, "train", root=7)[0]))
    test = set(contents(maps(SMALL, "test")[0]))
    assert not train & test
    assert train & set(contents(maps(SMALL, "train")[0]))  # while two seeds of one split do share maps


def test_every_fingerprint_belongs_to_exactly_one_split():
    prints = jnp.asarray(np.random.default_rng(0).integers(0, 2**32, 4000, dtype=np.uint32))
    belongs = np.stack([jax.vmap(lambda print_, split=split: in_split(print_, split))(prints) for split in SPLITS])
    np.testing.assert_array_equal(belongs.sum(0), 1)
    np.testing.assert_allclose(belongs.mean(1), [1 / 16, 1 / 16, 14 / 16], atol=0.02)


def test_equal_maps_have_equal_fingerprints_and_any_change_shows():
    drawn, prints = maps(WIDE, "train")
    by_content = {}
    for content, value in zip(contents(drawn), prints, strict=True):
        assert by_content.setdefault(content, value) == value
    assert len(set(by_content.values())) == len(by_content)
    rows = ["A.#", "...", "#.G"]
    one = map_from_rows(rows)

    def hashed(m):
        return int(fingerprint(m.walls, m.start, m.goal))

    changed = ["A..", "...", "#.G"], [".A#", "...", "#.G"], ["A.#", "..G", "#.."], ["G.#", "...", "#.A"], ["A.#", ".#.", "#.G"]
    assert hashed(one) == hashed(map_from_rows(rows))
    wanted = {hashed(one)}
    for other in changed[:-1]:
        wanted.add(hashed(map_from_rows(other)))
    assert len(wanted) == len(changed)
    with pytest.raises(ValueError, match="unsolvable"):
        map_from_rows(changed[-1])


def test_maps_depend_on_the_key_and_on_nothing_else():
    one, again = maps(SMALL, "train", 20)[0], maps(SMALL, "train", 20, 0)[0]
    assert contents(one) == contents(again)
    assert contents(one) != contents(maps(SMALL, "train", 20, 1)[0])
    single = SMALL.instance(jax.random.split(jax.random.fold_in(jax.random.key(0), SPLITS.index("train")), 20)[4], "train")
    np.testing.assert_array_equal(single.walls, one.walls[4])


def test_a_distance_that_no_map_has_gives_an_instance_that_is_not_valid():
    game = PlanPath(height=2, width=2, min_distance=4, max_distance=4, wall_density=0.0)
    assert not bool(game.valid(game.instance(jax.random.key(0), "train")))


def test_law_12_a_split_that_no_map_is_in_does_not_borrow_one():
    """Of the four maps of this game none is in 'test'."""
    game = PlanPath(height=2, width=2, min_distance=2, max_distance=2, wall_density=0.0)
    corners = [["A.", ".G"], ["G.", ".A"], [".A", "G."], [".G", "A."]]
    prints = [fingerprint(m.walls, m.start, m.goal) for m in map(map_from_rows, corners)]
    assert not any(bool(in_split(p, "test")) for p in prints)
    assert not bool(game.valid(game.instance(jax.random.key(0), "test")))
    assert bool(game.valid(game.instance(jax.random.key(0), "train")))


def test_unknown_splits_are_refused_with_the_known_ones():
    with pytest.raises(ValueError, match="'tset'.*validation, test, train"):
        SMALL.instance(jax.random.key(0), "tset")


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (["A.", "G"], "one length"),
        ([], "one length"),
        (["A?", ".G"], r"unknown signs.*\?"),
        (["A.", ".."], "0 cells 'G'"),
        (["AA", ".G"], "2 cells 'A'"),
        (["A#", "#G"], "unsolvable"),
    ],
)
def test_a_map_that_cannot_be_played_is_refused(rows, message):
    with pytest.raises(ValueError, match=message):
        map_from_rows(rows)


def test_rows_survive_the_way_to_a_map_and_back():
    rows = ["A.#.", "..#.", "...G"]
    made = map_from_rows(rows)
    assert rows_of(made.walls, made.start, made.goal) == rows
    assert rows_of(made.walls, made.goal, made.goal) == ["..#.", "..#.", "...*"]
    np.testing.assert_array_equal(made.distance, search(np.asarray(made.walls), np.asarray(made.goal)))

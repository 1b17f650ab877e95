"""Packing on the host: nothing dropped, copied or cut (law 5), one prompt per family, few shapes, faults that name the sample."""

import numpy as np
import pytest

from marl_llm.algorithms import Samples
from marl_llm.training import PackingError, TokenSample, pack
from marl_llm.training.minibatches import prompts_of
from marl_llm.training.packing import Tokens, bucket, first_fit


def sample(prompt, response, name=""):
    return TokenSample(prompt, response, -0.1 * np.arange(1, len(response) + 1), name)


def some(seed, count=60, longest=20):
    """Samples over a few prompts, which some share and some do not; ids name the sample, so that a mix-up shows."""
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(1, 90, rng.integers(1, longest)) for _ in range(count // 3)]
    pick = rng.integers(0, len(prompts), count)
    return [sample(prompts[p], rng.integers(1, 90, rng.integers(1, longest)), f"s{i}") for i, p in enumerate(pick)]


def test_the_row_is_the_picture_in_the_modules_text():
    samples = [sample([7, 7, 7], [1, 1]), sample([7, 7, 7], [2, 2, 2]), sample([8, 8], [3])]
    rows = pack(samples, 12)
    want = dict(
        tokens=[7, 7, 7, 1, 1, 2, 2, 2, 8, 8, 3, 0],
        segments=[1, 1, 1, 1, 1, 1, 1, 1, 2, 2, 2, 0],
        branches=[0, 0, 0, 1, 1, 2, 2, 2, 0, 0, 3, 0],
        positions=[0, 1, 2, 3, 4, 3, 4, 5, 0, 1, 2, 0],
        predict=[2, 3, 2, 5, 6, 9],
        targets=[1, 1, 2, 2, 2, 3],
        sample=[0, 1, 2, -1],
        first=[0, 2, 5, 0],
        length=[2, 3, 1, 0],
    )
    for name, value in want.items():
        np.testing.assert_array_equal(getattr(rows, name)[0], value, err_msg=name)
    np.testing.assert_allclose(rows.log_probs[0], [-0.1, -0.2, -0.1, -0.2, -0.3, -0.1])


@pytest.mark.parametrize("devices", [1, 3])
@pytest.mark.parametrize("seed", range(5))
def test_law_5_every_sample_is_there_once_and_whole(seed, devices):
    samples = some(seed)
    rows = pack(samples, 64, devices)
    seen = []
    for b, n in zip(*np.nonzero(rows.sample >= 0), strict=True):
        s = samples[rows.sample[b, n]]
        at = slice(rows.first[b, n], rows.first[b, n] + rows.length[b, n])
        np.testing.assert_array_equal(rows.targets[b, at], s.response)
        np.testing.assert_array_equal(rows.log_probs[b, at], s.log_probs)
        own = np.flatnonzero(rows.branches[b] == n + 1)
        segment = rows.segments[b, own[0]]
        prompt = np.flatnonzero((rows.segments[b] == segment) & (rows.branches[b] == 0))
        np.testing.assert_array_equal(rows.tokens[b, prompt], s.prompt)
        np.testing.assert_array_equal(rows.tokens[b, own], s.response)
        assert set(rows.segments[b, own]) == {segment}
        np.testing.assert_array_equal(rows.positions[b, np.r_[prompt, own]], np.arange(s.tokens))
        np.testing.assert_array_equal(rows.predict[b, at], np.r_[prompt[-1], own[:-1]])  # each token is predicted by the one before it
        seen.append(int(rows.sample[b, n]))
    assert sorted(seen) == list(range(len(samples)))
    assert rows.length.sum() == sum(s.response.size for s in samples)
    each = len(rows.tokens) // devices
    full = rows.length[:, 0].reshape(devices, each) > 0
    assert np.all(full[:, :-1] >= full[:, 1:])  # rows that hold something come first on each device
    assert np.ptp(full.sum(1)) <= 1


def test_a_prompt_that_is_shared_is_there_once_unless_its_family_is_larger_than_a_row():
    shared = [sample([5] * 10, [i, i, i]) for i in range(1, 5)]
    rows = pack(shared, 64)
    assert np.count_nonzero(rows.segments) == 10 + 4 * 3
    rows = pack(shared, 16)  # two responses beside each copy
    assert [len(r[0]) for r in Tokens.of(shared).plan(range(len(shared)), 16)] == [2, 2]
    assert np.count_nonzero(rows.segments) == 2 * 10 + 4 * 3
    assert Tokens.of(some(1)).families(range(60)) != [[i] for i in range(60)]


def test_rows_are_filled_first_fit_decreasing():
    assert first_fit([(n,) for n in (3, 7, 2, 5, 5)], (8,)) == [[1], [3, 0], [4, 2]]
    samples = [sample([i + 1] * n, [1]) for i, n in enumerate((2, 6, 1, 4, 4))]
    assert Tokens.of(samples).plan(range(len(samples)), 8) == [[[1]], [[3], [0]], [[4], [2]]]


@pytest.mark.parametrize("devices", [1, 2])
def test_rows_are_dealt_by_how_full_they_are_whatever_the_order_that_they_were_made_in(devices):
    """A large family whose remainder is small comes before others are packed, so rows are not made in the order of their fill."""
    samples = [sample([i + 1] * n, [1]) for i, n in enumerate((40, 38, 20, 60, 7, 33))]
    rows = pack(samples, 64, devices)
    used = (np.asarray(rows.segments) > 0).sum(1).reshape(devices, -1)
    dealt = used.T.reshape(-1)  # as rows were dealt to the devices in turn
    assert len(set(dealt[dealt > 0])) > 1
    np.testing.assert_array_equal(dealt, np.sort(dealt)[::-1])


def test_shapes_are_few():
    shapes = {tuple(x.shape for x in pack(some(seed, count), 64) if x is not None) for seed in range(8) for count in (20, 60, 61, 80)}
    assert len(shapes) <= 10
    few = {tuple(x.shape for x in pack(some(seed, count), 64, 2, True) if x is not None) for seed in range(8) for count in range(4, 90, 8)}
    assert {shapes[0] for shapes in few} == {(2 * 16, 64)}
    assert len(few) <= 2  # a quarter of the places for targets, or all
    assert {shapes[7][1] for shapes in few} == {4096}  # more samples than fit, for SAMPLE_PLACES // 64 cost nothing
    assert [bucket(n) for n in (0, 1, 2, 3, 5, 8)] == [1, 1, 2, 4, 8, 8]
    assert [bucket(n, growth=4) for n in (0, 1, 2, 4, 5, 16, 17)] == [1, 1, 4, 4, 16, 16, 64]
    assert bucket(3, 16, growth=4) == 16
    assert pack([sample([1] * 30, [2])], 512).tokens.shape == (1, 64)
    assert pack([sample([1] * 300, [2])], 512).tokens.shape == (1, 512)


def test_faults_name_the_sample():
    with pytest.raises(PackingError, match=r"'env 3, coder' has 50 \+ 20 = 70 tokens, more than a row's 64: raise row_tokens"):
        pack([sample([1], [2]), sample([1] * 50, [2] * 20, "env 3, coder")], 64)
    with pytest.raises(PackingError, match="'x' has an empty response"):
        sample([1], [], "x")
    with pytest.raises(PackingError, match="'x' has an empty prompt"):
        sample([], [1], "x")
    with pytest.raises(PackingError, match="'x' has 1 log-probs for 2 response tokens"):
        TokenSample([1], [2, 3], [0.0], "x")


def test_a_row_that_is_exactly_full_is_not_too_long():
    assert pack([sample([1] * 60, [2] * 4)], 64).tokens.shape == (1, 64)
    with pytest.raises(PackingError, match="sample 0 has 60 \\+ 5 = 65 tokens"):
        pack([sample([1] * 60, [2] * 5)], 64)


def test_kept_ids_lie_beside_their_targets():
    kept = [np.asarray([[1, 4], [2, -1]]), np.asarray([[3, 2], [5, 6], [1, -1]])]
    samples = [TokenSample([7, 7], [1, 2], [-0.1, -0.2], "a", kept[0]), TokenSample([8], [3, 5, 1], [-1.0] * 3, "b", kept[1])]
    rows = pack(samples, 12)
    for b, n in np.argwhere(rows.sample >= 0):
        at = slice(rows.first[b, n], rows.first[b, n] + rows.length[b, n])
        np.testing.assert_array_equal(rows.kept_ids[b, at], kept[rows.sample[b, n]])
    assert pack([TokenSample([7], [1], [0.0])], 12).kept_ids is None
    with pytest.raises(PackingError, match="'c' does not say which tokens it was drawn from"):
        pack([samples[0], TokenSample([7], [1], [0.0], "c")], 12)
    with pytest.raises(PackingError, match=r"'d' has kept ids \(1, 2\) for 2 response tokens"):
        TokenSample([7], [1, 2], [0.0, 0.0], "d", [[1, 2]])


def test_tasks_that_share_a_prompt_count_one_each_in_a_minibatch_and_lie_behind_one_copy_of_it():
    one, two = [7, 7, 7], [8, 8]
    tokens = Tokens.of([sample(one, [1]), sample(one, [2]), sample(two, [3]), sample(one, [4]), sample(two, [5])])
    task, zero = np.asarray([0, 1, 0, 0, 0], np.int32), np.zeros(5, np.int32)
    table = Samples(instance=task, env=task, agent=zero, turn=zero, trajectory=task, team=zero + 0.0, local=zero + 0.0)
    everyone = np.arange(5)
    assert prompts_of(tokens, table, everyone) == [[0, 3], [1], [2, 4]]  # of one task and one prompt, in the order given
    assert prompts_of(tokens, table, np.asarray([4, 1, 3])) == [[4], [1], [3]]
    assert prompts_of(tokens, table, everyone[:0]) == []
    assert tokens.families(everyone) == [[0, 1, 3], [2, 4]]  # a copy of the prompt is a matter of computation
    rows = tokens.pack(everyone, 12)
    assert int((rows.segments > 0).sum()) == 3 + 3 + 2 + 2

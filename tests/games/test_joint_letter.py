"""The joint-letter game: what is read, what is paid, what is not understood, and disjoint pairs."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from marl_llm.games import Game, JointLetter, make_game, role_of

GAME = JointLetter()


def state_of(*digits):
    return GAME.reset(jnp.asarray(digits, jnp.int32))


def say(state, role, text, cut=2):
    ids = GAME.tokenizer.encode(text)[:cut]
    tokens = jnp.asarray(ids + [GAME.tokenizer.pad_id] * (2 - len(ids)), jnp.int32)
    return GAME.act(state, role, tokens, jnp.arange(2) < len(ids))


def both(digits, first, second):
    before = state_of(*digits)
    return before, say(say(before, "first", first), "second", second)


@pytest.mark.parametrize(
    ("first", "second", "total", "success"),
    [
        ("a 3", "a 7", 1 + 3 * 0.25 + 2 * 0.1, 1),
        ("a 3", "b 7", 2 * 0.25 + 2 * 0.1, 0),
        ("a 4", "a 7", 2 * 0.25 + 2 * 0.1, 0),
        ("a 7", "a 3", 0.25 + 2 * 0.1, 0),  # the other's digit is no echo
        ("3 a", "a 7", 0.25 + 0.1, 0),  # the right words in the wrong places
        ("first first", "=3 second", 0.0, 0),
        ("; ;", "; ;", 0.0, 0),
    ],
)
def test_one_scalar_pays_both_by_the_parts(first, second, total, success):
    before, after = both((3, 7), first, second)
    assert float(GAME.outcome(after)) == success
    assert bool(GAME.done(after))
    for role in ("first", "second"):
        paid = GAME.rewards(before, after, role)
        assert float(paid.team) == pytest.approx(total)
        assert float(paid.local) == 0
        assert sum(map(float, paid.components.values())) == pytest.approx(total)


def test_only_the_speaker_whose_words_do_not_parse_is_not_well_formed():
    before, after = both((3, 7), "a 3", "first 7")
    assert bool(GAME.rewards(before, after, "first").well_formed)
    assert not bool(GAME.rewards(before, after, "second").well_formed)


def test_a_response_cut_short_earns_nothing_for_the_missing_part():
    before = state_of(3, 7)
    after = say(say(before, "first", "a", cut=1), "second", "a 7")
    assert float(GAME.rewards(before, after, "first").team) == pytest.approx(0.25 * 2 + 0.1 * 2)
    assert not bool(GAME.rewards(before, after, "first").well_formed)


def test_silence_of_both_is_no_agreement():
    before = state_of(0, 0)
    assert not bool(GAME.done(before))
    assert float(GAME.outcome(before)) == 0
    assert float(GAME.rewards(before, before, "first").team) == 0


def test_law_1_each_reads_its_own_name_and_digit_and_the_text_encodes_to_the_same_ids():
    observe = {role: jax.jit(lambda s, role=role: GAME.observe(s, role)) for role in ("first", "second")}
    for a, b in itertools.product(range(10), range(0, 10, 3)):
        for role, digit in (("first", a), ("second", b)):
            prompt = observe[role](state_of(a, b))
            text = GAME.tokenizer.decode(prompt.ids)
            assert text == f"{role} ={digit}"
            assert GAME.tokenizer.encode(text) == prompt.ids.tolist()
            assert bool(jnp.all(prompt.where))


def test_the_second_agent_does_not_read_what_the_first_wrote():
    state = state_of(3, 7)
    spoken = say(state, "first", "c 3")
    np.testing.assert_array_equal(GAME.observe(state, "second").ids, GAME.observe(spoken, "second").ids)


def test_law_12_the_pairs_of_the_splits_are_disjoint_and_complete():
    draw = jax.jit(jax.vmap(GAME.instance, in_axes=(0, None)), static_argnums=1)
    seen = {}
    for split in ("train", "validation", "test"):
        pairs = draw(jax.random.split(jax.random.key(1), 1500), split)
        assert jax.vmap(GAME.valid)(pairs).all()
        seen[split] = {tuple(p) for p in np.asarray(pairs).tolist()}
    assert [len(seen[s]) for s in ("train", "validation", "test")] == [80, 10, 10]
    assert len(set.union(*seen.values())) == 100


def test_the_script_is_well_formed_and_aimless():
    state = state_of(3, 7)
    ids, where = jax.vmap(lambda k: GAME.script(state, "first", k))(jax.random.split(jax.random.key(0), 2000))
    texts = [GAME.tokenizer.decode(row) for row in np.asarray(ids)]
    assert set(texts) == {f"{letter} {digit}" for letter in "abcdefgh" for digit in range(10)}
    assert bool(jnp.all(where))


def test_the_game_is_a_game_with_the_protocols_parts():
    assert isinstance(GAME, Game)
    assert GAME.stages == (("first", "second"),)
    assert role_of(GAME, "second").response_tokens == 2
    assert GAME.task(jnp.asarray([3, 7])) == {"digits": [3, 7]}
    assert GAME.picture(state_of(1, 2)) is None


def test_bad_options_roles_and_splits_are_named():
    with pytest.raises(ValueError, match=r"joint_letter.letters=1 is not in \[2, 26\]"):
        JointLetter(letters=1)
    with pytest.raises(ValueError, match="letters=27"):
        make_game("joint_letter", letters=27)
    with pytest.raises(ValueError, match="no option 'leters'; did you mean 'letters'[?]"):
        make_game("joint_letter", leters=3)
    with pytest.raises(ValueError, match=r"no option 'zzz'\. Its options are letters"):
        make_game("joint_letter", zzz=3)
    with pytest.raises(ValueError, match="unknown game 'joint'.*plan_path, joint_letter"):
        make_game("joint")
    with pytest.raises(KeyError, match="no role 'third'.*first, second"):
        role_of(GAME, "third")
    with pytest.raises(ValueError, match="unknown split 'dev'"):
        GAME.instance(jax.random.key(0), "dev")

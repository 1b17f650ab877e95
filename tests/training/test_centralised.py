"""A centralised critic: its values are those of a direct pass over what all roles read and said before, and of nothing that comes later."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_critic_update import OWN, critic_params, gae_by_hand, unrolled_values, update_for
from test_update import SGD, assert_close, assert_same, params

from marl_llm.algorithms import Samples
from marl_llm.training import Tokens, TokenSample, Trained, make_train_state, with_value_head
from marl_llm.training.centralised import joint_history, of_compiled
from marl_llm.training.update import columns_of

STAGES = (("a", "b"), ("c",))  # the first two roles act at once
BUDGET, ROW = 3, 64
ALL = np.asarray([True, True, True])
CRITIC = critic_params() | {"value_head": jax.tree.map(lambda x: 0.1 * x, critic_params()["value_head"])}  # float32 rounds within 1e-6


def texts_of(plays=3, turns=2, agents=3):
    """(play, turn, agent) -> (prompt, response); no prompt of a play begins as another one does."""
    rng = np.random.default_rng(4)
    calls = [(play, turn, agent) for play in range(plays) for turn in range(turns) for agent in range(agents)]
    drawn = {call: [rng.integers(1, 17, rng.integers(1, most + 1)).tolist() for most in (3, BUDGET)] for call in calls}
    return {call: [[1 + 3 * call[1] + call[2], *prompt], response] for call, (prompt, response) in drawn.items()}


def played(texts, stages=STAGES, row=ROW):
    """(samples, tokens with joint histories, columns, figures) of plays that went on with every response."""
    samples = [TokenSample(prompt, response, np.full(len(response), -2.5)) for prompt, response in texts.values()]
    play, turn, agent = np.asarray(list(texts), np.int32).T
    pay = np.random.default_rng(5).normal(size=(2, len(texts))).astype(np.float32)
    table = Samples(
        instance=play, env=np.arange(len(texts)), agent=agent, turn=turn, trajectory=play, order=3 * turn + agent, team=pay[0],
        local=pay[1], where=np.ones(len(texts), bool), budget=np.full(len(texts), BUDGET),
    )  # fmt: skip
    tokens, figures = of_compiled(stages, Tokens.of(samples), table, row)
    return samples, tokens, table, figures


def by_hand(texts, play, turn, agent):
    """What the critic of a call reads in front of its prompt."""
    ids = []
    for t in range(turn + 1):
        for other in range(3):
            prompt, response = texts[play, t, other]
            if t < turn or (agent == 2 and other < 2):
                ids += prompt + response
            elif agent < 2 and other == 1 - agent:
                ids += prompt
    return ids


def judged(texts, row=ROW):
    """(advantages, values, targets) `[S, R]` of the critic."""
    _, tokens, table, _ = played(texts, row=row)
    judge = update_for(OWN, critic="centralised", row_tokens=row)._run_critic
    return judge(CRITIC, None, tokens, columns_of(tokens, table), np.arange(len(texts)), np.float32(0))


def step(tokens, table, critic, start, rates=(0.1, 0.1)):
    """(actor, critic, metrics) of a step from `start`, the critic's parameters."""
    both = Trained(make_train_state(params(), SGD), make_train_state(start, SGD))
    update = update_for(OWN, critic=critic, row_tokens=ROW)
    trained, metrics = update(both, None, tokens, table, ALL, jnp.float32(rates[0]), 0, critic_learning_rate=jnp.float32(rates[1]))
    return trained.policy.params, trained.critic.params, metrics


def test_values_are_those_of_a_direct_pass_over_the_joint_history():
    texts = texts_of()
    samples, *_ = played(texts)
    joint = [[*by_hand(texts, *call), *prompt] for call, (prompt, _) in texts.items()]
    prompt, where, response = (np.zeros((len(texts), size), kind) for size, kind in ((ROW, np.int32), (ROW, bool), (BUDGET, np.int32)))
    for i, (ids, sample) in enumerate(zip(joint, samples)):
        prompt[i, ROW - len(ids) :], where[i, ROW - len(ids) :], response[i, : sample.response.size] = ids, True, sample.response
    want = np.asarray(unrolled_values(CRITIC, prompt, where, response), np.float64)
    advantages, values, targets = judged(texts)
    real = np.arange(BUDGET) < np.asarray([sample.response.size for sample in samples])[:, None]
    np.testing.assert_allclose(values[: len(texts), :BUDGET][real], want[real], atol=1e-6)
    assert want[real].std() > 0.05
    _, _, table, _ = played(texts)
    goal = gae_by_hand(OWN, samples, table.team + table.local, want, np.zeros_like(want))
    for got, one in zip((advantages.estimates, targets), goal):
        np.testing.assert_allclose(got[: len(texts), :BUDGET][real], one[real], atol=1e-5)


def test_a_value_reads_all_roles_before_it_and_nothing_after_it():
    """The text of one call is exchanged; `number` counts calls in the order of play: a, b, c, a, b, c."""
    texts, calls = texts_of(plays=1), list(texts_of(plays=1))
    _, base, _ = judged(texts)
    for number, call in enumerate(calls):
        prompt, response = texts[call]
        _, said, _ = judged(texts | {call: [prompt, [1 + token % 16 for token in response]]})
        _, read, _ = judged(texts | {call: [[1 + token % 16 for token in prompt], response]})
        time = [2 * turn + (agent == 2) for _, turn, agent in calls]
        for i, other in enumerate(calls):
            same_said, same_read = (np.abs(moved[i] - base[i]).max() < 1e-6 for moved in (said, read))
            assert same_said == (time[i] <= time[number] and (i != number or len(response) == 1)), (call, other)
            assert same_read == (time[i] < time[number]), (call, other)
        np.testing.assert_allclose(said[number, 0], base[number, 0], atol=1e-6)  # the first token is valued before it is drawn


@pytest.mark.parametrize("row", [ROW, 20])
def test_how_long_a_response_becomes_does_not_show_in_its_earlier_values(row):
    """Where the history is cut to a row, too."""
    texts = texts_of(plays=1)
    call = next(call for call in list(texts)[::-1] if len(texts[call][1]) == BUDGET)
    number, (prompt, response) = list(texts).index(call), texts[call]
    _, whole, _ = judged(texts, row)
    _, short, _ = judged(texts | {call: [prompt, response[:1]]}, row)
    np.testing.assert_allclose(short[number, 0], whole[number, 0], atol=1e-6)
    assert played(texts, row=row)[3]["history_cut"] == (0 if row == ROW else pytest.approx(0.5, abs=0.34))


def test_where_nothing_else_is_read_it_is_the_critic_that_is_not_centralised():
    """One role that speaks once, and one whose prompts hold all of its past."""
    texts = texts_of(turns=1, agents=1)
    for play in range(3):
        texts[play, 1, 0] = [sum(texts[play, 0, 0], []) + [3, play + 1], [5, 6]]
    _, tokens, table, figures = played(texts, (("a",),))
    assert figures == {"history_tokens": 0, "history_cut": 0}
    central, own = (step(tokens, table, critic, critic_params()) for critic in ("centralised", "own"))
    assert_close(central[:2], own[:2], atol=1e-6)
    assert central[2] == pytest.approx(own[2], abs=1e-6)


def test_the_critic_steps_on_its_own_rows_and_the_actor_never_reads_them():
    _, tokens, table, _ = played(texts_of())
    _, critic, metrics = step(tokens, table, "centralised", critic_params())
    _, same_rows, plain = step(tokens.joint, table, "own", critic_params())
    assert_close(critic, same_rows, atol=1e-6)
    for name in ("value_loss", "value_error", "values_mean", "explained_variance", "critic_grad_norm"):
        assert metrics[name] == pytest.approx(plain[name], abs=1e-5), name
    blind = with_value_head(params())  # which values everything 0, whatever it reads: advantages are equal
    assert_same(step(tokens, table, "centralised", blind)[0], step(tokens, table, "own", blind)[0])


def test_a_history_is_whole_calls_in_the_order_of_play_cut_to_its_latest_ids():
    assert joint_history([], [], b"ask.") == b""
    assert joint_history([(b"ask.", b"")], [b"also"], b"then") == b"ask.also"  # an empty response: its prompt was read
    assert joint_history([(b"ask.", b"said")], [], b"ask.saidmore") == b""
    assert joint_history([(b"ask.", b"said"), (b"ask.saidmore", b"end.")], [b"ask."], b"ask.") == b"ask.saidmoreend."
    texts = texts_of(plays=1)
    whole, cut, none = (played(texts, row=row)[1].joint for row in (ROW, 14, 1))
    for i, (call, (prompt, _)) in enumerate(texts.items()):
        read = [tokens.ids[tokens.prompt_at[i] :][: tokens.prompt_size[i]].tolist() for tokens in (whole, cut, none)]
        history = by_hand(texts, *call)
        assert read == [history + prompt, (history + prompt)[-(14 - BUDGET) :], prompt]
    assert played(texts, row=1)[3] == {"history_tokens": 0, "history_cut": 1}


def test_of_a_response_without_tokens_the_prompt_is_read():
    texts = texts_of(plays=1, turns=1)
    _, tokens, table, _ = played(texts)
    silent = dataclasses.replace(tokens, size=tokens.size * np.asarray([0, 1, 1], np.int32), joint=None)
    table = dataclasses.replace(table, where=silent.size > 0)
    joint = of_compiled(STAGES, silent, table, ROW)[0].joint
    (a, _), (b, said), (c, _) = texts.values()
    assert joint.ids[joint.prompt_at[2] :][: joint.prompt_size[2]].tolist() == a + b + said + c


def test_law_10_tokens_without_joint_histories_are_refused():
    _, tokens, table, _ = played(texts_of())
    with pytest.raises(ValueError, match=r"needs the joint histories of compiled or hosted play \(Tokens\.joint\): use critic='own'"):
        step(dataclasses.replace(tokens, joint=None), table, "centralised", critic_params())

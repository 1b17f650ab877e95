"""Teams whose critics are centralised: compiled and hosted play keep the same histories, a resumed run is the same, others are refused."""

import dataclasses

import jax
import pytest
from test_law_13 import GAMES, PLAY
from test_team import ECHO, ENVIRONMENT, SPEC
from test_update import SGD, assert_close, assert_same

from marl_llm.algorithms import make_recipe
from marl_llm.models import ModelConfig, init_params
from marl_llm.text import train_pieces
from marl_llm.training import Checkpoints, HostedTeam, LearnerOptions, ModelSpec, make_mesh, make_optimizer, make_team
from marl_llm.training.update import by_identity
from marl_llm.workflows import Assignment, PlainText, Scripted, WorkflowError, separate

ADAM = make_optimizer()
PPO = make_recipe("ppo")


def tally_team(hosted=False, optimizer=ADAM):
    game = GAMES["tally"]
    shape = ModelConfig(game.tokenizer.vocab_size, width=16, layers=1, query_heads=2, key_value_heads=1, head_dim=8, feed_forward=16)
    spec = ModelSpec(shape, jax.jit(lambda key: jax.tree.map(lambda x: 1.5 * x, init_params(shape, key)))(jax.random.key(1)))
    options = LearnerOptions(PPO, optimizer, row_tokens=64, minibatch=512, critic="centralised")
    roles = {"ann": "even", "bob": "odd", "cy": "even"}
    return make_team(game, Assignment(roles), {"even": spec, "odd": spec}, options, make_mesh(1), play=PLAY, seed=3, hosted=hosted)


def test_law_13_compiled_and_hosted_play_keep_the_same_histories_and_take_the_same_step():
    """Two roles act at once, then a third one does; some plays end early."""
    found = []
    for hosted in (False, True):
        with tally_team(hosted, SGD) as one:
            batch = one.play(2, 5, 6)
            joint, order = batch.tokens.joint, by_identity(batch.tokens, batch.table)
            prompts = [joint.ids[joint.prompt_at[i] :][: joint.prompt_size[i]].tolist() for i in order[batch.table.where[order]]]
            figures = one.learn(batch, 1e-2, 1e-2)
            assert all(f["log_prob_gap"] < 1e-4 and f["critic_grad_norm"] > 0 for f in figures.values())
            found.append((prompts, {name: policy.params for name, policy in one.policies().items()}))
    assert found[0][0] == found[1][0]
    assert len(found[0][0]) >= 20 < max(map(len, found[0][0]))
    assert_close(found[0][1], found[1][1], atol=1e-3)


def test_law_7_a_run_that_is_resumed_ends_with_the_same_bytes(tmp_path):
    def run(one, first, steps):
        return [one.learn(one.play(number, 6 * number, 6), 1e-2, 1e-2) for number in range(first, first + steps)]

    with tally_team() as whole, tally_team() as half, tally_team() as again:
        figures = run(whole, 0, 3)
        assert figures[0]["odd"]["values_mean"] == 0 != figures[-1]["odd"]["values_mean"]
        run(half, 0, 1)
        checkpoints = Checkpoints(tmp_path)
        checkpoints.save(1, half.policies(), half.state())
        again.restore(checkpoints.restore(1, again.policies()), checkpoints.state(1))
        run(again, 1, 2)
        assert set(again.policies()) == {"even", "odd", "even.critic", "odd.critic"}
        assert_same(again.policies(), whole.policies())


def test_law_10_what_it_cannot_read_is_refused():
    options = LearnerOptions(PPO, ADAM, row_tokens=64, minibatch=8, critic="centralised")
    scripted = Assignment({"first": "first", "second": "script"}, {"script": Scripted(ENVIRONMENT.script)})
    with pytest.raises(WorkflowError, match="'script', which plays 'second', is no model of this program: use critic='own'"):
        HostedTeam(ENVIRONMENT, scripted, {"first": SPEC}, options, make_mesh(1))
    other = train_pieces(("b", "a", "c", "say", "again", "."))
    specs = {"first": SPEC, "second": dataclasses.replace(SPEC, renderer=PlainText(other, (int(other.ids_of(["."])[0]),)))}
    with pytest.raises(WorkflowError, match="models 'first' and 'second' need one tokenizer: token"):
        HostedTeam(ENVIRONMENT, separate(ECHO), specs, options, make_mesh(1))
    tree = dataclasses.replace(options, recipe=make_recipe("ppo", sampling="tree", group_size=2))
    with pytest.raises(WorkflowError, match="reads plays without a second candidate: use recipe.sampling=chain or parallel"):
        HostedTeam(ENVIRONMENT, separate(ECHO), {"first": SPEC, "second": SPEC}, tree, make_mesh(1))
    program = dataclasses.replace(ENVIRONMENT, program=print)
    with pytest.raises(WorkflowError, match="a foreign program does not say which call followed which"):
        HostedTeam(program, separate(ECHO), {"first": SPEC, "second": SPEC}, options, make_mesh(1))

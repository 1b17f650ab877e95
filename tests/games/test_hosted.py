"""Law 13: a value-state game that is played compiled and one that is played on the host give the same samples."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tally import Tally

from marl_llm.games import Game, JointLetter, PlanPath, Sokoban, Sudoku
from marl_llm.games.hosted import TextBudget, hosted
from marl_llm.models import ModelConfig, init_params
from marl_llm.rollout import model_player, play, scripted_player
from marl_llm.sampling import Engine, EngineConfig, pick_by_identity
from marl_llm.text import ByteTokenizer
from marl_llm.workflows import Assignment, Controller, Outside, PlainText, RolloutError, Scripted, WorkflowError, shared
from marl_llm.workflows.replay import replay
from marl_llm.workflows.samples import sample_table
from marl_llm.workflows.storage import read_trajectories, write_trajectories

GAMES = {
    "plan_path": PlanPath(height=3, width=3, min_distance=2, max_distance=4, max_moves=2, max_turns=2, wall_density=0.2),
    "joint_letter": JointLetter(letters=2),
    "tally": Tally(),
}
BOARDS = {
    "sokoban": Sokoban(height=5, width=5, min_walls=0, max_walls=1, min_length=3, max_moves=3, max_turns=2),
    "sudoku": Sudoku(max_fills=4, max_turns=2),
}
KEY, FIRST, E, K, STEP = jax.random.key(11), 5, 8, 3, 2


def model_of(game):
    return ModelConfig(
        vocab_size=game.tokenizer.vocab_size, width=16, layers=1, query_heads=2, key_value_heads=1, head_dim=8, feed_forward=16
    )


def compiled(game, player_of, **options):
    """As `training.make_rollout` plays it, with the instances."""

    @jax.jit
    def run():
        data_key, draws = jax.random.split(KEY)
        env = FIRST + jnp.arange(E)
        instances = jax.vmap(lambda i: game.instance(jax.random.fold_in(data_key, i), "train"))(env)
        return play(game, player_of(), instances, env, draws, step=STEP, **options), instances

    return jax.device_get(run())


def columns(game, rollout):
    """(task, play, turn, role) -> what compiled play noted of the response."""
    found = {}
    for role, table in rollout.tables.items():
        for t, e, b in zip(*np.nonzero(table.where)):
            at = (t, e, b)
            said = table.responses.tokens[at][0][table.responses.where[at][0]]
            rewards = jax.tree.map(lambda x, at=at: x[at][0], table.rewards)
            found[FIRST + int(e), int(b), int(t), role] = (table.prompt.ids[at][table.prompt.where[at]].tolist(), said.tolist(), rewards)
    return found


def hosted_columns(rollout):
    """The same of a hosted rollout, and its table of samples."""
    table = sample_table(rollout)
    rows = {(s.instance, s.call.branch, s.call.turn, s.call.role): s for s in table.samples if s.excluded != "aborted"}
    assert len(rows) == sum(s.excluded != "aborted" for s in table.samples)
    return rows


def assert_same(game, rollout, played):
    """Prompts, ids, rewards, form and ends; returns the share of equal responses."""
    mine, others = columns(game, rollout), hosted_columns(played)
    assert set(mine) == set(others)
    equal = []
    for name, (prompt, said, rewards) in mine.items():
        sample = others[name]
        equal.append(said == sample.response_ids.tolist())
        assert list(sample.prompt_ids) == prompt
        np.testing.assert_allclose([sample.team, sample.local], [rewards.team, rewards.local], atol=1e-6)
        assert set(sample.components) == set(rewards.components)
        for part, value in rewards.components.items():
            np.testing.assert_allclose(sample.components[part], value, atol=1e-6)
        assert sample.call.legal == bool(rewards.well_formed)
    episodes = rollout.episodes
    for place, episode in enumerate(played.episodes):
        e, b = divmod(place, K)
        assert episode.aborted == bool(episodes.aborted[e, b])
        if not episode.aborted:
            (way,) = episode.trajectories
            assert played.workflow.metrics["success"](way) == float(episodes.outcome[e, b] >= 1)
            np.testing.assert_allclose(played.workflow.metrics["outcome"](way), episodes.outcome[e, b])
            assert len({call.turn for call in way.calls}) == episodes.turns[e, b]
    return np.mean(equal)


def scripted(environment):
    return Assignment(dict.fromkeys(environment.workflow.roles, "script"), {"script": Scripted(environment.script)})


@functools.cache
def played(name):
    """(compiled, hosted) play of a game by a random model."""
    game = GAMES[name]
    config = model_of(game)
    params = jax.jit(lambda key: init_params(config, key))(jax.random.key(1))
    models = {"policy": params}

    def player():
        return model_player(game, dict.fromkeys((r.name for r in game.roles), "policy"), {"policy": config}, models, 1.0)

    rollout, instances = compiled(game, player, trajectories=K)
    environment = hosted(game, KEY)
    sizes = EngineConfig(
        max_num_seqs=2 if name == "tally" else 1, prompt_tokens=16, response_tokens=4, decode_steps=4, admit=1, reuse=1000
    )  # few shapes
    with Engine({"policy": (config, params)}, jax.random.split(KEY)[1], sizes=sizes) as engine:
        with Controller(environment.workflow, shared(environment.workflow), engine, environment.renderer) as controller:
            return rollout, instances, controller.play(environment.tasks("train", FIRST, E), STEP, K)


@pytest.mark.parametrize("name", GAMES)
def test_law_13_a_model_says_the_same_and_is_paid_the_same_compiled_and_hosted(name):
    rollout, _, on_host = played(name)
    assert assert_same(GAMES[name], rollout, on_host) >= 0.999


def test_law_13_the_scripted_player_says_the_same_compiled_and_hosted():
    game = GAMES["tally"]
    rollout, _ = compiled(game, lambda: scripted_player(game), trajectories=K)
    environment = hosted(game, KEY)
    with Controller(environment.workflow, scripted(environment), None, environment.renderer) as controller:
        assert assert_same(game, rollout, controller.play(environment.tasks("train", FIRST, E), STEP, K)) == 1.0


@pytest.mark.parametrize("name", GAMES | BOARDS)
def test_law_13_a_tree_has_the_same_candidates_and_goes_on_from_the_same(name):
    game = (GAMES | BOARDS)[name]
    pick = "random" if name == "plan_path" else "greedy"
    rollout, _ = compiled(game, lambda: scripted_player(game), branches=K, pick=pick)
    environment = hosted(game, KEY, tree=True)
    branching, draw = dict.fromkeys(environment.workflow.roles, K), pick_by_identity(jax.random.split(KEY)[1])
    with Controller(environment.workflow, scripted(environment), None, environment.renderer, branching, pick=pick, draw=draw) as controller:
        on_host = controller.play(environment.tasks("train", FIRST, E), STEP)
    found = {(s.instance, s.call.turn, s.call.role, s.call.choice): s for s in sample_table(on_host).samples if s.excluded != "aborted"}
    assert len(found) == K * sum(int(table.where.sum()) for table in rollout.tables.values())
    for role, table in rollout.tables.items():
        for t, e, b in zip(*np.nonzero(table.where)):
            for k in range(K):
                sample, at = found[FIRST + int(e), int(t), role, k], (t, e, b, k)
                assert list(sample.prompt_ids) == table.prompt.ids[t, e, b][table.prompt.where[t, e, b]].tolist()
                assert sample.response_ids.tolist() == table.responses.tokens[at][table.responses.where[at]].tolist()
                np.testing.assert_allclose([sample.team, sample.local], [table.rewards.team[at], table.rewards.local[at]], atol=1e-6)
    for episode, outcome in zip(on_host.episodes, rollout.episodes.outcome[:, 0]):
        assert episode.aborted or on_host.workflow.metrics["outcome"](episode.trajectories[0]) == pytest.approx(float(outcome))


def test_a_game_of_ones_own_is_a_game_and_holds_what_law_13_must_cover():
    """Aborted instances, plays that are over at once or early, responses that do not parse, two roles at once."""
    rollout, _, on_host = played("tally")
    assert isinstance(GAMES["tally"], Game)
    assert 0 < rollout.episodes.aborted.mean() < 1
    turns = rollout.episodes.turns[~rollout.episodes.aborted]
    assert {0, 3} <= set(turns.tolist())
    rows = hosted_columns(on_host).values()
    assert 0 < np.mean([s.call.legal for s in rows]) < 1
    assert {s.call.role for s in rows} == {"ann", "bob", "cy"}


@pytest.mark.parametrize("game", [GAMES["plan_path"], *BOARDS.values()], ids=lambda game: game.name)
def test_law_13_the_scripted_player_is_paid_the_same_in_text(game):
    rollouts = []
    for text in (None, TextBudget(2048, 64)):
        environment = hosted(game, KEY, text=text)
        renderer = environment.renderer or PlainText(ByteTokenizer(), (1,))
        with Controller(environment.workflow, scripted(environment), None, renderer) as controller:
            rollouts.append(controller.play(environment.tasks("train", FIRST, E), STEP))
    own, text = (hosted_columns(rollout) for rollout in rollouts)
    assert set(own) == set(text)
    for name, sample in own.items():
        assert (sample.team, sample.local, sample.call.legal) == (text[name].team, text[name].local, text[name].call.legal)
        assert len(text[name].prompt_ids) > 300  # bytes
    assert sum(s.call.legal for s in text.values()) == len(text)


class Silent:
    """A chat model that is never asked."""

    async def acomplete(self, messages, draw=0, **options):
        raise AssertionError


def test_a_game_without_text_cannot_be_played_in_it_and_an_outside_model_needs_text():
    with pytest.raises(ValueError, match="tally cannot be played in text: it lacks the methods `text` and `read`"):
        hosted(GAMES["tally"], KEY, text=TextBudget())
    environment = hosted(GAMES["plan_path"], KEY)
    outside = Assignment(dict.fromkeys(environment.workflow.roles, "gpt"), {"gpt": Outside(Silent())})
    with pytest.raises(WorkflowError, match="role 'tool' reads and says ids, which an Outside model has none of; play the game in text"):
        Controller(environment.workflow, outside, None, {})


def test_law_9_an_instance_that_cannot_be_played_aborts_its_play_at_once():
    environment = hosted(GAMES["tally"], KEY)
    aborted = [task for task in environment.tasks("train", FIRST, E) if task.fields["task"]["goal"] < 0]
    with Controller(environment.workflow, scripted(environment), None, environment.renderer) as controller:
        with pytest.raises(RolloutError, match="instance .* of split 'train' of tally cannot be played"):
            controller.play(aborted)


def test_tasks_are_a_function_of_key_split_and_number():
    game = GAMES["tally"]
    environment, other = hosted(game, KEY), hosted(game, KEY, evaluation_key=jax.random.key(1))
    many = environment.tasks("train", 0, 12)
    assert [task.fields for task in environment.tasks("train", 4, 3)] == [task.fields for task in many[4:7]]
    assert [task.fields for task in other.tasks("train", 0, 12)] == [task.fields for task in many]
    tests = environment.tasks("test", 0, 12)
    assert [task.fields for task in tests] != [task.fields for task in many]
    assert [task.fields for task in other.tasks("test", 0, 12)] != [task.fields for task in tests]
    with pytest.raises(ValueError, match="unknown split 'dev'"):
        environment.tasks("dev", 0, 1)


def test_a_hosted_play_is_written_and_replays(tmp_path):
    _, _, rollout = played("tally")
    environment = hosted(GAMES["tally"], KEY)
    write_trajectories(tmp_path, rollout)
    lines = read_trajectories(tmp_path)
    assert len(lines) == E * K
    line = next(line for line in lines if not line["aborted"] and len(line["events"]) > 4)
    again = replay(line, environment.workflow, rollout.assignment, environment.renderer, plays=K)
    assert len(again.trajectories[0].events) == len(line["events"])


def test_every_ids_that_a_policy_says_have_an_outcome():
    """No response is an exception: empty ones, none of the language, ids of padding."""
    game = GAMES["plan_path"]
    environment = hosted(game, KEY)
    rng = np.random.default_rng(0)

    def babble(turn):
        return tuple(rng.integers(0, game.tokenizer.vocab_size, rng.integers(0, 6)).tolist())

    assignment = Assignment(dict.fromkeys(environment.workflow.roles, "x"), {"x": Scripted(babble)})
    with Controller(environment.workflow, assignment, None, environment.renderer) as controller:
        rollout = controller.play(environment.tasks("train", 0, 16))
    calls = [call for way in rollout.trajectories for call in way.calls]
    assert 0 < sum(not call.legal for call in calls) <= len(calls)


def test_a_stage_must_hold_every_role_once():
    class Twice(Tally):
        stages = (("ann", "bob"), ("cy",), ("ann",))

    with pytest.raises(ValueError, match="tally: the role 'ann' stands in 2 stages of a turn; it must be in exactly one"):
        hosted(Twice(), KEY)

"""docs/your_own_game.md and docs/your_own_team.md: the files of the pages are complete and as short as promised, and both train."""

import pathlib
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

ROOT = pathlib.Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from experiments.configs import game as any_game  # noqa: E402
from marl_llm.games import Game, make_game  # noqa: E402
from marl_llm.runs.resolve import resolve  # noqa: E402
from marl_llm.workflows import Environment  # noqa: E402

PAGE = "".join((ROOT / "docs" / name).read_text(encoding="utf-8") for name in ("your_own_game.md", "your_own_team.md"))
NAMES = ("my_game.py:Lock", "my_team.py:lock")


def blocks(name):
    return "".join(re.findall(rf"<!-- {re.escape(name)} -->\n```python\n(.*?)```\n", PAGE, re.DOTALL))


@pytest.fixture(autouse=True)
def files(tmp_path, monkeypatch):
    """The files of the page, in a folder where a user stands."""
    for name in NAMES:
        file = name.partition(":")[0]
        (tmp_path / file).write_text(blocks(file), encoding="utf-8")
    monkeypatch.chdir(tmp_path)


def test_a_game_takes_at_most_ninety_lines_and_a_workflow_sixty():
    for file, most in (("my_game.py", 90), ("my_team.py", 60)):
        assert 30 < len([line for line in blocks(file).splitlines() if line.strip()]) <= most


@pytest.mark.parametrize("name", NAMES)
def test_the_commands_of_the_page_resolve_to_the_files(name):
    assert f"marl train game:{name} --dry_run" in PAGE
    config = any_game.get_config(name)
    config.game.tries = 3
    config.sft.steps = 4
    config.script.update({"slip": 0.2} if "slip" in config.script else {})
    with resolve(config) as plan:
        assert isinstance(plan.game, Environment if name.startswith("my_team") else Game)
        assert plan.budgets == {"keeper": (3, 3), "opener": (3, 3)}
        assert all(word in plan.table(config) for word in ("keeper", "opener", "tries"))


def test_no_code_is_in_two_splits_in_either_file():
    game = make_game(NAMES[0])
    draw = jax.jit(jax.vmap(game.instance, (0, None)))
    keys = jax.random.split(jax.random.key(0), 300)
    drawn = [{tuple(code.tolist()) for code in np.asarray(draw(keys, split))} for split in range(3)]
    with make_game(NAMES[1]) as environment:
        named = [{tuple(map(int, t.fields["code"].split())) for t in environment.tasks(s, 0, 300)} for s in ("validation", "test", "train")]
    for codes in (drawn, named):
        assert not codes[0] & codes[1]
        assert not (codes[0] | codes[1]) & codes[2]
        assert min(map(len, codes)) == 10
        assert {(3 * a + b) % 10 for a, b in codes[0]} == {0}
        assert {(3 * a + b) % 10 for a, b in codes[1]} == {1}


def test_what_is_said_opens_the_lock_and_silence_is_paid_nothing():
    game = make_game(NAMES[0])
    start = game.reset(jnp.asarray([4, 7]))

    def said(*words):
        return jnp.asarray(game.tokenizer.ids_of(list(words)), jnp.int32)

    told = game.act(start, "keeper", said("4", "7", ";"), jnp.ones(3, bool))
    assert float(game.rewards(start, told, "keeper").local) == 1.0
    tried = game.act(told, "opener", said("7", "4", ";"), jnp.ones(3, bool))
    assert bool(game.done(tried))
    assert float(game.rewards(told, tried, "opener").team) == 1.0
    silent = game.act(start, "opener", said(";", "7", "4"), jnp.asarray([True, False, False]))
    pay = game.rewards(start, silent, "opener")
    assert (float(pay.team), float(pay.local), bool(pay.well_formed)) == (0.0, 0.0, False)


@pytest.mark.parametrize("name", NAMES)
def test_both_train_two_steps_as_the_page_writes_it(name, capsys):
    code = blocks("train").replace('"my_game.py:Lock"', f'"{name}"')
    for long, short in (("range(200)", "range(1)"), ("range(100)", "range(2)"), ('"test", 100', '"test", 4')):
        assert long in code
        code = code.replace(long, short)
    names = {}
    exec(compile(code, "your_own_game.md", "exec"), names)
    assert 0 < names["warm"]["loss"] < 10
    assert set(names["figures"]) == {"a", "b"}
    assert all(f["grad_norm"] > 0 and f["log_prob_gap"] < 1e-4 for f in names["figures"].values())
    assert names["batch"].figures["samples"] > 16
    assert all(0 <= float(line) <= 1 for line in capsys.readouterr().out.split())

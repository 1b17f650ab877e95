"""Episodes as a person reads them: rows of a rollout turned into the schema of `marl_llm.reporting.episodes`."""

from __future__ import annotations

from collections.abc import Mapping

import jax

from marl_llm.games import Game, picture_lines
from marl_llm.rollout import CompiledRollout
from marl_llm.text import pieces_of


def _at(place: tuple[int, int, int], tree):
    """The part of a rollout at one turn, environment and play."""
    return jax.tree.map(lambda x: x[place], tree)


def episode(
    game: Game,
    rollout: CompiledRollout,
    instances,
    index: int,
    assignment: dict[str, str],
    *,
    name: str,
    step: int | None,
    when: str,
    play: int = 0,
    advantages: Mapping[tuple[int, str, int], float] | None = None,
) -> tuple[dict, dict]:
    """One played trajectory of environment `index`, its `play`-th, as `(episode, tokens)`.

    `advantages`: (turn, role, candidate) -> what the update was told, where it trained.

    `step` is that of training; None: an evaluation that belongs to no step. Prompts and responses are decoded for reading; the ids and
    log-probs that were sampled and trained are in `tokens`.
    """
    rollout = rollout._replace(tables={r.name: rollout.tables[r.name] for r in game.roles})  # JAX sorts a dict's keys
    rollout, instances = jax.device_get((rollout, instances))
    decode = game.tokenizer.decode
    instance = jax.tree.map(lambda x: x[index], instances)
    steps, tokens = [], []
    for t in range(game.max_turns):
        rows = {role: _at((t, index, play), rollout.tables[role]) for stage in game.stages for role in stage}
        for number, (role, row) in enumerate(rows.items()):
            if not row.where:
                continue
            responses, ids = [], []
            for k in range(row.responses.tokens.shape[0]):
                where = row.responses.where[k]
                token_ids = row.responses.tokens[k][where]
                responses.append(
                    {
                        "text": decode(token_ids),
                        "chosen": bool(row.chosen == k),
                        "team": float(row.rewards.team[k]),
                        "local": float(row.rewards.local[k]),
                        "components": {n: float(part[k]) for n, part in row.rewards.components.items()},
                        "well_formed": bool(row.rewards.well_formed[k]),
                        "truncated": bool(row.responses.truncated[k]),
                    }
                )
                ids.append(
                    {
                        "ids": [int(i) for i in token_ids],
                        "log_probs": [float(x) for x in row.responses.sampled_log_probs[k][where]],
                        "entropy": [float(x) for x in row.responses.entropy[k][where]],
                    }
                )
                if advantages and (t, role, k) in advantages:
                    ids[-1]["advantage"] = advantages[t, role, k]
                if row.credit is not None and row.credit.replayed:
                    ids[-1] |= {"credit": float(row.credit.gained), "without": float(row.credit.without)}
            prompt = row.prompt.ids[row.prompt.where]
            entry = {"turn": t, "role": role, "prompt": decode(prompt), "responses": responses, "group": f"{name}/{t}/{role}"}
            if number == len(rows) - 1:
                picture = picture_lines(game, _at((t, index, play), rollout.states))
                if picture is not None:
                    entry["state_after"] = picture
            steps.append(entry)
            tokens.append({"turn": t, "role": role, "prompt_ids": [int(i) for i in prompt], "responses": ids})
    ended = jax.tree.map(lambda x: x[index, play], rollout.episodes)
    status = "aborted" if ended.aborted else "success" if ended.outcome >= 1.0 else "failed" if ended.done else "horizon"
    record = {
        "episode": name,
        "step": step,
        "when": when,
        "task": game.task(instance),
        "roles": {r.name: assignment[r.name] for r in game.roles},
        "status": status,
        "turns": int(ended.turns),
        "steps": steps,
    }
    seen = [i for entry in tokens for ids in (entry["prompt_ids"], *(response["ids"] for response in entry["responses"])) for i in ids]
    spelled = {"pieces": {"": pieces_of(game.tokenizer, seen)}, "specials": sorted(game.tokenizer.special_ids)}
    return record, {"episode": name, "steps": tokens, **spelled}

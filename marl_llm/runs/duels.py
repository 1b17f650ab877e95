"""A trained role against fixed opponents, in every seat: shares of plays that were won, drawn, lost and not finished.

    python -m experiments.evaluate --run=runs/kuhn --opponents=random,scripted,start --temperature=1

Each role of the team is put beside the opponent in all other seats, as it is trained and as its start was; then the same with the next
role, on the same tasks. So an opponent meets both seats, and what a seat is worth by itself shows in the start's rows.
For environments that say what each seat won: a figure `result_<role>`, above 0 won, 0 drawn, below 0 lost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from marl_llm.runs.command import ConfigError

if TYPE_CHECKING:
    from marl_llm.evaluation import Evaluation, Outcome
    from marl_llm.runs.resolve import Plan

PLAYERS = ("start", "trained")
BOTH = "all seats"
ENDS: dict[str, Callable[[float, bool], bool]] = {
    "won": lambda result, over: over and result > 0,
    "drawn": lambda result, over: over and result == 0,
    "lost": lambda result, over: over and result < 0,
    "unfinished": lambda result, over: not over,
}


def duel_seats(plan: Plan, opponents: Sequence[str]) -> dict[tuple[str, str, str], dict[str, Any]]:
    """(opponent, player, role) -> table of seats, for each of `opponents`, `PLAYERS` and roles that a trained model plays.

    Raises `ConfigError` for a seat that there is not, and for an environment that does not say what each seat won.
    """
    from marl_llm.training.seats import seat_table

    roles, metrics = plan.assignment.roles, getattr(getattr(plan.played, "workflow", None), "metrics", {})
    if len(roles) < 2 or any(f"result_{role}" not in metrics for role in roles):
        raise ConfigError("--opponents: this game has no two seats with a figure result_<role> each; say who plays whom with --seats")
    learned = [role for role, model in roles.items() if model in plan.assignment.trained]
    tables = {}
    try:
        for opponent in opponents:
            for player in PLAYERS:
                for role in learned:
                    seats = {seat: player if seat == role else opponent for seat in roles}
                    tables[opponent, player, role] = seat_table(seats, roles, plan.assignment.policies)
    except ValueError as error:
        raise ConfigError(f"--opponents: {error}") from error
    return tables


def ends(plays: Iterable[tuple[Outcome, str]]) -> dict[str, Any]:
    """Shares of how plays ended, each with its 95 % interval clustered by task, from plays and the role that is looked at in each.

    `{plays, won: {share, interval}, drawn, lost, unfinished, invalid}`; `invalid` are moves per play that the game's rules refused to that
    role, where the environment counts them. Aborted plays do not count.
    """
    from marl_llm.evaluation import clustered

    counted = [(outcome, role) for outcome, role in plays if not outcome.aborted]
    shares: dict[str, Any] = {"plays": len(counted)}
    for name, holds in ENDS.items():
        groups: dict[str | int, list[float]] = {}
        for outcome, role in counted:
            ended = holds(outcome.team[f"result_{role}"], not outcome.team.get("unfinished", 0.0))
            groups.setdefault(outcome.cluster or outcome.task, []).append(float(ended))
        values = [value for group in groups.values() for value in group]
        shares[name] = {"share": sum(values) / max(1, len(values)), "interval": list(clustered(list(groups.values())))}
    refused = [outcome.team[f"invalid_{role}"] for outcome, role in counted if f"invalid_{role}" in outcome.team]
    return shares | ({"invalid": sum(refused) / len(refused)} if refused else {})


def duel_table(records: Mapping[tuple[str, str, str], Evaluation]) -> dict[str, dict[str, dict[str, dict[str, Any]]]]:
    """Opponent -> player -> role, and `BOTH` where there are two -> `ends`, from the records of `duel_seats`."""
    table: dict[str, dict[str, dict[str, dict[str, Any]]]] = {}
    of_both: dict[tuple[str, str], list[tuple[Outcome, str]]] = {}
    for (opponent, player, role), record in records.items():
        plays = [(outcome, role) for outcome in record.outcomes]
        table.setdefault(opponent, {}).setdefault(player, {})[role] = ends(plays)
        of_both.setdefault((opponent, player), []).extend(plays)
    for (opponent, player), plays in of_both.items():
        if len(table[opponent][player]) > 1:
            table[opponent][player][BOTH] = ends(plays)
    return table


def duel_text(table: Mapping[str, Mapping[str, Mapping[str, Mapping[str, Any]]]]) -> str:
    """The table in lines, a line per opponent, seat and player."""
    rows = []
    for opponent, players in table.items():
        rows += [f"against {opponent}"]
        for role in next(iter(players.values())):
            for player, seats in players.items():
                shares = "   ".join(f"{name} {100 * seats[role][name]['share']:5.1f} %{_interval(seats[role][name])}" for name in ENDS)
                moves = f"   invalid moves {seats[role]['invalid']:.2f}" if "invalid" in seats[role] else ""
                rows += [f"  {role:<12} {player:<8} {shares}{moves}"]
    return "\n".join(rows)


def _interval(figures: Mapping[str, Any]) -> str:
    low, high = figures["interval"]
    return f" [{100 * low:.1f}, {100 * high:.1f}]"

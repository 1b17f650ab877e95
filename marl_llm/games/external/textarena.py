"""Games of TextArena 0.7.4 (Guertler et al., arXiv 2504.11442) for two and more players, each seat a role.

    deal ─▶ [ player_0 or player_1 or ... ─▶ step ] until the game is over

The game says whose turn it is and what that player sees; what it pays a seat at the end is the team reward of all of that seat's responses.
`GAMES` lists what was replayed in this version (`benchmarks.external_games`): games that need a network, a key, a word list that is
downloaded, or a later Python are not in it. A position is (deal, moves): it is played again from its start where a fork needs it, so that
states are values (law 4) although the package's objects are not.
"""

from __future__ import annotations

import collections
import re
from collections.abc import Callable, Sequence
from typing import Any

from marl_llm.games.external.guards import SPLITS, foreign_package, seed_in, seed_of, seeded
from marl_llm.games.kit.miniature import byte_renderer
from marl_llm.games.registry import GameError
from marl_llm.hints import check_word, meant
from marl_llm.workflows import Environment, FormatError, Role, ScriptTurn, Task, Trajectory, Workflow, choose, repeat, sequence, tool
from marl_llm.workflows.parsers import Parser
from marl_llm.workflows.rewards import broadcast, format_penalty
from marl_llm.workflows.splits import drawn_tasks

VERSION = "0.7.4"
GAMES = {
    **dict.fromkeys((
        "Alquerque", "Battleship", "Breakthrough", "Briscola", "Chopsticks", "ColonelBlotto", "ConnectFour", "Crusade",
        "GameOfPureStrategy", "GermanWhist", "Golf", "HighSociety", "IndianPoker", "IteratedMatchingPennies", "IteratedPrisonersDilemma",
        "IteratedRockPaperScissors", "IteratedTwoThirdsAverage", "IteratedUltimatumGame", "KuhnPoker", "LiarsDice", "LinesOfAction",
        "MemoryGame", "NewRecruit", "Nim", "Othello", "PigDice", "QuantumTicTacToe", "SimpleBlindAuction",
        "SimpleNegotiation", "SimpleTak", "Snake", "SpiteAndMalice", "Stratego", "Surround", "Tak", "TicTacToe", "TruthAndDeception",
        "TwoDollar", "UltimateTicTacToe", "WildTicTacToe",
    ), 2),
    "ThreePlayerGOPS": 3, "ThreePlayerIPD": 3, "ThreePlayerTicTacToe": 3, "Taboo": 4, "SecretMafia": 6,
}  # fmt: skip
TEAMS = ("Taboo", "SecretMafia")  # some seats win together; in all others each seat plays for itself
MOVE_CHARACTERS = 1000
LIVE = 512  # games kept at their last position
_BRACKETS = re.compile(r"\[[^\[\]\n]{1,40}\]")
_TAG = re.compile(r"\[(GAME|Player \d+)\]")
FIELDS = ("moves", "view", "who", "over", "paid", "invalid", "raised")


class _Position:
    """A game of the package at one position, with what is to be known of it."""

    def __init__(self, env: Any, players: int):
        self.env, self.players, self.invalid, self.over, self.raised = env, players, [], False, False
        self.paid = (0.0,) * players
        self._look()
        inform = env.state.set_invalid_move

        def counted(*args: Any, **options: Any) -> Any:
            self.invalid.append(env.state.current_player_id)
            return inform(*args, **options)

        env.state.set_invalid_move = counted

    def _look(self) -> None:
        self.who, view = self.env.get_observation()
        self.view = view if isinstance(view, str) else "\n".join(str(message[1]) for message in view)

    def move(self, text: str) -> None:
        """Plays a move of whoever's turn it is. A move at which the package raises ends the game: its player is paid -1, others 0."""
        mover = self.who
        try:
            over, _ = self.env.step(text)
            if over:
                rewards = self.env.close()[0] or {}
                self.paid = tuple(min(1.0, max(-1.0, float(rewards.get(seat, 0.0)))) for seat in range(self.players))
            else:
                self._look()
            self.over = bool(over)
        except Exception:  # the foreign game's own fault, whatever it is; it is counted
            self.over, self.raised = True, True
            self.paid = tuple(-1.0 if seat == mover else 0.0 for seat in range(self.players))

    def fields(self, moves: tuple[str, ...]) -> dict[str, Any]:
        """The workflow's fields."""
        values = (moves, self.view, self.who, self.over, self.paid, tuple(self.invalid), self.raised)
        return dict(zip(FIELDS, values))


class TextArena:
    """One game of TextArena. Positions are functions of (deal, moves).

    Raises `GameError`: the package is missing or of another version, or the game is not one of `GAMES`.
    """

    def __init__(self, name: str):
        if name not in GAMES:
            known = ", ".join(sorted(GAMES))
            raise GameError(f"config.game.game={name!r} is not a game of TextArena that is played here{meant(name, GAMES)}: {known}")
        self._package = foreign_package("textarena", "textarena", VERSION, "ta")
        self.name, self.players = name, GAMES[name]
        self._live: collections.OrderedDict[tuple, _Position] = collections.OrderedDict()

    def deal(self, deal: int) -> dict[str, Any]:
        """The fields at the start."""
        with seeded(seed_of(self.name, deal, 0)):
            position = self._start(deal)
            return self._keep(deal, (), position)

    def step(self, deal: int, moves: Sequence[str], move: str) -> dict[str, Any]:
        """The fields after one more move."""
        moves = tuple(moves)
        with seeded(0):  # the lock, for what lies between
            position = self._live.pop((deal, moves), None)
            if position is None:
                position = self._start(deal)
                for number, before in enumerate(moves, 1):
                    self._play(position, deal, number, before)
            self._play(position, deal, len(moves) + 1, move)
            return self._keep(deal, (*moves, move), position)

    def _start(self, deal: int) -> _Position:
        with seeded(seed_of(self.name, deal, 0)):
            env = self._package.make(f"{self.name}-v0")
            env.reset(num_players=self.players, seed=seed_of(self.name, deal, 0))
            return _Position(env, self.players)

    def _play(self, position: _Position, deal: int, number: int, move: str) -> None:
        with seeded(seed_of(self.name, deal, number)):
            position.move(move)

    def _keep(self, deal: int, moves: tuple[str, ...], position: _Position) -> dict[str, Any]:
        if not position.over:
            self._live[deal, moves] = position
            if len(self._live) > LIVE:
                self._live.popitem(last=False)
        return position.fields(moves)


def move_parser(form: str) -> Parser:
    """What of a response is the move: all of it ("plain"), or the last [bracketed] words in it ("brackets")."""

    def parse(text: str) -> dict[str, Any]:
        moves = _BRACKETS.findall(text)[-1:] if form == "brackets" else [text.strip()]
        if not moves or not moves[0]:
            raise FormatError("no move like [word]" if form == "brackets" else "an empty move")
        if len(moves[0]) > MOVE_CHARACTERS:
            raise FormatError(f"a move of {len(moves[0])} characters, {MOVE_CHARACTERS} are allowed")
        return {"move": moves[0]}

    return parse


def workflow_of(game: TextArena, moves: int, form: str, max_prompt: int, max_tokens: int) -> Workflow:
    """The game as a graph: at most `moves` moves by whoever's turn it is. A game that is not over by then pays nobody."""
    seats = [f"player_{seat}" for seat in range(game.players)]
    options = dict(max_prompt=max_prompt, max_tokens=max_tokens, trim="view", trim_from="start")
    roles = [Role(name, "{view}", move_parser(form), {"move": ""}, **options) for name in seats]
    body = sequence(
        tool(game.deal, FIELDS, name="deal_out", reads=("deal",), reveals=FIELDS),
        repeat(
            choose(lambda who: who, dict(enumerate(roles)), name="turn_of", reads=("who",)),
            tool(game.step, FIELDS, name="step", reads=("deal", "moves", "move"), reveals=FIELDS),
            at_most=moves, until=lambda over: over, reads=("over",), name="moves_made",
        ),
    )  # fmt: skip
    rewards = tuple(broadcast(lambda path, seat=seat: path.fields["paid"][seat], (name,), "result") for seat, name in enumerate(seats))
    metrics: dict[str, Callable[[Trajectory], float | None]] = {
        "score": lambda path: (path.fields["paid"][0] + 1.0) / 2.0,
        "moves": lambda path: float(len(path.fields["moves"])),
        "unfinished": lambda path: float(not path.fields["over"]),
        "game_raised": lambda path: float(path.fields["raised"]),
    }
    for seat, name in enumerate(seats):
        metrics[f"result_{name}"] = lambda path, seat=seat: path.fields["paid"][seat]
        metrics[f"invalid_{name}"] = lambda path, seat=seat: float(path.fields["invalid"].count(seat))
    paid = (*rewards, format_penalty(0.5))
    return Workflow("textarena", body, ("game",), hidden=("deal",), rewards=paid, metrics=metrics, score="at_end")


def bracket_player(last_line: bool) -> Callable[[ScriptTurn], str]:
    """A player of every seat that says one of the [bracketed] words that it reads: of the last line that has some, or of all lines."""

    def play(turn: ScriptTurn) -> str:
        lines = [_BRACKETS.findall(_TAG.sub("", line)) for line in turn.fields["view"].splitlines()]
        lines = [words for words in lines if words] or [["[0]"]]
        return turn.random.choice(lines[-1] if last_line else [word for words in lines for word in words])

    return play


def textarena(
    game: str = "KuhnPoker", moves: int = 60, form: str = "plain", max_prompt: int = 4096, max_tokens: int = 256, deals_seed: int = 0
) -> Environment:
    """A game of TextArena (extra `ta`), one role per seat: `player_0`, `player_1`, ...

    Args:
      game: one of `GAMES`, without "-v0".
      moves: most moves of all players together.
      form: "plain", the whole response is the move; or "brackets", the last [bracketed] words of it are, for chat models in board games.
      max_prompt, max_tokens: of each role. Of a view that is too long the start is cut, which is counted.
      deals_seed: of the deals. A deal's split is its number modulo 10.

    Raises `GameError`: see `TextArena`.
    """
    check_word("config.game.form", form, ("plain", "brackets"), GameError)
    if moves < 1:
        raise GameError(f"config.game.moves={moves} must be at least 1")
    played = TextArena(game)

    def draw(split: str, number: int) -> Task:
        return Task(number, {"game": game}, {"deal": seed_in(split, number, game, deals_seed)}, split)

    team = workflow_of(played, moves, form, max_prompt, max_tokens)
    rivals = () if game in TEAMS else tuple(team.roles)
    players = bracket_player(True), bracket_player(False)
    return Environment(team, drawn_tasks(draw, SPLITS), "score", byte_renderer(), *players, rivals=rivals)

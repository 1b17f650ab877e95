"""Environments of OpenEnv servers, on a stand-in for their protocol; `tests/live/openenv_server.py` plays real ones."""

import json
import logging
import sys

import pytest

from marl_llm.checking import check
from marl_llm.checking.plays import Subject
from marl_llm.games import GameError, make_game
from marl_llm.games.external import openenv
from marl_llm.games.external.openenv_sessions import Fault, Refusal, Session, Sessions, read_answer, websocket_url
from marl_llm.workflows import Assignment, Controller, FormatError, Scripted
from tests.games.openenv_stand_in import Guess, serving

GUESS = dict(action='{"guess": "{int}"}', observation="hint", sayings="3|7|5", turns=5, max_prompt=256, max_tokens=8)
PLAYER = "scripted"


@pytest.fixture
def server():
    with serving() as one:
        yield one


class Halving:
    """Finds the number by the hints: of each play its guesses, and what the prompts said of them."""

    def __init__(self):
        self.known = {}

    def __call__(self, turn):
        known = self.known.setdefault(turn.seed[1:3] + turn.seed[4:], [])
        prompt = turn.messages[-1].content
        low, high = 0, 9
        if known:
            known[-1] = (known[-1][0], prompt)
        for said, hint in known:
            low, high = (said + 1, high) if hint == "higher" else (low, said - 1)
        known.append(((low + high) // 2, ""))
        return str(known[-1][0])


def played(environment, says, count=4, **options):
    assignment = Assignment({"player": PLAYER}, {PLAYER: Scripted(says)})
    with Controller(environment.workflow, assignment, None, environment.renderer, attempts=1, **options) as controller:
        return controller.play(environment.tasks("train", 0, count))


def episodes(environment, says, count, **options):
    """As `played`, also where every play is aborted."""
    return Subject(environment).play(environment.tasks("train", 0, count), says, **options)


def measured(environment, rollout, name):
    return [environment.workflow.metrics[name](path) for path in rollout.trajectories]


def test_a_play_is_a_session_and_what_the_server_pays_is_the_score(server):
    with make_game("openenv", url=server.url, **GUESS) as environment:
        tried = server.asked("reset")
        rollout = played(environment, Halving())
        assert measured(environment, rollout, "score") == measured(environment, rollout, "return") == [1.0] * 4
        assert server.asked("reset") == server.asked("close") == tried + 4  # a play that is over ends its session
        calls = [call for path in rollout.trajectories for call in path.calls]
        assert {call.prompt for call in calls} == {"guess", "higher", "lower"} - ({"guess"} - {call.prompt for call in calls})
        assert all(path.earned[call.id].team == 1.0 for path in rollout.trajectories for call in path.calls)
    assert {message["type"] for message in server.heard} == {"reset", "step", "close"}


def test_a_response_that_is_no_action_is_not_sent_and_one_that_is_refused_is_told(server):
    said = iter(["what", "[1, 2]", "120", "3", "4"])
    with make_game("openenv", url=server.url, raises="refuse", **GUESS) as environment:
        steps = server.asked("step")
        (path,) = played(environment, lambda turn: next(said), 1).trajectories
        prompts = [call.prompt for call in path.calls]
        assert server.asked("step") == steps + 3
    assert [call.legal for call in path.calls] == [False, False, True, True, True]
    assert prompts[1].endswith("could not be read as an action.")
    assert prompts[3] == "guess\nThe environment refused your action: 120 is out of range"
    assert (path.fields["refused"], path.fields["raised"], len(path.fields["rewards"])) == (1, 1, 5)
    assert path.earned[path.calls[0].id].local == -0.5


def test_an_action_that_the_server_finds_invalid_is_refused_and_the_play_goes_on(server):
    options = GUESS | {"action": "{json}", "sayings": '{"guess": 3}'}
    said = iter(['{"gues": 3}', '{"guess": "3"}', '{"guess": 3}', "[]", '{"guess": 0}'])
    with make_game("openenv", url=server.url, **options) as environment:
        (path,) = played(environment, lambda turn: next(said), 1).trajectories
    assert [call.legal for call in path.calls] == [True, True, True, False, True]
    assert (path.fields["refused"], path.fields["raised"]) == (2, 0)


BROKEN = [
    (None, "unavailable"),
    ('{"type": "error", "data": {"message": "no disk", "code": "EXECUTION_ERROR"}}', "unavailable"),
    ('{"type": "error", "data": {}}', "unavailable"),
    ("no json", "bad_reply"),
    ('{"type": "observation", "data": {"observation": {"hint": "x"}, "reward": NaN}}', "bad_reply"),
    ('{"type": "observation", "data": {"observation": {"hint": "x"}, "reward": "1"}}', "bad_reply"),
    ('{"type": "observation", "data": {"observation": {"hint": "x"}, "reward": -1e308}}', "bad_reply"),  # two sum up to infinity
    ('{"type": "observation", "data": {"observation": {"hint": "x"}, "done": 1}}', "bad_reply"),
    ('{"type": "observation", "data": {"observation": {}}}', "bad_reply"),
    ('{"type": "observation", "data": {"observation": ' + '{"a": ' * 40 + "1" + "}" * 42, "bad_reply"),
    ('{"type": "state", "data": {}}', "bad_reply"),
    ("x" * (2 << 20), "unavailable"),
]


def test_what_the_server_breaks_aborts_the_play_and_pays_nobody(server):
    with make_game("openenv", url=server.url, **GUESS) as environment:
        for frame, kind in BROKEN:
            server.says = [frame]
            (episode,) = episodes(environment, lambda turn: "4", 1)
            assert (episode.aborted, episode.failures[0].kind, episode.failures[0].node) == (True, kind, "step"), frame
        assert not episodes(environment, lambda turn: "4", 1)[0].aborted


def test_a_server_that_raises_names_the_option(server):
    with make_game("openenv", url=server.url, **GUESS) as environment:
        (episode,) = episodes(environment, lambda turn: "120", 1)
    assert "120 is out of range; where it raises at actions that it does not accept, set config.game.raises=refuse" in str(
        episode.failures[0]
    )


def test_a_server_that_is_silent_is_late(server):
    server.session = lambda socket, env: [server.heard.append(json.loads(raw)) for raw in socket]
    session = Session(websocket_url(server.url), 30.0)
    session._timeout_s = 0.05
    with pytest.raises(Fault, match=r"no answer of the server within 0.05 s") as late:
        session.reset(seed=1)
    assert late.value.kind == "deadline"
    session.close()


def test_texts_of_a_server_are_valid_text_and_braces_stay_braces(server):
    server.says = ['{"type": "observation", "data": {"observation": {"hint": "{seen} \\ud800 <b>"}}}']
    with serving() as other:
        with make_game("openenv", url=other.url, instructions="Say {x}.", **GUESS) as environment:
            other.says = server.says
            (path,) = played(environment, lambda turn: "4", 1).trajectories
    assert path.calls[0].prompt == "Say {x}.\n\nguess"
    assert path.calls[1].prompt == "Say {x}.\n\n{seen} � <b>"


def test_forks_play_their_position_again_in_sessions_of_their_own(server):
    with make_game("openenv", url=server.url, **GUESS | {"turns": 3}) as environment:
        tried = server.asked("reset")
        rollout = played(environment, lambda turn: str(turn.seed[4] % 10), 1, branching={"player": 2})  # its words follow from the branch
        (task,) = environment.tasks("train", 0, 1)
        paths = rollout.trajectories
        assert len(paths) > 4
        assert server.asked("reset") - tried == len(paths)  # each but one began with the reset of a fork
        for path in paths:  # what one session alone gives for these actions
            env = Guess()
            env.reset(task.fields["seed"])
            alone = [env.step(int(call.text)) for call in path.calls]
            assert path.fields["rewards"] == tuple(answer["reward"] or 0.0 for answer in alone)
            assert path.fields["seen"] == alone[-1]["observation"]["hint"]
    assert server.asked("close") == server.asked("reset")


def test_where_sessions_are_few_the_one_that_rests_longest_makes_place(server):
    server.most = 1
    with make_game("openenv", url=server.url, **GUESS | {"sessions": 1}) as environment:
        rollout = played(environment, Halving(), 3)  # each step of the three takes the session from another play
        assert not any(episode.aborted for episode in rollout.episodes)
        assert measured(environment, rollout, "score") == [1.0] * 3
        assert server.together == 1


def test_a_server_with_fewer_sessions_than_asked_for_says_so(server):
    server.most = 1
    with pytest.raises(GameError, match=r"cannot be played: the server answers CAPACITY_REACHED: .*1 sessions; set config.game.sessions"):
        make_game("openenv", url=server.url, **GUESS)


def test_a_server_whose_equal_seeds_differ_is_refused_and_one_task_is_warned_of(server, caplog):
    server.kind = "broken"
    with pytest.raises(GameError, match=r"does not keep seeds: seed \d+ was played twice, .* config.game.seeds=report plays it"):
        make_game("openenv", url=server.url, **GUESS)
    with make_game("openenv", url=server.url, seeds="report", **GUESS):
        assert "the server ignores seeds" in caplog.records[-1].message
    server.kind = "one"
    with make_game("openenv", url=server.url, **GUESS):
        assert "it is one task in all splits, so nothing is held out" in caplog.records[-1].message
    server.kind = "kept"
    with caplog.at_level(logging.INFO), make_game("openenv", url=server.url, **GUESS):
        assert caplog.records[-1].levelname == "INFO"


def test_seeds_that_hold_alone_but_not_beside_other_sessions_are_found(server):
    """A server whose sessions draw from one generator: the last reset decides for all."""

    class Shared:
        number = 0

    def session(socket, env):
        for raw in socket:
            message = json.loads(raw)
            if message["type"] == "close":
                return
            if message["type"] == "reset":
                Shared.number = message["data"]["seed"] % 10
                server.answer(socket, "observation", {"observation": {"hint": "guess"}, "reward": None, "done": False})
            else:
                right = message["data"]["guess"] == Shared.number
                server.answer(socket, "observation", {"observation": {"hint": str(right)}, "reward": 0.0, "done": right})

    server.session = session
    make_game("openenv", url=server.url, **GUESS | {"sessions": 1}).close()
    with pytest.raises(GameError, match="does not keep seeds"):
        make_game("openenv", url=server.url, **GUESS)


def test_a_position_that_is_answered_otherwise_when_it_is_played_again_aborts_the_play(server):
    server.kind = "broken"  # its observation tells the time
    with make_game("openenv", url=server.url, **GUESS | {"seeds": "report", "observation": "metadata.at"}) as environment:
        found = episodes(environment, lambda turn: str(turn.seed[4] % 10), 3, branching={"player": 2})
        assert all(episode.aborted for episode in found)
        assert "again: at the reset the server answers otherwise than before" in found[0].failures[0].message


def test_a_conversation_has_what_was_said_before_and_steps_may_be_paid_one_by_one(server):
    with make_game("openenv", url=server.url, reads="conversation", pay="steps", instructions="Guess.", **GUESS) as environment:
        (path,) = played(environment, Halving(), 1).trajectories
    assert [call.prompt.startswith("Guess.") for call in path.calls] == [True] + [False] * (len(path.calls) - 1)
    assert [path.earned[call.id].local for call in path.calls] == [0.0] * (len(path.calls) - 1) + [1.0]


def test_more_data_of_a_reset_knows_the_split_and_the_seed_of_a_task_is_of_its_split(server):
    with make_game("openenv", url=server.url, reset='{"low": 2, "part": "{split}"}', **GUESS) as environment:
        played(environment, Halving(), 2)
        drawn = {split: [task.fields["seed"] for task in environment.tasks(split, 0, 50)] for split in openenv.SPLITS}
        assert environment.tasks("test", 3, 2) == environment.tasks("test", 0, 8)[3:5]
    data = [message["data"] for message in server.heard if message["type"] == "reset"][-1]
    assert (data["low"], data["part"], data["seed"] % 10 in openenv.SPLITS["train"]) == (2, "train", True)
    assert all({seed % 10 for seed in seeds} == set(openenv.SPLITS[split]) for split, seeds in drawn.items())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"url": ""}, "needs its option 'url'"),
        ({"url": "ftp://x"}, "is no address of an OpenEnv server"),
        ({"url": "http://127.0.0.1:9/"}, "cannot be played: no connection to ws://127.0.0.1:9/ws"),
        ({"action": "{}"}, "has no place for the response"),
        ({"action": "hello"}, "is no JSON object"),
        ({"reset": "[1]"}, "config.game.reset="),
        ({"raises": "aborts"}, "did you mean 'abort'"),
        ({"most": 0.0}, "least below most"),
        ({"observation": "hints"}, "the observation has no 'hints'; it has hint, parity, metadata"),
    ],
)
def test_what_cannot_be_played_is_refused_with_a_reason(server, options, message):
    with pytest.raises(GameError, match=message):
        make_game("openenv", **{"url": server.url, **GUESS, **options})


def test_a_missing_package_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "websockets.sync.client", None)
    monkeypatch.setitem(sys.modules, "websockets.sync", None)
    with pytest.raises(GameError, match=r"pip install 'marl_llm\[openenv\]'"):
        make_game("openenv", url="http://127.0.0.1:9")


def test_a_template_is_filled_with_what_was_said_and_nothing_of_it_is_read_as_json():
    def read(template, text, form="plain"):
        return openenv.action_parser(template, form)(text)["action"]

    assert read({"message": "say {text}!", "n": 1}, ' "}, {"x": "{int}" ') == {"message": 'say "}, {"x": "{int}"!', "n": 1}
    assert read({"a": ["{int}", "{number}"]}, " 3 ") == {"a": [3, 3]}
    assert read({"a": "{json}"}, '{"b": [1, "x"]}') == {"a": {"b": [1, "x"]}}
    assert read("{json}", 'think <action>{}</action> or <action>{"a": 1}</action>\n', "tags") == {"a": 1}
    for template, text, form in (
        ({"a": "{int}"}, "3.5", "plain"), ({"a": "{int}"}, "true", "plain"), ({"a": "{number}"}, "NaN", "plain"),
        ("{json}", "[1]", "plain"),
        ("{json}", "", "plain"), ({"a": "{int}"}, "9" * 400, "plain"), ({"a": "{text}"}, "<action>x</action> and more", "tags"),
        ({"a": "{json}"}, "[" * 20 + "]" * 20, "plain"),
    ):  # fmt: skip
        with pytest.raises(FormatError):
            read(template, text, form)


def test_addresses_and_messages_are_read():
    for url in ("http://a:1", "http://a:1/", "ws://a:1/ws", "a:1"):
        assert websocket_url(url) == "ws://a:1/ws"
    assert websocket_url("https://a") == "wss://a/ws"
    answer = read_answer('{"type": "observation", "data": {"observation": {"a": 1}, "reward": true, "done": true, "metadata": {}}}')
    assert (answer.observation, answer.reward, answer.done) == ({"a": 1}, 1.0, True)
    with pytest.raises(Refusal, match=f"^{'m' * 300}$") as refused:
        read_answer(json.dumps({"type": "error", "data": {"message": "m" * 1000, "code": "VALIDATION_ERROR"}}))
    assert refused.value.code == "VALIDATION_ERROR"
    with pytest.raises(Fault, match="too_deep"):
        read_answer("[" * 50 + "]" * 50)


def test_a_session_that_is_put_back_after_the_end_is_ended(server):
    pool = Sessions(websocket_url(server.url), 2, 5.0)
    session = pool.begin()
    pool.close()
    pool.rest(session)
    with pytest.raises(Fault, match="the game is closed"):
        pool.begin()
    with pytest.raises(Fault, match="the connection is lost"):
        session.reset()
    assert isinstance(session, Session)


def test_the_same_seed_gives_the_same_play_and_forks_are_plays(server):
    with make_game("openenv", url=server.url, raises="refuse", **GUESS | {"turns": 2}) as environment:
        findings = check(environment, ("same_seed", "forks"), tasks=2, plays=2, few=2)
    assert {one.name: one.evidence for one in findings if one.status == "fail"} == {}
    assert [one.name for one in findings] == ["same seed", "order", "forks"]

"""A person's seat over HTTP, without a browser: the prompt is on the page, what is posted is played, and nothing else gets in."""

import http.client
import json
import threading
import time

import pytest

from marl_llm.cli.play import main
from marl_llm.viewing import HumanSeat
from marl_llm.workflows.parsers import plain

GAME = """
from marl_llm.text import ByteTokenizer
from marl_llm.workflows import PlainText, Role, Task, Workflow, Environment, sequence
from marl_llm.workflows.parsers import plain
from marl_llm.workflows.rewards import broadcast, format_penalty


def echo() -> Environment:
    teller = Role("teller", "The word is {word}. Say it.", plain("told", max_words=1), {"told": ""}, max_tokens=16)
    writer = Role("writer", "You heard <b>{told}</b>. Write it.", plain("written", max_words=1), {"written": ""}, max_tokens=16)
    right = lambda path: float(path.fields["written"] == path.fields["word"])
    rewards = (broadcast(right, name="right"), format_penalty(0.5))
    team = Workflow("echo", sequence(teller, writer), ("word",), rewards=rewards, metrics={"right": right})
    tokenizer = ByteTokenizer(specials=("<eos>",), stops=("<eos>",))
    tasks = lambda split, first, count: [Task(n, {"word": f"{split}{n}"}, split=split) for n in range(first, first + count)]
    return Environment(team, tasks, "right", PlainText(tokenizer, tokenizer.stop_ids), lambda turn: turn.fields["word"])
"""
LIMIT_S = 120.0


class Page:
    """What a browser would do."""

    def __init__(self, url):
        self.address = url.removeprefix("http://").rstrip("/")

    def ask(self, path, body=None, **headers):
        connection = http.client.HTTPConnection(self.address, timeout=LIMIT_S)
        if body is not None:
            headers = {"Content-Type": "application/json"} | {name.replace("_", "-"): value for name, value in headers.items()}
            body = body if isinstance(body, bytes) else json.dumps(body).encode()
        connection.request("GET" if body is None else "POST", path, body, headers)
        answer = connection.getresponse()
        said = answer.status, answer.read()
        connection.close()
        return said

    def turn(self):
        return json.loads(self.ask("/api/turn")[1])

    def open_turn(self, after=0):
        end = time.monotonic() + LIMIT_S
        while not ((turn := self.turn())["open"] and turn["number"] > after):
            assert time.monotonic() < end, "nobody asked"
            time.sleep(0.01)
        return turn


@pytest.fixture
def game(tmp_path):
    file = tmp_path / "echo.py"
    file.write_text(GAME)
    return f"{file}:echo"


def test_a_person_reads_the_prompt_on_the_page_and_what_is_posted_is_played(game, monkeypatch, capsys):
    seats, ends = [], []
    monkeypatch.setattr("marl_llm.viewing.seat.HumanSeat.__enter__", lambda self: seats.append(self) or self)
    told = []
    tell = HumanSeat.tell
    monkeypatch.setattr(HumanSeat, "tell", lambda self, text: told.append(text) or tell(self, text))
    options = [game, "--human", "writer", "--tasks", "2", "--no-browser"]
    thread = threading.Thread(target=lambda: ends.append(main(options)), daemon=True)
    thread.start()
    end = time.monotonic() + LIMIT_S
    while not seats:
        assert time.monotonic() < end
        time.sleep(0.01)
    page = Page(seats[0].url)
    turn = page.open_turn()
    assert (turn["number"], turn["role"]) == (1, "writer")
    assert turn["messages"] == [{"role": "user", "text": "You heard <b>validation0</b>. Write it."}]
    for body, status in (
        (b"{", 400), ([], 400), ({"number": 1}, 400), ({"number": 1, "text": 3}, 400), ({"number": True, "text": ""}, 400),
        (b"[" * 100_000, 400), ({"number": 2, "text": "early"}, 409), ({"number": 0, "text": "late"}, 409),
    ):  # fmt: skip
        assert page.ask("/api/answer", body)[0] == status
    assert page.ask("/api/answer", {"number": 1, "text": "x"}, Content_Type="text/plain")[0] == 415  # another site's form
    assert page.ask("/api/answer", {"number": 1, "text": "x"}, Host="evil.example:80")[0] == 403
    assert page.ask("/api/answer", b"", Content_Length=str(2 << 20))[0] == 413
    assert page.turn()["open"]
    assert page.ask("/api/answer", {"number": 1, "text": "validation0"}) == (200, b'{"told": "heard"}')
    turn = page.open_turn(after=1)
    assert page.ask("/api/answer", {"number": 1, "text": "again"})[0] == 409
    assert page.ask("/api/answer", {"number": 2, "text": "two words \ud800"})[0] == 200
    thread.join(LIMIT_S)
    assert ends == [0]
    assert told[0].startswith("right: 1\n")
    assert told[1].startswith("right: 0\n")
    assert "its format is broken: " in told[1]
    assert "your seat is http://127.0.0.1:" in capsys.readouterr().out


def test_the_page_is_served_with_its_script_and_makes_no_html_of_texts():
    with HumanSeat() as seat:
        page = Page(seat.url)
        status, body = page.ask("/")
        assert (status, b"seat.js" in body) == (200, True)
        script = page.ask("/seat.js")[1]
        assert b"textContent" in script
        assert b"innerHTML" not in script
        assert page.ask("/view.css")[0] == 200
        assert page.ask("/view.js")[0] == page.ask("/../seat.py")[0] == 404
        assert page.turn() == {"number": 0, "open": False}


def test_a_role_that_no_person_can_play_is_refused_and_the_terminal_shows_what_is_read(game, monkeypatch, capsys):
    assert main([game, "--human", "writr", "--terminal"]) == 2
    assert "did you mean 'writer'" in capsys.readouterr().err
    assert main(["joint_letter", "--human", "first", "--terminal"]) == 2
    assert "roles with text: none" in capsys.readouterr().err
    assert main([game, "--human", "writer", "--terminal", "--others", "random"]) == 2
    assert "others=random: environment 'echo' has no random player" in capsys.readouterr().err
    assert main([game, "--human", "writer", "--terminal", "--others", "trained"]) == 2
    assert "--others=trained: choose scripted, random or outside:URL#NAME" in capsys.readouterr().err
    monkeypatch.setattr("builtins.input", lambda prompt: "test3")
    assert main([game, "--human", "teller", "--terminal", "--split", "test", "--first", "3"]) == 0
    said = capsys.readouterr().out
    assert "[user] The word is test3. Say it." in said
    assert "right: 1" in said
    assert callable(plain("x"))


def test_the_seat_human_of_an_evaluation_shows_what_the_role_reads(monkeypatch, capsys):
    from marl_llm.text import Message
    from marl_llm.training.seats import ask_at_the_keyboard
    from marl_llm.workflows import Role, ScriptTurn

    monkeypatch.setattr("builtins.input", lambda prompt: prompt)
    role = Role("writer", "write", plain("x"), {"x": ""})
    turn = ScriptTurn(role, "writer", {}, (Message("user", "write"),), 0, (0, 0, 0, 0, 0))
    assert ask_at_the_keyboard(turn) == "writer> "
    assert capsys.readouterr().out == "[user] write\n"

"""A small sound team and a sound game of rivals, and games like them with one fault each: what `python -m marl_llm check` must find.

A speller reads a word and writes it backwards; a checker reads what was written and says how many letters it has.
"""

import dataclasses
import random

from marl_llm.text import ByteTokenizer
from marl_llm.workflows import Environment, FormatError, PlainText, Role, Task, Workflow, compute, repeat, sequence, stop, together, when
from marl_llm.workflows.rewards import Award, absolute, broadcast, delta, format_penalty

LETTERS = "abcdefghijklmnop"
CLASSES = {"validation": (0,), "test": (1,), "train": range(2, 10)}  # of the sum of a word's letters modulo 10


def word_of(split: str, dice: random.Random) -> str:
    while True:
        word = "".join(dice.choices(LETTERS, k=dice.randrange(4, 8)))
        if sum(map(ord, word)) % 10 in CLASSES[split]:
            return word


def task_of(split: str, number: int, dice: random.Random) -> Task:
    word = word_of(split, dice)
    return Task(number, {"word": word, "hint": ""}, {"answer": word[::-1]}, split)


def draw(split: str, first: int, count: int) -> list[Task]:
    return [task_of(split, number, random.Random(f"{split} {number}")) for number in range(first, first + count)]


def word(text: str) -> dict[str, str]:
    if not text.isalpha() or len(text) > 12:
        raise FormatError("not one word")
    return {"said": text}


def anything(text: str) -> dict[str, str]:
    return {"said": text}


def digit(text: str) -> dict[str, str]:
    if text not in tuple("0123456789"):
        raise FormatError("not one digit")
    return {"count": text}


def nothing(word: str) -> str:
    return ""


def letters(said: str, answer: str) -> float:
    return sum(a == b for a, b in zip(said, answer)) / max(len(said), len(answer), 1)


def teach(turn) -> str:
    if turn.role.name == "checker":
        return str(len(turn.fields["said"]) % 10)
    return turn.fields["word"][::-1] if turn.random.random() < 0.8 else turn.fields["word"]


def guess(turn) -> str:
    return "".join(turn.random.choices(LETTERS, k=5)) if turn.role.name == "speller" else turn.random.choice("0123456789")


def team(parse=word, note=nothing, score=letters, draw=draw, script=teach, max_prompt=64, extra=(), start=None) -> Environment:
    """The sound team, or one with another part in the place of one of its own."""
    speller = Role("speller", "Backwards: {word} {hint} {note}", parse, {"said": "none"}, max_prompt=max_prompt, max_tokens=32)
    checker = Role("checker", "How many letters? {said}", digit, {"count": "none"}, max_prompt=128, max_tokens=16)
    body = sequence(compute(note, "note"), speller, checker)

    def right(path):
        return float(score(path.fields["said"], path.fields["answer"]))

    def counted(call, path):
        return 0.2 * (call.writes["count"] == str(len(path.fields["said"]) % 10))

    pay = (broadcast(right, ("speller",), "letters"), absolute(counted, ("checker",), "count"), format_penalty(0.1), *extra)
    metrics = {"right": right}
    workflow = Workflow("spelling", body, ("word", "hint"), ("answer",), start or {}, pay, metrics)
    tokenizer = ByteTokenizer(("<eos>",), ("<eos>",))
    return Environment(workflow, draw, "right", PlainText(tokenizer, tokenizer.stop_ids), script, guess)


def duel(empty_wins: bool = False) -> Environment:
    """Two players say a digit; the higher one wins, and who says none loses, or wins with the fault."""

    def read(field):
        def parse(text):
            if text not in tuple("0123456789"):
                raise FormatError("not one digit")
            return {field: text}

        return parse

    def result(path, mine, other):
        values = dict(zip("0123456789", range(10))) | {"none": 10 if empty_wins else -1}
        a, b = (values[path.fields[name]] for name in (mine, other))
        return float((a > b) - (a < b))

    roles = [Role(name, "Say a digit. {word}", read(f"of_{name}"), {f"of_{name}": "none"}, max_prompt=64, max_tokens=4) for name in "ab"]
    pay = [broadcast(lambda path, m=m, o=o: result(path, f"of_{m}", f"of_{o}"), (m,), "result") for m, o in ("ab", "ba")]
    metrics = {"right": lambda path: float(result(path, "of_a", "of_b") > 0)}
    workflow = Workflow("duel", together(*roles), ("word",), ("answer",), {}, tuple(pay), metrics)
    tokenizer = ByteTokenizer(("<eos>",), ("<eos>",))

    def say(turn):
        return turn.random.choice("0123456789")

    return Environment(workflow, draw, "right", PlainText(tokenizer, tokenizer.stop_ids), say, say, rivals=("a", "b"))


# --- one fault each --------------------------------------------------------------------------------------------------------------------


def unseeded_draw() -> Environment:
    def note(word: str) -> str:
        return random.choice(LETTERS) + random.choice(LETTERS)

    return team(note=note)


def shared_state() -> Environment:
    def note(log: list) -> str:
        log.append("x")
        return str(len(log))

    return team(note=note, start={"log": []})


def leaked_field() -> Environment:
    def told(split, first, count):
        tasks = draw(split, first, count)
        return [Task(t.number, {**t.fields, "hint": f"(it is {t.hidden['answer']})"}, t.hidden, split) for t in tasks]

    return team(draw=told)


def pays_the_copied_prompt() -> Environment:
    return team(parse=anything, score=lambda said, answer: float(answer[::-1] in said or said == answer))


def pays_empty_text() -> Environment:
    return team(parse=anything, score=lambda said, answer: float(answer.startswith(said)))


def crashes_on_junk() -> Environment:
    return team(parse=lambda text: word(text.split()[0]))


def mixed_groups() -> Environment:
    return team(draw=lambda split, first, count: [task_of(split, t.number // 2, random.Random(str(t))) for t in draw(split, first, count)])


def small_budget() -> Environment:
    return team(max_prompt=18)


def overlapping_splits() -> Environment:
    return team(draw=lambda split, first, count: draw("train", first, count))


def pays_only(*roles: str) -> Environment:
    """Rewards of a user's own, that pay these roles alone; their names are computed, so that nothing can be known beforehand."""

    def reward(path):
        return [Award(call, 1.0, "own") for call in path.calls if call.role in set(roles)]

    environment = team()
    return dataclasses.replace(environment, workflow=dataclasses.replace(environment.workflow, rewards=(reward,)))


def pays_nobody() -> Environment:
    return pays_only()


def pays_one_role() -> Environment:
    return pays_only("speller")


def unbounded_reward() -> Environment:
    return team(parse=anything, extra=(absolute(lambda call, path: len(call.text), ("speller",), "length"),))


def order_dependent_draw() -> Environment:
    dice = random.Random(0)
    return team(draw=lambda split, first, count: [task_of(split, number, dice) for number in range(first, first + count)])


def idle_teacher() -> Environment:
    return team(script=lambda turn: "zzzzz" if turn.role.name == "speller" else "9")


def pays_a_rivals_junk() -> Environment:
    return duel(empty_wins=True)


def unwritable_picture() -> Environment:
    def picture(fields):
        raise TypeError("picture returned 3; it must return a list of lines of text, or None")

    return dataclasses.replace(team(), picture=picture)


def unwritable_task() -> Environment:
    def told(split, first, count):
        return [dataclasses.replace(t, fields={**t.fields, "map": float("inf")}) for t in draw(split, first, count)]

    return team(draw=told)


# --- pay and the number of turns -------------------------------------------------------------------------------------------------------


def rounds(pay: str = "result", parse=word, at_most: int = 3, last: float = 1.0) -> Environment:
    """The speller writes until the checker says "1" or the rounds are over; the score is that of the last word, of a late one `last` of it.

    `pay`: "result", the last word's letters, once; "every round" pays each word; "improved" what each word improved on the one before;
    "lasting" pays once, and more for each round.
    """
    speller = Role("speller", "Backwards: {word}", parse, {"said": "none"}, max_prompt=64, max_tokens=32)
    checker = Role("checker", "Right? {said}", digit, {"count": "0"}, max_prompt=128, max_tokens=16)
    body = repeat(speller, checker, when(accepted, stop()), at_most=at_most)

    def scores(path):
        return {turn: letters(said, path.fields["answer"]) for turn, said in path.per_turn("said").items()}

    def right(path):
        return letters(path.fields["said"], path.fields["answer"]) * (last if path.turns > 1 else 1.0)

    both = ("speller", "checker")
    rewards = {
        "result": lambda: broadcast(right, both, "letters"),
        "every round": lambda: absolute(lambda call, path: scores(path).get(call.turn, 0.0), both, "letters"),
        "improved": lambda: delta(scores, both, "letters"),
        "lasting": lambda: broadcast(lambda path: right(path) * path.turns, both, "letters"),
    }
    workflow = Workflow("rounds", body, ("word", "hint"), ("answer",), {}, (rewards[pay](),), {"right": right})
    tokenizer = ByteTokenizer(("<eos>",), ("<eos>",))

    def script(turn):
        return turn.fields["word"][::-1] if turn.role.name == "speller" else str(int(turn.fields["said"] == turn.fields["answer"]))

    return Environment(workflow, draw, "right", PlainText(tokenizer, tokenizer.stop_ids), script, guess)


def accepted(count: str) -> bool:
    return count == "1"

"""A team of your own: a writer proposes a word, an editor improves it, and a function of the whole play pays both."""

import random

import marl_llm as ml
from marl_llm.text import ByteTokenizer
from marl_llm.workflows import Environment, PlainText, Role, Task, Workflow, plain, sequence
from marl_llm.workflows.rewards import broadcast

LETTERS = "abcdefgh"
TOKENIZER = ByteTokenizer(specials=("<eos>",), stops=("<eos>",))


def vowels_and_order(path) -> float:
    """1 for a word of three letters in order that begins with the task's letter; a third for each part."""
    word = path.fields["final"].strip()
    parts = (len(word) == 3, word[:1] == path.fields["letter"], list(word) == sorted(set(word)))
    return sum(parts) / 3


def tasks(split: str, first: int, count: int) -> list[Task]:
    """Letters; those of the test split never occur in training."""
    letters = {"train": LETTERS[:5], "validation": LETTERS[5:6], "test": LETTERS[6:]}[split]
    return [Task(number, {"letter": letters[number % len(letters)]}, split=split) for number in range(first, first + count)]


def player(turn) -> str:
    """Who is imitated first: right in two of three times."""
    start = LETTERS.index(turn.fields["letter"])
    word = "abcdefghij"[start : start + 3]
    return word if turn.random.random() < 0.66 else "".join(random.Random(turn.seed[0]).choices(LETTERS, k=3))


def words() -> Environment:
    """The team: who reads what, who speaks after whom, what is paid, and how it is measured."""
    writer = Role("writer", "{letter}>", plain("draft"), {"draft": ""}, max_prompt=8, max_tokens=5)
    editor = Role("editor", "{letter}:{draft}>", plain("final"), {"final": ""}, max_prompt=32, max_tokens=5)
    rewards = (broadcast(vowels_and_order),)
    team = Workflow("words", sequence(writer, editor), ("letter",), rewards=rewards, metrics={"score": vowels_and_order})
    return Environment(team, tasks, "score", PlainText(TOKENIZER, TOKENIZER.stop_ids), player)


def main(workdir: str = "runs/own_team", steps: int = 60, **options) -> None:
    """Trains it, a model per role. From the command line: `marl train game:examples/own_team.py:words --workdir=...`."""
    options = {"sft": {"steps": 100}, "rollout": {"tasks": 8}} | options
    print(ml.train(words(), {"writer": "micro", "editor": "micro"}, "grpo", steps=steps, workdir=workdir, **options))


if __name__ == "__main__":
    main()

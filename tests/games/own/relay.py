"""A workflow as a user writes it, in a file of its own: a teller hears a colour, a guesser must say it from what the teller said."""

from marl_llm.text import train_pieces
from marl_llm.workflows import Environment, PlainText, Role, Task, Workflow, plain, sequence
from marl_llm.workflows.rewards import broadcast

COLOURS = ("red", "green", "blue", "white")
SPLITS = {"train": COLOURS[:2], "validation": COLOURS[2:3], "test": COLOURS[3:]}


def relay(words: int = 1, noise: float = 0.5) -> Environment:
    """`words` that may be said; `noise` of the scripted player."""
    if words < 1:
        raise ValueError(f"relay.words={words} must be at least 1")
    tokenizer = train_pieces((".", "tell", "guess", *COLOURS))
    teller = Role("teller", "tell {colour}", parse=plain("hint", words), writes={"hint": ""}, max_tokens=2 * words, max_prompt=8)
    guesser = Role("guesser", "guess {hint}", parse=plain("guess", words), writes={"guess": ""}, max_tokens=2 * words, max_prompt=8)

    def right(way):
        return float(way.fields["guess"] == way.fields["colour"])

    team = Workflow("relay", sequence(teller, guesser), inputs=("colour",), rewards=(broadcast(right),), metrics={"right": right})

    def tasks(split, first, count):
        return [Task(n, {"colour": SPLITS[split][n % len(SPLITS[split])]}, {}, split) for n in range(first, first + count)]

    def play(turn):
        dice = turn.random
        return dice.choice(COLOURS) if dice.random() < noise else turn.fields["colour" if turn.role.name == "teller" else "hint"]

    return Environment(team, tasks, "right", PlainText(tokenizer, (int(tokenizer.ids_of(["."])[0]),)), play)

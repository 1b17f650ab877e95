"""What the clients of `benchmarks.endpoint_load` noted against what the endpoint recorded."""

from __future__ import annotations

import collections
import dataclasses
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

Lines = Sequence[Mapping[str, Any]]  # of one episode, in the order of the record


@dataclasses.dataclass
class Notes:
    """What the client of one episode noted.

    Attributes:
      asked: requests by number; sending one again is the same request.
      heard: request -> the ids of the reply that was told.
      seconds: of each reply that was heard.
      reward: that was posted, perhaps without an answer.
      paid: whether the answer was that it was taken.
      refused, wrong: what had to be refused and was, or was not.
    """

    asked: set[int] = dataclasses.field(default_factory=set)
    heard: dict[int, list[int]] = dataclasses.field(default_factory=dict)
    seconds: list[float] = dataclasses.field(default_factory=list)
    reward: float | None = None
    paid: bool = False
    refused: int = 0
    wrong: int = 0

    def add(self, kind: str, *rest: Any) -> None:
        """Takes one note of the ledger, without its task."""
        if kind == "asked":
            self.asked.add(rest[0])
        elif kind == "heard":
            self.heard[rest[0]] = rest[1]
            self.seconds.append(rest[2])
        elif kind == "pay":
            self.reward = rest[0]
        elif kind == "paid":
            self.paid = True
        elif kind == "refused":
            self.refused += 1
        elif kind == "wrong":
            self.wrong += 1


def read_ledger(folder: pathlib.Path) -> dict[int, Notes]:
    """The notes of all clients, by episode."""
    notes: dict[int, Notes] = collections.defaultdict(Notes)
    for path in sorted(folder.iterdir()):
        for kind, task, *rest in map(json.loads, path.read_text().splitlines()):
            notes[task].add(kind, *rest)
    return dict(notes)


def read_lines(path: pathlib.Path) -> dict[int, Lines]:
    """The lines of a record, by the number in their episode's ID."""
    lines = collections.defaultdict(list)
    for line in map(json.loads, path.read_text().splitlines()):
        lines[int(line["episode"].removeprefix("e"))].append(line)
    return dict(lines)


def audit(notes: Mapping[int, Notes], recorded: Mapping[int, Lines]) -> dict[str, int]:
    """The counts of all episodes.

    Returns:
      `begun`, `finished` (with a pay in the record) and `aborted` episodes; `requests`, and `replies` that were heard; `refused`: what had
      to be; and of each kind of fault how many there are: see `audit_episode`.
    """
    counts = collections.Counter(begun=len(notes))
    for task in notes.keys() | recorded.keys():
        counts.update(audit_episode(notes.get(task, Notes()), recorded.get(task, ())))
    return dict(counts) | {"aborted": counts["begun"] - counts["finished"]}


def audit_episode(notes: Notes, lines: Lines) -> dict[str, int]:
    """The counts of one episode.

    Returns:
      `lost`: replies and pays that the client was told of and the record lacks, or has otherwise. `doubled`: further lines of one request,
      of one number, and of the pay. `stray`: lines of what was never sent, replies behind the pay, and what should have been refused.
      `unheard`: replies of a paid episode that its client never read.
    """
    replies = [line for line in lines if "ids" in line]
    rewards = [line["reward"] for line in lines if "ids" not in line]
    by_request: dict[int, list[list[int]]] = {}
    for line in replies:
        by_request.setdefault(int(line["messages"][-1]["content"].split()[-1]), []).append(line["ids"])
    numbers = {line["number"] for line in replies}
    is_reply = ["ids" in line for line in lines]
    behind = sum(is_reply[is_reply.index(False) :]) if rewards else 0
    missing = sum(ids not in by_request.get(request, ()) for request, ids in notes.heard.items())
    return {
        "finished": bool(rewards),
        "requests": len(notes.asked),
        "replies": len(notes.heard),
        "refused": notes.refused,
        "lost": missing + (notes.paid and notes.reward not in rewards),
        "doubled": 2 * len(replies) - len(by_request) - len(numbers) + max(0, len(rewards) - 1),
        "stray": notes.wrong + len(by_request.keys() - notes.asked) + sum(paid != notes.reward for paid in rewards) + behind,
        "unheard": len(by_request.keys() - notes.heard.keys()) if rewards else 0,
    }

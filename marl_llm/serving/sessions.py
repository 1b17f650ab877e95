"""Which ids the messages of a request have, if an earlier reply of its episode has them already (law 1: tokens in, tokens out).

A program sends the whole history with every request, as text. Encoding it again may give other ids than the model drew, and then what is
trained is not what was sampled. So an episode's replies are kept as conversations: of a request's messages the longest beginning that ends
with a reply of this episode keeps the ids of that conversation, and the chat template writes the rest behind them.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import threading
from collections.abc import Mapping, Sequence
from typing import Any

MOST_REPLIES = 20_000  # kept at a time; then the episodes that asked longest ago are encoded again
COUNTS = ("lineages", "relayed", "forked", "reencoded")


@dataclasses.dataclass
class _Known:
    """A conversation that ends with a reply, and its first continuation that was answered."""

    conversation: Any
    next: str = ""


@dataclasses.dataclass(frozen=True)
class Match:
    """What is known of a request's messages.

    Attributes:
      conversation: that ends with the last known reply; None: no reply is known.
      covered: how many messages it stands for.
      foreign: whether an assistant's message stands among the others.
      known, key: the reply's entry, and the key of all messages, for `SessionTree.count`.
    """

    conversation: Any = None
    covered: int = 0
    foreign: bool = False
    known: _Known | None = None
    key: str = ""


class SessionTree:
    """The replies of one episode. Not for threads; see `SessionTrees`.

    Attributes:
      counts: `lineages`: conversations, each fork one more; `relayed`: prompt tokens whose ids an earlier reply's conversation had;
        `forked`: those of them in requests that continue a reply which was continued otherwise before; `reencoded`: prompt tokens that
        were encoded from text in requests with an assistant's message whose ids are not known.
    """

    def __init__(self):
        self.counts = dict.fromkeys(COUNTS, 0)
        self._known: dict[str, _Known] = {}

    def __len__(self) -> int:
        return len(self._known)

    def match(self, model: str, tools: Sequence[Mapping[str, Any]], messages: Sequence[Mapping[str, Any]]) -> Match:
        """The longest known prefix of the messages; at least one message is left over."""
        keys = keys_of(model, tools, messages)
        for covered in range(len(messages) - 1, 0, -1):
            known = self._known.get(keys[covered - 1]) if messages[covered - 1]["role"] == "assistant" else None
            if known is not None:
                return Match(known.conversation, covered, _has_assistant(messages[covered:]), known, keys[-1])
        return Match(foreign=_has_assistant(messages))

    def count(self, match: Match, prompt: Sequence[int]) -> dict[str, int]:
        """Counts a request that was answered by its prompt, and gives its own counts."""
        forks = match.known is not None and match.known.next not in ("", match.key)
        if match.known is not None:
            match.known.next = match.known.next or match.key
        past = () if match.conversation is None else match.conversation.ids
        relayed = len(past) if past and tuple(prompt[: len(past)]) == tuple(past) else 0
        refused = match.conversation is not None and not relayed  # the template took no message behind the known ones
        encoded_again = match.foreign or refused
        counts = {
            "lineages": int(not relayed or forks),
            "relayed": relayed,
            "forked": relayed if forks else 0,
            "reencoded": len(prompt) - relayed if encoded_again else 0,
        }
        self.counts = {name: self.counts[name] + counts[name] for name in COUNTS}
        return counts

    def keep(self, replies: Mapping[str, Any]) -> None:
        """Knows replies by their keys from now on. A later reply of the same words takes the place of an earlier one."""
        self._known |= {key: _Known(conversation) for key, conversation in replies.items()}

    def forget(self) -> None:
        """Forgets the replies, not the counts."""
        self._known.clear()


class SessionTrees:
    """The replies of all episodes. For threads."""

    def __init__(self):
        self._trees: dict[str, SessionTree] = {}  # that asked last, last
        self._lock, self._replies = threading.Lock(), 0

    def match(self, episode: str, model: str, tools: Sequence[Mapping[str, Any]], messages: Sequence[Mapping[str, Any]]) -> Match:
        """See `SessionTree.match`."""
        with self._lock:
            return self._tree(episode).match(model, tools, messages)

    def keep(self, episode: str, match: Match, prompt: Sequence[int], replies: Mapping[str, Any]) -> dict[str, int]:
        """Counts a request that was answered, and keeps its replies, by key. Gives the request's counts."""
        with self._lock:
            tree = self._tree(episode)
            self._replies -= len(tree)
            tree.keep(replies)
            self._replies += len(tree)
            while self._replies > MOST_REPLIES:
                self._forget(next(old for old in self._trees.values() if len(old)))
            return tree.count(match, prompt)

    def counts(self, episode: str) -> dict[str, int]:
        """See `SessionTree.counts`."""
        with self._lock:
            return dict(self._trees[episode].counts) if episode in self._trees else dict.fromkeys(COUNTS, 0)

    def end(self, episode: str) -> None:
        """Ends an episode."""
        with self._lock:
            if episode in self._trees:
                self._forget(self._trees[episode])

    def _forget(self, tree: SessionTree) -> None:
        self._replies -= len(tree)
        tree.forget()

    def _tree(self, episode: str) -> SessionTree:
        self._trees[episode] = self._trees.pop(episode) if episode in self._trees else SessionTree()
        return self._trees[episode]


def keys_of(model: str, tools: Sequence[Mapping[str, Any]], messages: Sequence[Mapping[str, Any]]) -> list[str]:
    """Of each beginning of the messages a text that only equal ones have. IDs of calls are left out: no template shows them."""
    digest, keys = hashlib.sha256(json.dumps([model, list(tools)], sort_keys=True).encode()), []
    for message in messages:
        functions = [call["function"] for call in message.get("tool_calls", ())]
        calls = [[function["name"], json.loads(function["arguments"])] for function in functions]
        role = "system" if message["role"] == "developer" else message["role"]
        digest.update(json.dumps([role, message["content"], calls], sort_keys=True).encode())
        keys.append(digest.hexdigest())
    return keys


def _has_assistant(messages: Sequence[Mapping[str, Any]]) -> bool:
    return any(message["role"] == "assistant" for message in messages)

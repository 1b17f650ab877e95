"""Which page holds what, on the host: a tree of pages by their tokens, counted owners, and the pages that may be given away.

A page's place in the tree is the chain of all tokens before it, so two requests that begin alike find the same pages: the branches of a
prompt, the next turn of a conversation, whoever shares a system prompt. A full page never changes and is shared; the last page of a
sequence still grows, and others may copy its beginning. Pages without an owner stay until their place is needed, the longest unused first.
What was computed with earlier parameters, or behind it, is in no tree that is searched.
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Sequence

import numpy as np

LOOK = 32  # pages that begin alike and are compared token by token, at most


class Node:
    """A page in the tree, or its root (no page). `tokens` are those whose keys and values it holds, at most a page's; `root` is that of
    the tree where it was first put, None before; `stale`, of a root: the parameters of its tree are no longer those of its model."""

    __slots__ = ("children", "full", "owners", "page", "parent", "root", "stale", "tokens")

    def __init__(self, page: int, parent: Node | None, tokens: np.ndarray):
        self.page, self.parent, self.tokens = page, parent, tokens
        self.full: dict[bytes, Node] = {}  # by their tokens
        self.children: dict[int, dict[Node, None]] = {}  # by their first token, the latest last: full ones, and those that still grow
        self.owners, self.root, self.stale = 0, None, False

    @property
    def findable(self) -> bool:
        """Whether all that it holds, and all before it, was computed with the current parameters."""
        return self.root is not None and not self.root.stale

    def adopt(self, child: Node) -> None:
        """Puts a page that holds something behind this one."""
        child.parent = self
        self.children.setdefault(int(child.tokens[0]), {})[child] = None

    def leave(self, child: Node) -> None:
        """Takes a page away from here."""
        first = int(child.tokens[0])
        siblings = self.children.get(first, {})
        siblings.pop(child, None)
        if not siblings:
            self.children.pop(first, None)


class PagePool:
    """The pages of one part of a model's cache. Not thread-safe.

    Args:
      pages: how many. size: tokens of a page.
    """

    def __init__(self, pages: int, size: int):
        self.pages, self.size = pages, size
        self._nothing = np.zeros(0, np.int32)
        self._roots: dict[int, Node] = {}
        self.free = list(range(self.pages - 1, -1, -1))
        self.unowned: collections.OrderedDict[Node, None] = collections.OrderedDict()

    def clear(self, model: int = 0) -> None:
        """Forgets what a model computed, for its parameters have changed. Pages with an owner stay with it, and so do those that it goes on
        with behind them; nobody else finds them, and they are free once it gives them up."""
        if model in self._roots:
            self._roots.pop(model).stale = True
        for node in [node for node in self.unowned if not node.findable]:
            del self.unowned[node]
            self.free.append(node.page)
        self.free.sort(reverse=True)

    def root(self, model: int = 0) -> Node:
        """The root of a model's tree of pages: models with different adapters share no pages."""
        if model not in self._roots:
            self._roots[model] = Node(-1, None, self._nothing)
            self._roots[model].root = self._roots[model]
        return self._roots[model]

    @property
    def available(self) -> int:
        """Pages without an owner."""
        return len(self.free) + len(self.unowned)

    @property
    def owned(self) -> int:
        """Pages with an owner."""
        return self.pages - self.available

    def find(self, ids: np.ndarray, model: int = 0, least: float | int = 0) -> tuple[list[Node], Node | None, int]:
        """`(full pages, a page that goes on like ids, how many of its tokens do)` for the longest known beginning of `ids`.

        A page that goes on like ids is looked for among the latest `LOOK`, and only if the beginning may come to `least` tokens with it.
        """
        chain, node, at, most = [], self.root(model), 0, len(ids)
        while at + self.size <= most:
            child = node.full.get(ids[at : at + self.size].tobytes())
            if child is None:
                break
            chain.append(child)
            node, at = child, at + self.size
        best, common = None, 0
        if at < most and min(most, at + self.size) >= least:
            rest = ids[at : min(most, at + self.size)]
            for child in itertools.islice(reversed(node.children.get(int(rest[0]), ())), LOOK):
                n = min(len(rest), len(child.tokens))
                same = child.tokens[:n] == rest[:n]
                n = n if same.all() else int(np.argmin(same))
                if n > common:
                    best, common = child, n
        return chain, best, common

    def own(self, nodes: Sequence[Node]) -> None:
        """Adds an owner to each."""
        for node in nodes:
            if not node.owners:
                self.unowned.pop(node, None)
            node.owners += 1

    def release(self, nodes: Sequence[Node]) -> None:
        """Takes an owner from each page of a sequence. The last pages are the first to be given away."""
        for node in reversed(nodes):
            node.owners -= 1
            if not node.owners:
                if len(node.tokens) and node.findable:
                    self.unowned[node] = None
                else:
                    self._forget(node)

    def take(self) -> Node:
        """An empty page with one owner, not in the tree yet. Raises `IndexError` if none is available."""
        if not self.free:
            if not self.unowned:
                raise IndexError("no page is available")
            old, _ = self.unowned.popitem(last=False)  # what lies behind it was released before it, and is gone
            self._forget(old)
        node = Node(self.free.pop(), None, self._nothing)
        node.owners = 1
        return node

    def grown(self, node: Node, parent: Node, tokens: np.ndarray) -> Node:
        """Says what an owner's page behind `parent` (full, or the root) holds now. Returns the page to go on with: where another full page
        holds the same tokens there, that one, and the owner's own is free again, unless somebody else has yet to copy from it."""
        node.tokens = tokens
        node.root = node.root or parent.root  # a page belongs to the parameters that began it
        if not len(tokens) or not node.findable:
            return node
        if len(tokens) < self.size:
            parent.adopt(node)
            return node
        twin = parent.full.setdefault(tokens.tobytes(), node)
        if twin is node or node.owners > 1:
            parent.adopt(node)
            return node
        parent.leave(node)
        self.own([twin])
        self.free.append(node.page)
        return twin

    def _forget(self, node: Node) -> None:
        if node.parent is not None:
            node.parent.leave(node)
            name = node.tokens.tobytes()
            if node.parent.full.get(name) is node:
                del node.parent.full[name]
        self.free.append(node.page)

"""Which page holds what, on the host: a tree of pages by their tokens, counted owners, and the pages that may be given away.

A page's place in the tree is the chain of all tokens before it, so two requests that begin alike find the same pages: the branches of a
prompt, the next turn of a conversation, whoever shares a system prompt. A full page never changes and is shared; the last page of a
sequence still grows, and others may copy its beginning. Pages without an owner stay until their place is needed, the longest unused first.
"""

from __future__ import annotations

import collections
from collections.abc import Sequence

import numpy as np


class Node:
    """A page in the tree, or its root (no page). `tokens` are those whose keys and values it holds, at most a page's."""

    __slots__ = ("full", "growing", "owners", "page", "parent", "tokens")

    def __init__(self, page: int, parent: Node | None, tokens: np.ndarray):
        self.page, self.parent, self.tokens = page, parent, tokens
        self.full: dict[bytes, Node] = {}  # by their tokens
        self.growing: dict[Node, None] = {}  # not full: their owner may add to them
        self.owners = 0


class PagePool:
    """The pages of one part of a model's cache. Not thread-safe.

    Args:
      pages: how many. size: tokens of a page.
    """

    def __init__(self, pages: int, size: int):
        self.pages, self.size = pages, size
        self.clear()

    def clear(self) -> None:
        """Forgets everything, for the parameters have changed. No page has an owner."""
        self.root = Node(-1, None, np.zeros(0, np.int32))
        self.free = list(range(self.pages - 1, -1, -1))
        self.unowned: collections.OrderedDict[Node, None] = collections.OrderedDict()

    @property
    def available(self) -> int:
        """Pages without an owner."""
        return len(self.free) + len(self.unowned)

    @property
    def owned(self) -> int:
        """Pages with an owner."""
        return self.pages - self.available

    def find(self, ids: np.ndarray) -> tuple[list[Node], Node | None, int]:
        """`(full pages, a page that goes on like ids, how many of its tokens do)` for the longest known beginning of `ids`."""
        chain, node, at, most = [], self.root, 0, len(ids)
        while at + self.size <= most:
            child = node.full.get(ids[at : at + self.size].tobytes())
            if child is None:
                break
            chain.append(child)
            node, at = child, at + self.size
        best, common = None, 0
        if at < most:
            rest = ids[at : min(most, at + self.size)]
            for child in (*node.full.values(), *node.growing):
                if not len(child.tokens) or child.tokens[0] != rest[0]:
                    continue
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
                if len(node.tokens):
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
        node = Node(self.free.pop(), None, self.root.tokens)
        node.owners = 1
        return node

    def grown(self, node: Node, parent: Node, tokens: np.ndarray) -> Node:
        """Says what an owner's page behind `parent` (full, or the root) holds now. Returns the page to go on with: where another full page
        holds the same tokens there, that one, and the owner's own is free again."""
        node.tokens = tokens
        if not len(tokens):
            return node
        if len(tokens) < self.size:
            node.parent = parent
            parent.growing[node] = None
            return node
        parent.growing.pop(node, None)
        twin = parent.full.setdefault(tokens.tobytes(), node)
        if twin is node:
            node.parent = parent
            return node
        self.own([twin])
        self.free.append(node.page)
        return twin

    def _forget(self, node: Node) -> None:
        if node.parent is not None:
            node.parent.growing.pop(node, None)
            name = node.tokens.tobytes()
            if node.parent.full.get(name) is node:
                del node.parent.full[name]
        self.free.append(node.page)

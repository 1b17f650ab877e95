"""The stop rules of all requests of a scheduler in one table, so that every program has one shape whatever the rules are."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from marl_llm.sampling.model_runner import Rules
from marl_llm.sampling.sequences import bucket
from marl_llm.sampling.stops import StopRule

MOST_RULES = 64  # stop rules held at a time, 0.6 MB each of a vocabulary of 151,936


class RuleTable:
    """Stop rules, their states numbered through.

    Args:
      vocab_size: of the model. most_states: of all rules together. least: states that the table has room for at least.

    Attributes:
      starts: id of a rule -> its first state.
    """

    def __init__(self, vocab_size: int, most_states: int, least: int):
        self.vocab_size, self.most_states, self.least = vocab_size, most_states, least
        self.starts: dict[int, int] = {}
        self._rules: list[StopRule] = []
        self._table: Rules | None = None

    def add(self, rule: StopRule, busy: bool) -> int | None:
        """First state of the rule. Where there is no room the rules of before are forgotten; None if they are still in use (`busy`)."""
        if id(rule) not in self.starts:
            states = sum(len(r.ends) for r in self._rules)
            if states + len(rule.ends) > self.most_states or len(self._rules) == MOST_RULES:
                if busy:
                    return None
                self.starts, self._rules, states = {}, [], 0
            self.starts[id(rule)] = states
            self._rules.append(rule)  # which also keeps its id from being used again
            self._table = None
        return self.starts[id(rule)]

    def arrays(self) -> Rules:
        """The table on the device."""
        if self._table is None:
            starts = [self.starts[id(r)] for r in self._rules]
            states = sum(len(r.ends) for r in self._rules)
            room, columns = bucket(states, self.least, 4), bucket(max(r.table.shape[1] for r in self._rules), 16, 4)
            table, ends, of = np.zeros((room, columns), np.int32), np.zeros(room, bool), np.zeros(room, np.int32)
            classes = np.zeros((bucket(len(self._rules), 1, 4), self.vocab_size), np.int32)
            for number, (start, rule) in enumerate(zip(starts, self._rules, strict=True)):
                own = slice(start, start + len(rule.ends))
                table[own, : rule.table.shape[1]], ends[own], of[own], classes[number] = rule.table + start, rule.ends, number, rule.classes
            self._table = Rules(*map(jnp.asarray, (table, ends, of, classes)))
        return self._table

    def clear(self) -> None:
        """Gives up what lies on the device."""
        self._table = None

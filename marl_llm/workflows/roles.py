"""Roles: what a player reads, what it may say, and what its words mean. Nothing about models, devices or algorithms.

A role is the tuple of UnityMAS-O, Eq. 2: a prompt template, input and output spaces, tools, and constraints on execution. Its inputs are
the fields that the template names; its outputs are the fields of `writes`. A parser turns a response into those fields or raises
`FormatError`, which is the format's verdict: the response still has an effect (the fallbacks of `writes`), and a reward may punish it.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
import string
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from marl_llm.sampling.requests import SamplingParams
from marl_llm.text import Message
from marl_llm.untrusted import REPLACEMENT, Bounds, read_text, read_value
from marl_llm.workflows.errors import FormatError, WorkflowError
from marl_llm.workflows.finite import is_finite

Fields = Mapping[str, Any]
BOUNDS = Bounds()  # of what a parser or a tool may write
MAX_REASON = 300  # characters of why a response is illegal
MAX_DEPTH = 8  # of sub-agents within each other
TOOL_NAME = r"[A-Za-z0-9_-]{1,64}"  # what providers of models take


def parameters(function: Callable, what: str) -> tuple[str, ...]:
    """The fields that a function reads: its parameters without a default.

    Raises `WorkflowError` for a function that takes `*args` or `**kwargs`, whose fields nobody can know.
    """
    names = []
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            raise WorkflowError(f"{what}: the parameter {name!r} names no field; write one named parameter per field, or pass reads=(...)")
        if parameter.default is parameter.empty:
            names.append(name)
    return tuple(names)


class Response(NamedTuple):
    """A response: its text, and the ids that were drawn."""

    text: str
    ids: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Reader:
    """A parser that reads more of a response than its text: its ids (law 1), or what the state was when the role was asked."""

    function: Callable[..., Fields]  # of a `Response` and of the values of `reads`, in this order; otherwise as `Role.parse`
    reads: tuple[str, ...] = ()  # fields, hidden ones too


@dataclasses.dataclass(frozen=True)
class RoleTool:
    """A tool that a role calls within its own response, through the tool calls of its chat format.

    Attributes:
      name: as the model calls it.
      function: of the call's arguments, by name; plain or `async`. It may return a `ToolResult`, whose failure aborts the play.
      description, arguments: for the model; `arguments` is a JSON schema of an object.
      timeout_s: the play is aborted, or played again, when a call takes longer.
    """

    name: str
    function: Callable[..., Any]
    description: str
    arguments: Mapping[str, Any]
    timeout_s: float | int = 30.0

    @property
    def schema(self) -> dict[str, Any]:
        """As chat templates expect it."""
        return {
            "type": "function",
            "function": {"name": self.name, "description": self.description, "parameters": dict(self.arguments)},
        }


@dataclasses.dataclass(frozen=True)
class AgentTool:
    """A role as a tool of another role: each call is a sub-episode, whose responses are samples of that role like all others.

    The role reads the call's arguments in place of fields of the state, and the caller reads what it says. A call beyond a limit, or with
    arguments that cannot be used, is answered with one line that begins with `error:`.

    Attributes:
      role: name of the role that answers: one that the workflow calls elsewhere too, or one of its `sub_agents`.
      description: for the model that calls.
      name: as the model calls it; by default the role's.
      arguments: names of the arguments, in the order of the fields that the role's prompt reads; by default these fields' names, and
        "prompt" in a team that is a function.
      at_most: most calls in an episode. What runs beside a call does not count for it (law 6): each seat of an `each` has its own count.
      max_tokens: most tokens that all these calls may draw in an episode; None: `at_most` alone bounds them.
      depth: the deepest level at which it may be called: 1 is within a response that the workflow asked for, 2 within a sub-agent's.
        None: at every level; a role that could call itself, over others too, needs a depth.

    Raises:
      WorkflowError: a limit below 1, or a name that no model could call.
    """

    role: str
    description: str
    name: str = ""
    arguments: Sequence[str] = ()
    at_most: int = 8
    max_tokens: int | None = None
    depth: int | None = None

    def __post_init__(self):
        object.__setattr__(self, "name", self.name or self.role)
        who = f"AgentTool {self.name!r}"
        if not re.fullmatch(TOOL_NAME, self.name):
            raise WorkflowError(f"{who}: a name has 1 to 64 letters, digits, '_' and '-'")
        if isinstance(self.arguments, str):
            raise WorkflowError(f"{who}: arguments={self.arguments!r} must be a tuple of names, e.g. ({self.arguments!r},)")
        for limit, least in (("at_most", self.at_most), ("max_tokens", self.max_tokens), ("depth", self.depth)):
            if least is not None and (isinstance(least, bool) or not isinstance(least, int) or least < 1):
                raise WorkflowError(f"{who}: {limit}={least!r} must be a whole number, 1 or more")
        if self.depth is not None and self.depth > MAX_DEPTH:
            raise WorkflowError(f"{who}: depth={self.depth} is above {MAX_DEPTH}, the deepest that sub-agents may be nested")

    @property
    def schema(self) -> dict[str, Any]:
        """As chat templates expect it."""
        texts = {name: {"type": "string"} for name in self.arguments}
        parameters = {"type": "object", "properties": texts, "required": list(self.arguments)}
        return {"type": "function", "function": {"name": self.name, "description": self.description, "parameters": parameters}}


@dataclasses.dataclass(frozen=True)
class Role:
    """A logical player.

    Attributes:
      name: unique in its workflow.
      prompt: template of the user's message; `{field}` stands for a field of the workflow's state, `{{` for a brace. Or, for a role that
        speaks a language of ids, a function that returns the prompt's ids, of the fields that its parameters name.
      parse: response text -> output fields; raises `FormatError` for a response that breaks the format, and nothing else. Or a `Reader`.
      writes: output field -> its value when the response cannot be read.
      system: template of the system's message; empty for none.
      show: field -> function that renders it as text; `str` without one. Of `prompt`, `system` and `observation`, as `trim`.
      max_tokens: budget R of one response, its stop token included.
      max_prompt: budget P of the prompt in tokens.
      trim: a field (text or a list) that is shortened until the prompt fits, which is counted. Without one a prompt over budget aborts
        the play.
      trim_from: where it is shortened: at its "end", or at its "start", for a history whose oldest turns go first.
      settings: how its tokens are drawn.
      stop: texts that end a response, beside the stop tokens of its model.
      continues: when it speaks again in a play, its prompt is its own last conversation, with `observation` behind it: its ids only grow
        (law 1), and the engine keeps what it computed for them. Otherwise every prompt is `prompt`, rendered anew.
      observation: template of the message that a continued conversation is extended by.
      tools: what it may call within its response, functions and other roles; needs a model that speaks a chat format.
      max_tool_rounds: how often it may call tools before its response has to be final.
      timeout_s: of one response.

    Raises:
      WorkflowError: a template with positional or dotted fields, a field to show or trim that the template does not read, budgets below 1,
        beside a prompt of ids an option that only text can have, or one of `continues` and `observation` without the other.
    """

    name: str
    prompt: str | Callable[..., Sequence[int]]
    parse: Callable[[str], Fields] | Reader
    writes: Fields
    system: str = ""
    show: Mapping[str, Callable[[Any], str]] = dataclasses.field(default_factory=dict)
    max_tokens: int = 256
    max_prompt: int = 4096
    trim: str | None = None
    trim_from: str = "end"
    settings: SamplingParams = SamplingParams()
    stop: tuple[str, ...] = ()
    continues: bool = False
    observation: str = ""
    tools: tuple[RoleTool | AgentTool, ...] = ()
    max_tool_rounds: int = 4
    timeout_s: float | int = 300.0

    def __post_init__(self):
        if not self.name.isidentifier():
            raise WorkflowError(f"role {self.name!r}: the name must be a Python identifier, because fields, seeds and figures carry it")
        if not isinstance(self.writes, Mapping):
            raise WorkflowError(f"role {self.name!r}: writes={self.writes!r} must map each field to its value without a response")
        if self.continues != bool(self.observation):
            lacks = "has no observation: say what extends its conversation" if self.continues else "is needed for an observation to be read"
            raise WorkflowError(f"role {self.name!r}: continues=True {lacks}")
        reads = (*self.reads, *self.observes)
        if self.speaks_ids and (text := [f for f in ("system", "show", "trim", "tools", "continues") if getattr(self, f)]):
            raise WorkflowError(f"role {self.name!r}: its prompt is a function that returns ids, so {text[0]} has no effect: remove it")
        for option, fields in (("show", tuple(self.show)), ("trim", (self.trim,) if self.trim else ())):
            if unknown := [f for f in fields if f not in reads]:
                known = ", ".join(reads) or "none"
                raise WorkflowError(f"role {self.name!r}: {option} names {unknown[0]!r}, which its prompt does not read (it reads {known})")
        if self.trim_from not in ("start", "end"):
            raise WorkflowError(f"role {self.name!r}: trim_from={self.trim_from!r} is neither 'start' nor 'end'")
        if self.trim_from != "end" and self.trim is None:
            raise WorkflowError(f"role {self.name!r}: trim_from would have no effect, because trim names no field")
        if self.max_tokens < 1 or self.max_prompt < 1 or self.timeout_s <= 0 or self.max_tool_rounds < 1:
            raise WorkflowError(f"role {self.name!r}: max_tokens, max_prompt, max_tool_rounds and timeout_s must be above 0")
        names = [tool.name for tool in self.tools]
        if twice := [name for name in names if names.count(name) > 1]:
            raise WorkflowError(f"role {self.name!r} has two tools of the name {twice[0]!r}: rename one of them")
        if not self.writes:
            raise WorkflowError(f"role {self.name!r} writes no field, so that nothing it says has an effect: name one in writes")

    @functools.cached_property
    def reads(self) -> tuple[str, ...]:
        """Input fields, in the order of the templates."""
        if not isinstance(self.prompt, str):
            return parameters(self.prompt, f"the prompt of role {self.name!r}")
        return self._named_in(self.system, self.prompt)

    @functools.cached_property
    def observes(self) -> tuple[str, ...]:
        """Input fields of the observation that extends its conversation."""
        return self._named_in(self.observation)

    def _named_in(self, *templates: str) -> tuple[str, ...]:
        """Fields of templates, in order."""
        names = []
        for text in templates:
            try:
                parts = list(string.Formatter().parse(text))
            except ValueError as error:
                raise WorkflowError(f"role {self.name!r}: its template cannot be read: {error}; double braces that are text") from error
            for _, name, spec, conversion in parts:
                if name is None:
                    continue
                if not name.isidentifier() or spec or conversion:
                    raise WorkflowError(f"role {self.name!r}: its template holds {{{name}}}; name a field, and double braces that are text")
                names.append(name)
        return tuple(dict.fromkeys(names))

    @property
    def speaks_ids(self) -> bool:
        """Whether its prompts are made as ids, not as text."""
        return not isinstance(self.prompt, str)

    @property
    def parse_reads(self) -> tuple[str, ...]:
        """Fields that its parser reads."""
        return self.parse.reads if isinstance(self.parse, Reader) else ()

    def prompt_ids(self, fields: Fields) -> tuple[int, ...]:
        """The prompt of a role that speaks ids."""
        return tuple(int(i) for i in self.prompt(*(fields[name] for name in self.reads)))

    def messages(self, fields: Fields) -> list[Message]:
        """The prompt as messages, of valid text. Raises `WorkflowError` if a field cannot be shown.

        A role that speaks ids has none.
        """
        return self.render(fields)[0]

    def render(self, fields: Fields, again: bool = False) -> tuple[list[Message], int]:
        """`messages`, or with `again` the observation as a message; and how many characters in them were no valid text."""
        if self.speaks_ids:
            return [], 0
        shown, name = {}, ""
        try:
            for name in self.observes if again else self.reads:
                shown[name] = str(self.show.get(name, str)(fields[name]))
        except Exception as error:
            raise WorkflowError(f"role {self.name!r} cannot show {name!r}: {type(error).__name__}: {error}") from error
        system = [("system", self.system)] if self.system and not again else []
        user = self.observation if again else self.prompt
        texts = [(who, read_text(template.format_map(shown))) for who, template in (*system, ("user", user))]
        return [Message(who, text.value) for who, text in texts], sum(text.replaced for _, text in texts)

    def read(self, text: str, ids: Sequence[int] = (), fields: Fields | None = None) -> tuple[dict[str, Any], str | None]:
        """Output fields of a response, and why its format is broken (None: it is not).

        `ids` are those that were drawn, and `fields` those of the state: a `Reader` reads them.

        Raises `WorkflowError` if the parser fails otherwise than by `FormatError`, or gives other fields than `writes`.
        """
        return self.hear(text, ids, fields)[:2]

    def hear(self, text: str, ids: Sequence[int] = (), fields: Fields | None = None) -> tuple[dict[str, Any], str | None, int]:
        """`read`, and how many characters of the response and of its fields were no valid text.

        A field beyond `BOUNDS` takes its fallback, and the response is illegal.
        """
        response = read_text(text)
        text = response.value
        try:
            if isinstance(self.parse, Reader):
                spoken = Response(text, tuple(int(i) for i in ids))
                values = self.parse.function(spoken, *((fields or {})[name] for name in self.parse.reads))
            else:
                values = self.parse(text)
            values, why = dict(values), None
        except FormatError as error:
            values, why = {**self.writes, **error.fields}, read_text(str(error)[:MAX_REASON]).value or "illegal"
        except Exception as error:  # a parser reads what a policy wrote, which may be anything: this one has a fault
            raise WorkflowError(f"the parser of role {self.name!r} raised {type(error).__name__}: {error}; on {text[:200]!r}") from error
        if set(values) != set(self.writes):
            names = f"{sorted(values)}, while the role writes {sorted(self.writes)}"
            raise WorkflowError(f"the parser of role {self.name!r} gave {names}")
        marks = 0
        for field, value in values.items():
            if value is self.writes[field]:
                continue
            item = read_value(value, BOUNDS)
            problem = item.problem if not item.ok else "" if is_finite(item.value) else "number"
            if problem:
                why = why or f"{field}: cannot be read: {problem}"
            values[field] = self.writes[field] if problem else item.value
            marks += count_marks(values[field])
        return values, why, response.replaced + max(0, marks - text.count(REPLACEMENT))  # a parser hands on those that stood in the text


def count_marks(value: Any) -> int:
    """How often U+FFFD stands in a value's texts."""
    if isinstance(value, str):
        return value.count(REPLACEMENT)
    if isinstance(value, Mapping):
        return sum(count_marks(key) + count_marks(item) for key, item in value.items())
    return sum(map(count_marks, value)) if isinstance(value, list | tuple | set | frozenset) else 0


def numbered(items: Sequence[Any]) -> str:
    """Items of a list as lines `[1] ...`; for `Role.show`."""
    return "\n".join(f"[{i}] {item}" for i, item in enumerate(items, 1))

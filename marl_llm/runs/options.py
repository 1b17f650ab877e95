"""What an option of a config is: a field of a frozen dataclass, with a type, a default, a range and a meaning.

`marl_llm.runs.sections` has the dataclasses. Imports nothing heavy, so that `--help` is quick.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

from ml_collections import config_dict

from marl_llm import hints
from marl_llm.runs.command import ConfigError

KINDS = {"int": (int, "a whole number"), "float": (float, "a number"), "bool": (bool, "True or False"), "str": (str, "a text")}
Values = Mapping[str, Any] | config_dict.ConfigDict  # by name


class Bound(NamedTuple):
    """Which values an option takes, and how an error says so: `config.steps=-1 must be at least 0`."""

    holds: Callable[[Any], bool]
    words: str


def at_least(low: int) -> Bound:
    """Values from `low` on."""
    return Bound(lambda value: value >= low, f"be at least {low}")


POSITIVE = Bound(lambda value: 0 < value < math.inf, "be positive and finite")
ABOVE_0 = Bound(lambda value: 0 < value < math.inf, "be above 0")
SEED = Bound(lambda value: 0 <= value < 2**31, "lie in [0, 2^31)")


class ByModels(NamedTuple):
    """The default of an option that follows from the models that train: random ones, checkpoints, or adapters on checkpoints.

    Random models of 10^5 or 10^6 parameters learn in minutes and play hundreds of tasks in seconds. Checkpoints train all parameters at
    the papers' rate and adapters at a hundred times that, on tasks that two cores play in minutes.
    """

    random: float
    checkpoints: float
    adapters: float

    def __str__(self) -> str:
        with_adapters = f", or {self.adapters:g} for their adapters" if self.adapters != self.checkpoints else ""
        return f"{self.random:g}; with checkpoints {self.checkpoints:g}{with_adapters}"


def option(default: Any, meaning: str, bound: Bound | None = None, choices: Sequence[str] = (), unset: str | ByModels = "") -> Any:
    """A field of a section. `unset`: what a default of None stands for."""
    return dataclasses.field(default=default, metadata={"meaning": meaning, "bound": bound, "choices": choices, "unset": unset})


def kind_of(annotation: Any) -> type:
    """The type of an option's values: `int` of "int | None"; `str` of whatever is written as text, as a tuple is."""
    text = annotation if isinstance(annotation, str) else getattr(annotation, "__name__", str(annotation))
    return KINDS.get(text.split("|")[0].strip(), (str, ""))[0]


@dataclasses.dataclass(frozen=True)
class Section:
    """A section of a config. Raises `ConfigError` for a value of another type, out of range, or without effect beside the others."""

    key: ClassVar[str] = ""  # in a config; "" is the config itself

    def __post_init__(self):
        self.check(dataclasses.asdict(self))
        if why := self.contradiction():
            raise ConfigError(f"{join('config', self.key)}.{why}")

    def contradiction(self) -> str:
        """What is wrong between the options of the section; empty where nothing is."""
        return ""

    @classmethod
    def of(cls, values: Values) -> Section:
        """The section with these values; a mapping may hold more than the section's options."""
        options = {field.name: values[field.name] for field in dataclasses.fields(cls)}
        cls.check(options)
        return cls(**options)

    @classmethod
    def check(cls, values: Values, key: str | None = None) -> None:
        """Raises `ConfigError` for a value of another type or out of range; `key` names the section where it is not the class's own."""
        for field in dataclasses.fields(cls):
            value = values.get(field.name, field.default)
            if value is not None or not optional(field):
                _check_value(field, value, join("config", cls.key if key is None else key, field.name))

    @classmethod
    def changed(cls, values: Values, skip: Sequence[str] = ()) -> dict[str, Any]:
        """The options that have another value than their default."""
        options = {field.name: field.default for field in dataclasses.fields(cls) if field.name not in skip}
        return {name: values[name] for name, default in options.items() if values[name] not in (None, default)}

    @classmethod
    def shown(cls, values: Values) -> dict[str, Any]:
        """The options as a person reads them: of None, what it stands for."""
        return {f.name: f.metadata["unset"] if values[f.name] is None else values[f.name] for f in dataclasses.fields(cls)}

    @classmethod
    def config(cls, **values: Any) -> config_dict.ConfigDict:
        """The section of a config, with the defaults where `values` say nothing else."""
        defaults = {field.name: field.default for field in dataclasses.fields(cls) if field.default is not dataclasses.MISSING} | values
        fields = {field.name: field for field in dataclasses.fields(cls)}
        options = {name: placeholder(fields[name].type) if value is None else value for name, value in defaults.items()}
        return config_dict.ConfigDict(options)


def optional(field: dataclasses.Field) -> bool:
    """Whether an option may be None."""
    return "None" in str(field.type)


def join(*names: str) -> str:
    """A key of a config, with points between its names."""
    return ".".join(filter(None, names))


def placeholder(annotation: Any) -> Any:
    """An option without a value, whose flag knows its type."""
    return config_dict.placeholder(kind_of(annotation))


def _check_value(field: dataclasses.Field, value: Any, path: str) -> None:
    kind, words = KINDS[str(field.type).split("|")[0].strip()]
    if not isinstance(value, (int, float) if kind is float else kind) or (isinstance(value, bool) and kind is not bool):
        raise ConfigError(f"{path}={value!r} must be {words}")
    bound, choices = field.metadata["bound"], field.metadata["choices"]
    if bound and not bound.holds(value):
        raise ConfigError(f"{path}={value} must {bound.words}")
    if choices:
        hints.check_word(path, value, choices, ConfigError)

"""`config.teachers.<role>`: the frozen models that roles are distilled from.

A teacher is looked up when a run begins to train, not when its config is resolved: a run is evaluated where its teachers are no more. One
behind an endpoint is asked then for the log-probs of a few tokens. What a
teacher's run directory would run or send is refused unless it is trusted (`marl_llm.runs.trust`), as for `marl evaluate`.
"""

from __future__ import annotations

import dataclasses
import pathlib
import sys
from typing import TYPE_CHECKING, Any

from ml_collections import config_dict

from marl_llm import hints
from marl_llm.errors import TeacherError
from marl_llm.models import ModelConfig
from marl_llm.runs import trust
from marl_llm.runs.command import ConfigError
from marl_llm.runs.workdir import game_dir_of, read_config, read_record
from marl_llm.text.token_bytes import token_bytes
from marl_llm.text.vocabularies import vocabulary_difference

if TYPE_CHECKING:
    from marl_llm.runs.resolve import Plan
    from marl_llm.text import Tokenizer
    from marl_llm.tools.teacher_endpoint import TeacherEndpoint
    from marl_llm.training.distillation import Teacher
    from marl_llm.training.privileged import SelfTeacher
    from marl_llm.training.span_teachers import SpanTeacher
    from marl_llm.workflows import Renderer

SOURCES = ("run", "path", "url", "preset", "context")
PROBES = 16  # words of a vocabulary whose texts are compared with the endpoint's
ONE_VOCABULARY = "; a teacher scores the very ids that the student samples, so both need one vocabulary"
NUMERICS = ("compute_dtype", "attention")  # of the student's section, which a checkpoint or a preset is computed with too


@dataclasses.dataclass(frozen=True, eq=False)
class TeacherRun:
    """A run whose models teach: its directory, config, and what that means."""

    directory: pathlib.Path
    config: config_dict.ConfigDict
    plan: Plan


@dataclasses.dataclass(frozen=True, eq=False)
class TeacherSource:
    """A teacher that is there, before its parameters are read.

    Attributes:
      key: the option that names it, with its value, for errors.
      kind: "run", "path" or "preset". place: that option's value. step, model: of a run.
      shape: of the model there. vocab_size: of the student.
      tokenizer: what its ids stand for; None: unknown.
      run: where the kind is "run". by_spans: its tokenizer is not the student's, so that it is compared by spans of text.
    """

    key: str
    kind: str
    place: str
    shape: ModelConfig
    vocab_size: int
    tokenizer: Tokenizer | None
    step: int = 0
    model: str = ""
    run: TeacherRun | None = None
    by_spans: bool = False

    @property
    def identity(self) -> tuple:
        """Equal for two sources of one model, whoever learns from it."""
        place = self.place if self.kind == "preset" else str(pathlib.Path(self.place).resolve())
        return self.kind, place, self.step, self.model, self.shape, self.vocab_size, self.by_spans

    @property
    def config(self) -> ModelConfig:
        """The teacher's shape, with the student's vocabulary unless it is compared by spans."""
        size = self.shape.vocab_size if self.by_spans else self.vocab_size
        return dataclasses.replace(self.shape, vocab_size=size, value_head=False)


@dataclasses.dataclass(frozen=True, eq=False)
class EndpointSource:
    """A teacher behind an endpoint, which has answered.

    Attributes:
      key: the option that names it, with its value, for errors. endpoint: how it is asked.
    """

    key: str
    endpoint: TeacherEndpoint

    @property
    def identity(self) -> tuple:
        """Equal for two sources of one model, whoever learns from it."""
        return "url", self.endpoint.server, self.endpoint.vocab_size


@dataclasses.dataclass(frozen=True, eq=False)
class ContextSource:
    """A role's own model as its teacher, with a context. key: the option that names it, with its value. teacher: who it is."""

    key: str
    teacher: SelfTeacher

    @property
    def identity(self) -> tuple:
        """Equal for two sources of one context."""
        return "context", self.teacher


Source = TeacherSource | EndpointSource | ContextSource


def choose_steps(config: config_dict.ConfigDict, workdir: pathlib.Path) -> None:
    """Writes into the config which checkpoint of its run each teacher is, where that is open: the one that the run in `workdir` began with,
    else the newest. Raises `ConfigError` for a run without checkpoints.
    """
    from marl_llm.training import processes

    if not config.teachers:
        return

    def choose() -> dict[str, int]:
        before = read_record(workdir)["config"].get("teachers") if (workdir / "config.json").exists() else None
        before = before if isinstance(before, dict) else {}
        steps = {}
        for role, section in config.teachers.items():
            if section.run is not None and section.step is None:
                recorded = _recorded_step(before.get(role), section)
                steps[role] = _step_of(_key(role, section), section.run, None) if recorded is None else recorded
        return steps

    for role, step in processes.from_first(choose).items():
        config.teachers[role].step = step


def _recorded_step(before: Any, section: config_dict.ConfigDict) -> int | None:
    """The step that a run's record has of this very teacher; None if it has none."""
    same = isinstance(before, dict) and all(before.get(name) == section[name] for name in ("run", "model"))
    return before["step"] if same and type(before.get("step")) is int else None


def _key(role: str, section: config_dict.ConfigDict) -> str:
    """The option that names a role's teacher, with its value."""
    kind = next(name for name in SOURCES if section[name] is not None)
    return f"config.teachers.{role}.{kind}={section[kind]!r}"


def _step_of(key: str, run: str, step: int | None) -> int:
    """A checkpoint of a run, the newest by default. Raises `ConfigError` if it is not there."""
    from marl_llm.training import Checkpoints

    steps = Checkpoints(pathlib.Path(run) / "checkpoints").steps()
    if not steps or (step is not None and step not in steps):
        missing = "checkpoint" if step is None else f"checkpoint {step}"
        raise ConfigError(f"{key} has no {missing}; it has {', '.join(map(str, steps)) or 'none'}")
    return steps[-1] if step is None else step


def find_teachers(config: config_dict.ConfigDict, plan: Plan, ask: bool = True) -> dict[str, Source]:
    """Role -> its teacher; the same object for roles that have one teacher. Without `ask` only those whose parameters a run holds.

    Raises `ConfigError` naming the option: for a run, a checkpoint, a model or a preset that is not there, a run directory that is not
    trusted, an endpoint without prompt log-probs, and a vocabulary that is not the student's where spans of text cannot be compared.
    """
    from marl_llm.training.privileged import SelfTeacher

    runs: dict[pathlib.Path, TeacherRun] = {}
    sources: dict[tuple, Source] = {}
    teachers = {}
    for role, section in config.teachers.items():
        if (section.url is not None or section.context is not None) and not ask:
            continue
        key, student = _key(role, section), plan.assignment.roles[role]
        try:
            if section.run is not None:
                if (place := pathlib.Path(section.run).resolve()) not in runs:
                    runs[place] = _open_run(key, pathlib.Path(section.run))
                source = _source_of_run(key, role, section, plan.shapes[student].vocab_size, runs[place])
            elif section.context is not None:
                source = ContextSource(key, SelfTeacher(section.context, plan.shapes[student].vocab_size))
            elif section.url is not None:
                source = _source_of_endpoint(key, role, section, plan.shapes[student].vocab_size)
            else:
                source = _source_of_files(key, section, plan, student)
            if isinstance(source, TeacherSource):
                source = _compared(source, student, plan)
            elif isinstance(source, EndpointSource) and source.identity not in sources:
                _check_vocabulary(source, student, student_tokenizer(plan, student))
        except (ValueError, OSError) as error:
            raise ConfigError(str(error) if isinstance(error, ConfigError) else f"{key}: {error}") from error
        teachers[role] = sources.setdefault(source.identity, source)
    return teachers


def teacher_shapes(config: config_dict.ConfigDict, plan: Plan) -> list[ModelConfig]:
    """The shapes of the distinct teachers that a config's run holds, for plans of memory. Raises `ConfigError` as `find_teachers`."""
    return [source.config for source in {id(source): source for source in find_teachers(config, plan, ask=False).values()}.values()]


def student_tokenizer(plan: Plan, model: str) -> Tokenizer | None:
    """What the ids of a model of the team stand for; None where only its size is known (`sizes_only`)."""
    from marl_llm.text import load_tokenizer
    from marl_llm.workflows import Environment

    path = plan.options[model].get("path")
    if plan.hosted and path:
        return load_tokenizer(path)
    language = plan.played.renderer if isinstance(plan.played, Environment) else plan.played
    return language and language.tokenizer


def _source_of_run(key: str, role: str, section: config_dict.ConfigDict, vocab_size: int, run: TeacherRun) -> TeacherSource:
    """A model of a run at a checkpoint. Raises `ConfigError` where either is not there."""
    names, roles = list(run.plan.shapes), run.plan.assignment.roles
    model = section.model or roles.get(role) or (names[0] if len(names) == 1 else None)
    if model is None:
        raise ConfigError(f"{key} has no role {role!r}: set config.teachers.{role}.model to one of {', '.join(names)}")
    if model not in names:
        raise ConfigError(f"{key} has no parameters of a model {model!r} (config.teachers.{role}.model); {hints.suggestion(model, names)}")
    step, tokenizer = _step_of(key, section.run, section.step), student_tokenizer(run.plan, model)
    return TeacherSource(key, "run", section.run, run.plan.shapes[model], vocab_size, tokenizer, step, model, run)


def _source_of_endpoint(key: str, role: str, section: config_dict.ConfigDict, vocab_size: int) -> EndpointSource:
    """A model behind an endpoint. Raises `ValueError` for no address, or a key that is not set or would travel unencrypted."""
    from marl_llm.tools.teacher_endpoint import TeacherEndpoint, TeacherServer
    from marl_llm.training import processes

    if processes.count() > 1:
        raise ValueError(f"a teacher behind an endpoint needs one process, and here are {processes.count()}: all would ask it")
    server = TeacherServer(section.url, section.model or role, section.key_env, section.timeout_s or TeacherServer.timeout_s)
    return EndpointSource(key, TeacherEndpoint(server, vocab_size))


def _open_run(key: str, directory: pathlib.Path) -> TeacherRun:
    """A run's config and what it means. Raises `ConfigError` as `read_config`, and where its game is not there any more."""
    from marl_llm.runs.resolve import resolve

    try:
        config = read_config(directory, trust.asked())
        with resolve(config, game_dir_of(directory)) as plan:
            return TeacherRun(directory, config, plan)
    except ConfigError as error:
        raise ConfigError(f"{key}: {error}") from error


def _source_of_files(key: str, section: config_dict.ConfigDict, plan: Plan, student: str) -> TeacherSource:
    """A checkpoint's, or a preset's. Raises `ValueError` for one that is not there."""
    from marl_llm.models import make_model_config, read_config

    size, options = plan.shapes[student].vocab_size, plan.options[student]
    numerics = {name: options[name] for name in NUMERICS if name in options}
    own = student_tokenizer(plan, student)
    if section.path is None:
        return TeacherSource(key, "preset", section.preset, make_model_config(section.preset, size, **numerics), size, own)
    shape = read_config(section.path, **numerics)
    return TeacherSource(key, "path", section.path, shape, size, _tokenizer_of_files(key, section.path, own))


def _tokenizer_of_files(key: str, place: str, own: Tokenizer | None) -> Tokenizer | None:
    """A checkpoint's tokenizer: a game's pieces, as `marl export` writes them, or a tokenizer.json; None, with a note, without one."""
    from marl_llm.text import PieceTokenizer, load_tokenizer

    pieces = pathlib.Path(place) / "tokenizer.model"
    if isinstance(own, PieceTokenizer) and pieces.is_file():
        return PieceTokenizer.load(pieces, own.pad, own.stops)
    try:
        return load_tokenizer(place)
    except FileNotFoundError:
        print(f"note: {key} has no tokenizer.json; its ids are taken to be the student's", file=sys.stderr)
        return None


def _compared(source: TeacherSource, student: str, plan: Plan) -> TeacherSource:
    """The source, by spans of text where an id of the student means another thing to the teacher. Raises `ConfigError` where spans cannot
    be compared, and where the student has more ids. Rows that pad a teacher's vocabulary may be more than the student's."""
    own = student_tokenizer(plan, student)
    if own is not None and source.tokenizer is not None and (difference := vocabulary_difference(source.tokenizer, own)):
        if reason := _no_spans(source, student, plan):
            raise ConfigError(f"{source.key} has another tokenizer than model {student!r}: {difference}; {reason}")
        return dataclasses.replace(source, by_spans=True)
    if source.shape.vocab_size < source.vocab_size:
        sizes = f"{source.shape.vocab_size} tokens, and model {student!r} has {source.vocab_size}"
        raise ConfigError(f"{source.key} has {sizes}{ONE_VOCABULARY}")
    return source


def _writes_text(plan: Plan, model: str) -> bool:
    """Whether a model's roles read and write text, not ids of the game's own pieces."""
    roles = [role for role, player in plan.assignment.roles.items() if player == model]
    return plan.hosted and not any(plan.played.workflow.roles[role].speaks_ids for role in roles)


def _no_spans(source: TeacherSource, student: str, plan: Plan) -> str:
    """Why a teacher of another tokenizer cannot teach a model by spans of text, and what to do; empty where it can."""
    from marl_llm.training import processes

    recipe = plan.recipes[student]
    if not (_writes_text(plan, student) and (source.run is None or _writes_text(source.run.plan, source.model))):
        return "spans of text cannot be compared where a game is played in ids: take a teacher of the student's tokenizer"
    if recipe.distill_divergence != "sampled":
        divergence = f"recipe.distill_divergence={recipe.distill_divergence!r}"
        return f"spans of text are compared, not distributions as {divergence}: set it to 'sampled'"
    if recipe.temperature != 1:
        return f"spans of text are compared at temperature 1, and recipe.temperature={recipe.temperature:g}: set it to 1"
    if processes.count() > 1:
        return f"spans of text are compared in one process, and here are {processes.count()}: start one"
    try:
        token_bytes(student_tokenizer(plan, student))
        token_bytes(source.tokenizer)
    except ValueError:
        return "the tokens of one of them have no bytes of their own (WordPiece): take models with byte-level or sentencepiece tokenizers"
    return ""


def span_rows(config: config_dict.ConfigDict, plan: Plan) -> list[str]:
    """Which teachers are compared by spans of text, for `--dry_run`. Raises `ConfigError` as `find_teachers`."""
    spans = {role: source for role, source in find_teachers(config, plan, ask=False).items() if getattr(source, "by_spans", False)}
    return [f"  {source.key} has another tokenizer than its student: compared by spans of text" for source in spans.values()]


def _check_vocabulary(source: EndpointSource, student: str, own: Tokenizer | None) -> None:
    """Asks an endpoint for its last id and for the texts of a few. Raises `ConfigError` where one means another thing than to the student,
    or nothing."""
    words = {} if own is None else _plain_words(own, source.endpoint.vocab_size)
    try:
        texts = source.endpoint.pieces([*words, source.endpoint.vocab_size - 1])
    except TeacherError as error:
        raise ConfigError(f"{source.key}: {error}") from error
    for i, word in words.items():
        if i in texts and texts[i].strip() != word:
            difference = f"{i} is {texts[i]!r:.40}, not {word!r}"
            raise ConfigError(f"{source.key} has another tokenizer than model {student!r}: {difference}{ONE_VOCABULARY}")


def _plain_words(tokenizer: Tokenizer, size: int) -> dict[int, str]:
    """Id -> text, of a few ids whose text is letters, spread over a vocabulary."""
    texts = {i: tokenizer.decode([i]).strip() for i in range(0, size, max(1, size // (16 * PROBES)))}
    words = {i: text for i, text in texts.items() if text.isascii() and text.isalpha()}
    return dict(list(words.items())[:: max(1, len(words) // PROBES)][:PROBES])


def make_teachers(
    sources: dict[str, Source], config: config_dict.ConfigDict, mesh: Any
) -> dict[str, Teacher | TeacherEndpoint | SelfTeacher | SpanTeacher]:
    """Role -> its teacher, with its parameters on the mesh if it is held here; the same object for roles that have one source.

    `config` is that of the students' run, whose seed a preset begins with. Raises `ConfigError` for parameters that cannot be read.
    """
    from marl_llm.training import CheckpointError
    from marl_llm.training.distillation import Teacher, cut_vocabulary
    from marl_llm.training.learner import frozen_base
    from marl_llm.training.span_teachers import SpanTeacher

    made: dict[int, Teacher | TeacherEndpoint | SelfTeacher | SpanTeacher] = {}
    for source in sources.values():
        if id(source) in made:
            continue
        if isinstance(source, EndpointSource | ContextSource):
            made[id(source)] = source.endpoint if isinstance(source, EndpointSource) else source.teacher
            continue
        try:
            params = _run_params(source, mesh) if source.run else _file_params(source, config, mesh)
            renderer = _renderer_of(source) if source.by_spans else None
        except (CheckpointError, ValueError) as error:
            raise ConfigError(f"{source.key}: {error.__cause__ or error}") from error
        params = frozen_base(source.config, cut_vocabulary(params, source.config.vocab_size), mesh)
        made[id(source)] = SpanTeacher(source.config, params, renderer, source.vocab_size) if renderer else Teacher(source.config, params)
    return {role: made[id(source)] for role, source in sources.items()}


def _renderer_of(source: TeacherSource) -> Renderer:
    """How a teacher of another tokenizer reads prompts: by its own chat template; as plain text, with a note, where it has none."""
    from marl_llm.runs.players import template_options
    from marl_llm.text import load_chat
    from marl_llm.workflows import PlainText

    options = source.run.plan.options[source.model] if source.run else {"path": source.place}
    if source.run and "path" not in options:
        return source.run.plan.played.renderer
    try:
        return load_chat(options["path"], template_options(source.key, options), tokenizer=source.tokenizer)
    except (ValueError, FileNotFoundError) as error:
        print(f"note: {source.key} reads prompts as plain text: {error}", file=sys.stderr)
        return PlainText(source.tokenizer, source.tokenizer.stop_ids)


def _file_params(source: TeacherSource, config: config_dict.ConfigDict, mesh: Any) -> dict:
    import jax

    from marl_llm.models import init_params, load_pretrained

    if source.kind == "path":
        numerics = {name: getattr(source.shape, name) for name in NUMERICS}
        return load_pretrained(source.place, mesh=mesh, stacked=config.stacked_layers, **numerics)[1]
    return init_params(source.shape, jax.random.key(config.seed), stacked=config.stacked_layers)


def _run_params(source: TeacherSource, mesh: Any) -> dict:
    """Whole parameters of a run's model at a checkpoint, adapters merged into their base. Raises `CheckpointError`."""
    import jax
    from jax.sharding import NamedSharding, PartitionSpec

    from marl_llm.models import TRAIN, init_adapters, init_params, is_stacked, merge, param_shardings
    from marl_llm.runs.building import model_specs
    from marl_llm.training import Checkpoints, TrainState
    from marl_llm.training.learner import frozen_base

    run, shape, key = source.run, source.shape, jax.random.key(0)
    checkpoints = Checkpoints(run.directory / "checkpoints")

    def restore(shapes: Any, places: Any) -> dict:
        like = jax.tree.map(lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), shapes, places)
        return checkpoints.restore_params(source.step, {source.model: TrainState(like, None)})[source.model]

    if run.plan.options[source.model].get("lora_rank"):
        alone = dataclasses.replace(run.plan, shapes={source.model: shape})
        spec = model_specs(alone, run.config, mesh, served=False)[source.model]
        shapes = jax.eval_shape(lambda: init_adapters(shape, key, spec.lora, is_stacked(spec.params)))
        adapters = restore(shapes, jax.tree.map(lambda _: NamedSharding(mesh, PartitionSpec()), shapes))
        return merge(frozen_base(shape, spec.params, mesh), adapters, spec.lora)
    head = run.config.optimizer.critic == "head" and run.plan.recipe.advantage_estimator == "critic"
    whole = dataclasses.replace(shape, value_head=head)
    shapes = jax.eval_shape(lambda: init_params(whole, key, stacked=run.config.stacked_layers))
    params = restore(shapes, param_shardings(shapes, mesh, TRAIN))
    return {name: leaf for name, leaf in params.items() if name != "value_head"}

"""The options of a run: a frozen dataclass for each section of a config.

The config of an experiment (`marl_llm.runs.base`), its flags, `--help` and docs/options.md are made from these classes. A section checks
itself when it is made; what contradicts between sections is refused in `marl_llm.runs.contradictions`. `Recipe`, `ModelConfig` and the
games own their options: a config holds None where their own value stands.

>>> RolloutSection(tasks=0)
Traceback (most recent call last):
marl_llm.runs.command.ConfigError: config.rollout.tasks=0 must be at least 1
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, ClassVar

from ml_collections import config_dict

from marl_llm.runs.options import ABOVE_0, POSITIVE, SEED, Bound, ByModels, Section, Values, at_least, option, optional

MICROBATCH = 768  # tokens; smaller micro-batches pay for adding gradients up, larger ones fall out of a CPU's caches
ROW_TOKENS = 256  # of a packed row, where no sample is longer


@dataclasses.dataclass(frozen=True)
class RunSection(Section):
    """The run."""

    name: str = option(dataclasses.MISSING, "of the experiment, in reports")
    seed: int = option(0, "of parameters, plays and permutations", SEED)
    steps: int = option(100, "optimisation steps: one rollout and one update of each model that trains", at_least(0))
    hosted: bool = option(False, "play a value-state game through the controller and the engine, as workflows are, instead of compiled")
    assignment: str = option("per_role", "which model plays which role: 'per_role', 'shared', or e.g. 'tool=a,planner=a,judge=b'")
    schedule: str = option("", "models that train in turns, e.g. 'search:10,reason+answer:10' (steps); empty: all, always")
    logger: str = option(
        "", '"wandb" or "trackio": the figures go there too (extras of those names), offline unless their settings say otherwise'
    )
    stacked_layers: bool = option(
        False, "one leaf per weight with all layers in front: fewer leaves, faster compilation of deep models"
    )
    quick_compile: bool = option(False, "CPU: compile in a quarter of the time, run slower")
    devices: int = option(
        0, "data-parallel devices; 0: all (on CPU one per core, but one in all for published models)", at_least(0)
    )
    placement: str = option(
        "shared",
        'who has which devices along `data`: "shared": every model all of them, by turns; "split": each trained model an equal part, all '
        "at once; or a table, e.g. 'search:0-2,answer:3' (docs/pods.md). Anything but \"shared\" needs one process",
    )


@dataclasses.dataclass(frozen=True)
class ModelSection(Section):
    """`config.model` describes all models; `config.models.<name>`, where nothing is set at first, says how one differs."""

    key: ClassVar[str] = "model"
    kind: str | None = option("trained", "trained, frozen, outside or scripted")
    preset: str | None = option("micro", "a size of `marl_llm.models.PRESETS`, with random parameters")
    path: str | None = option(None, "directory of a Hugging Face checkpoint", unset="none")
    lora_rank: int | None = option(None, "trains adapters of this rank on the frozen model", unset="all parameters train")
    lora_alpha: float | None = option(16.0, "the adapters' scale, divided by the rank")
    thinking: str | None = option(None, "how the chat of a checkpoint opens: on or off", unset="as its template does")
    template: str | None = option(
        None, "what the chat template of a checkpoint is told, a JSON object, e.g. '{\"date_string\": \"26 Jul 2026\"}'", unset="nothing"
    )
    url: str | None = option(None, "outside: the address up to /chat/completions; with sampler=vllm: that of the vLLM server", unset="none")
    served_as: str | None = option(None, "outside: the model's name there", unset="none")
    key_env: str | None = option(None, "outside, or sampler=vllm: the environment variable that holds the key", unset="no key")
    sampler: str | None = option(
        None, 'who draws: "engine" (this program) or "vllm" (a server that is there already, docs/remote.md)', unset="engine"
    )
    folder: str | None = option(
        None, "sampler=vllm: directory that the server sees under the same path, for parameters on their way", unset="none"
    )


@dataclasses.dataclass(frozen=True)
class RolloutSection(Section):
    """How tasks are played. What stands behind `refills` is for hosted play alone (workflows, and `hosted=True`)."""

    key: ClassVar[str] = "rollout"
    tasks: int = option(48, "fresh tasks per step", at_least(1))
    refills: int = option(
        0, "rounds of further tasks at most, in place of those whose groups are tied (docs/signal.md); 0: none", at_least(0)
    )
    replay: int = option(
        0, "hosted play: tasks of earlier steps that are kept to replay rare successes (docs/signal.md); 0: none", at_least(0)
    )
    max_num_seqs: int = option(64, "hosted play: requests that each model decodes at once", at_least(1))
    decode_steps: int = option(8, "hosted play: tokens between two looks at the queue", at_least(1))
    cache_gib: float | None = option(
        None, "hosted play: GiB of keys and values per device", POSITIVE, unset="what all slots can need, or half of the free"
    )
    attempts: int = option(2, "hosted play: how often a play is tried before it is aborted", at_least(1))
    timeout_s: float | None = option(
        None, "hosted play: seconds for one attempt at a play", POSITIVE, unset="only the deadlines of its tools"
    )
    concurrency: int = option(1024, "hosted play: most plays under way", at_least(1))
    batch_invariant: bool = option(
        False, "hosted play: a response's bytes depend on nobody else, so runs repeat byte for byte (docs/resume.md)"
    )
    oversample: int = option(
        0, "hosted play: tasks begun beyond `tasks`; the late ones belong to the next step (docs/async.md)", at_least(0)
    )
    lora_serving: str = option(
        "auto", "hosted play: how adapters on one base are sampled (docs/real_models.md)", choices=("auto", "multi", "merged")
    )
    max_staleness: int = option(
        0, "hosted play: 1 plays the next step beside an update, with the parameters of before it (docs/async.md)",
        Bound(lambda value: value in (0, 1), "be 0 or 1: at most one step is played beside an update"),
    )  # fmt: skip
    block_pool: str = option(
        "own", 'hosted play: "shared": models of one shape draw pages from one pool (docs/real_models.md)', choices=("own", "shared")
    )
    tensor: int | None = option(
        None, "hosted play: devices that share a layer's products in the engine (docs/real_models.md)", at_least(1), unset="mesh.tensor"
    )
    weight_update: str = option(
        "blocking", 'hosted play: "in_flight" gives new parameters to responses under way, "blocking" once they have ended (docs/async.md)',
        choices=("blocking", "in_flight"),
    )  # fmt: skip
    draft_tokens: int = option(
        0, "hosted play: tokens of a draft that one step verifies, where roles quote (docs/performance.md); 0: no drafts", at_least(0)
    )
    aborted_limit: float = option(
        0.2, "hosted play: share of aborted plays over 20 steps that stops a run",
        Bound(lambda value: 0 <= value <= 1, "lie in [0, 1]; 1 never stops a run"),
    )  # fmt: skip
    max_prompt: int | None = option(None, "tokens that the roles' prompts are cut to", at_least(1), unset="as the roles have it")
    max_tokens: int | None = option(None, "tokens that the roles' responses are cut to", at_least(1), unset="as the roles have it")
    task_list: str | None = option(
        None, "workflows: file of `marl_llm profile --output`; only its tasks are trained on", unset="all tasks"
    )


@dataclasses.dataclass(frozen=True)
class ToolsSection(Section):
    """Where the programs that models write are run, while a run trains; measuring a run later uses its own host."""

    key: ClassVar[str] = "tools"
    backend: str = option("local", '"local": on this host; "ray": on all nodes of a Ray cluster (docs/remote.md)', choices=("local", "ray"))
    address: str | None = option(
        None, "backend=ray: of the cluster, e.g. 10.0.0.1:6379", unset="the cluster that this host is in"
    )
    workers: int | None = option(
        None, "programs at a time, on this host or on each node", at_least(1), unset="one per CPU"
    )

    def contradiction(self) -> str:
        """An address without a cluster."""
        alone = self.address and self.backend == "local"
        return f"address={self.address!r} would have no effect: config.tools.backend is 'local'" if alone else ""


@dataclasses.dataclass(frozen=True)
class OptimizerSection(Section):
    """How the samples are learned from."""

    key: ClassVar[str] = "optimizer"
    minibatch: int = option(32, "prompts per optimizer step", at_least(1))
    epochs: int = option(1, "passes over the samples of a step", at_least(1))
    row_tokens: int | None = option(None, "of a packed row", at_least(2), unset=f"{ROW_TOKENS}, or the longest sample")
    microbatch_tokens: int | None = option(
        None, "tokens whose activations live at a time, per device; 0: the whole minibatch", at_least(0),
        unset=f'{MICROBATCH} on a CPU, whose caches decide; elsewhere one row with `model.remat="full"`, and 0 without',
    )  # fmt: skip
    learning_rate: float | None = option(
        None, "peak; it falls to 5 % over `decay_steps`", POSITIVE, unset=ByModels(1.5e-3, 1e-6, 1e-4)
    )
    name: str = option(
        "adamw", "adamw, muon (its matrices; Adam the rest) or adafactor (little memory)", choices=("adamw", "muon", "adafactor")
    )
    schedule: str = option(
        "linear", 'how the rate falls: "constant" does not, "wsd" late', choices=("constant", "linear", "cosine", "wsd")
    )
    cooldown: float = option(
        0.2, "schedule=wsd: the last part of `decay_steps`, in which the rate falls",
        Bound(lambda value: 0 < value <= 1, "be above 0, and at most 1"),
    )
    decay_steps: int | None = option(
        None, "after which the learning rate stays at 5 %", at_least(1), unset="the `steps` that the run began with, if it is continued too"
    )
    critic: str = option(
        "own",
        "where the recipe has one: an own network, a value 'head' on the policy, or 'centralised': an own network that reads all roles",
        choices=("own", "head", "centralised"),
    )
    critic_learning_rate: float | None = option(None, "of the critic", POSITIVE, unset="as the policy's")
    warmup: int = option(5, "steps in which the learning rate rises to its peak", at_least(0))
    max_grad_norm: float = option(
        1.0, "gradients are scaled down to this norm", Bound(lambda value: value > 0, "be positive (inf switches clipping off)")
    )
    b2: float = option(0.99, "of Adam, also beside Muon", Bound(lambda value: 0 < value < 1, "lie between 0 and 1"))
    weight_decay: float = option(
        0.0, "decoupled, as AdamW's; falls on the matrices of layers, heads and adapters, not on norms, biases and embeddings",
        Bound(lambda value: 0 <= value < math.inf, "be 0 or more, and finite"),
    )  # fmt: skip


OWN_OPTIMIZER = (
    "name", "schedule", "cooldown", "learning_rate", "critic_learning_rate", "warmup", "max_grad_norm", "b2", "weight_decay",
    "minibatch", "epochs",
)  # fmt: skip


def own_optimizer_fields() -> dict[str, dataclasses.Field]:
    """The options of the optimizer that one model may have of its own, `config.models.<name>.optimizer`."""
    fields = {field.name: field for field in dataclasses.fields(OptimizerSection)}
    return {name: fields[name] for name in OWN_OPTIMIZER}


@dataclasses.dataclass(frozen=True)
class SftSection(Section):
    """Supervised warm-up: imitation of the scripted player, or the models of another run."""

    key: ClassVar[str] = "sft"
    steps: int = option(0, "of imitation; 0: start from what the models are", at_least(0))
    tasks: int = option(8, "plays of the scripted player per step", at_least(1))
    fresh: int | None = option(None, "after so many steps their plays are used again", at_least(1), unset="never")
    learning_rate: float | None = option(
        None, "of imitation: peak; linear decay to 10 %", POSITIVE, unset=ByModels(2e-3, 1e-5, 1e-4)
    )
    run: str = option("", "directory of another run: begin with its models, in place of the steps above")
    step: int = option(0, "which of its checkpoints: 0 is where its reinforcement began", at_least(0))
    models: str = option(
        "", "which of its models, where names differ, e.g. 'shared=reason'; or other runs': 'tool=run:runs/a@24#solo'"
    )


@dataclasses.dataclass(frozen=True)
class TeacherSection(Section):
    """The frozen model that a role is distilled from, where its model has a `recipe.distill_coef` (docs/signal.md): a model of a run, a
    checkpoint, a preset, a model behind an endpoint, or itself with more in its prompt. Runs and checkpoints may have another tokenizer. A
    section is made when it is first set.
    """

    key: ClassVar[str] = "teachers.<role>"
    run: str | None = option(None, "directory of the run that trained it", unset="none")
    step: int | None = option(None, "which of the run's checkpoints", at_least(0), unset="the newest when training starts; it is kept")
    model: str | None = option(
        None, "which of the run's models, or the name at the url",
        unset="the one that plays the role there, or the only one; the role's name",
    )
    url: str | None = option(
        None, "an endpoint with prompt log-probs, like `marl serve` and vLLM, e.g. http://127.0.0.1:8000/v1", unset="none"
    )
    context: str | None = option(
        None,
        "the role's own model teaches it, with this behind its prompt: a template of the play's fields, e.g. 'The answer is {target}.'",
        unset="none",
    )  # fmt: skip
    key_env: str | None = option(None, "environment variable with the key of the url", unset="no key")
    timeout_s: float | None = option(None, "seconds of a request to the url", POSITIVE, unset="120")
    path: str | None = option(None, "directory of a Hugging Face checkpoint", unset="none")
    preset: str | None = option(None, "a size of `marl_llm.models.PRESETS`, with random parameters: for plans and tests", unset="none")


@dataclasses.dataclass(frozen=True)
class EvaluationSection(Section):
    """What is measured while a run trains and at its end."""

    key: ClassVar[str] = "evaluation"
    every: int = option(40, "steps between evaluations on the validation split", at_least(1))
    tasks: int | None = option(
        None, "of each evaluation on the validation split", at_least(1), unset=ByModels(128, 32, 32)
    )
    final_tasks: int | None = option(None, "tasks of the test split, at the end", at_least(1), unset=ByModels(500, 64, 64))
    seed: int = option(2026, "of the evaluations, independent of the run's seed", SEED)
    transcripts: int = option(3, "plays of the final evaluation that are kept whole", at_least(0))
    ablate_roles: bool = option(True, "measure the team with models swapped, and with each role's untrained model put back")
    sampled: bool = option(False, "measure it at a temperature too, beside greedy")
    samples: int = option(1, "plays of each task at that temperature, whose mean counts", at_least(1))
    temperature: float | None = option(None, "of these plays", POSITIVE, unset="the recipe's")

    def contradiction(self) -> str:
        """Options of sampled evaluations without any."""
        alone = not self.sampled and (self.samples, self.temperature) != (1, None)
        return "samples and temperature would have no effect: config.evaluation.sampled is False" if alone else ""


@dataclasses.dataclass(frozen=True)
class CheckpointSection(Section):
    """What is kept to continue from."""

    key: ClassVar[str] = "checkpoint"
    every: int = option(100, "steps between checkpoints", at_least(1))
    keep: int = option(2, "how many stay, besides step 0", at_least(1))
    background: bool = option(False, "written from copies of the arrays while training goes on, not before")


@dataclasses.dataclass(frozen=True)
class LeagueSection(Section):
    """Past selves that a team trains against, or with (docs/two_agents.md); for value-state games that are played compiled."""

    key: ClassVar[str] = "league"
    keep: int = option(0, "past selves that stay, each as large as what trains, in memory and in checkpoints; 0: no league", at_least(0))
    every: int = option(20, "steps between two of them; the start is the first", at_least(1))
    matches: int = option(4, "of a step, each with an equal part of its tasks", at_least(1))
    share: float = option(
        0.5, "chance that a match is played with a past self", Bound(lambda value: 0 < value <= 1, "be above 0, and at most 1")
    )
    priority: str = option(
        "hard", 'who is met most: "hard" (seldom beaten), "even" (beaten half of the time) or "uniform"',
        choices=("hard", "even", "uniform"),
    )  # fmt: skip

    def contradiction(self) -> str:
        """Options of a league without any self."""
        idle = next(iter(self.changed(dataclasses.asdict(self), ("keep",))), "") if not self.keep else ""
        return f"{idle} would have no effect: config.league.keep is 0" if idle else ""


@dataclasses.dataclass(frozen=True)
class ControlSection(Section):
    """Controls of experiments."""

    key: ClassVar[str] = "control"
    permute_rewards: bool = option(False, "the control: rewards are dealt anew among the samples of a role")


@dataclasses.dataclass(frozen=True)
class MeshSection(Section):
    """How each model lies on the devices."""

    key: ClassVar[str] = "mesh"
    fsdp: int = option(1, "devices that share each model's parameters; 0: all that there are", at_least(0))
    tensor: int = option(1, "devices that share each layer's products", at_least(1))


@dataclasses.dataclass(frozen=True)
class CoachSection(Section):
    """Who scores every action of training plays; without a `kind` nobody does."""

    key: ClassVar[str] = "coach"
    kind: str | None = option(
        None,
        '"endpoint", "served" (marl_llm serve), "model" (in this process), "rubric" (of the environment), "small" (marl_llm coach) '
        'or "ensemble"',
        unset="nobody",
    )
    url: str | None = option(None, "endpoint, served: the address up to /chat/completions", unset="none")
    served_as: str | None = option(None, "endpoint, served: the model's name there", unset="none")
    key_env: str | None = option(None, "endpoint: the environment variable that holds the key", unset="no key")
    path: str | None = option(
        None, "model, small: directory of a checkpoint, which stays as it is while the team trains, unless `learn` is given",
        unset="none",
    )
    learn: float | None = option(
        None, "small: learning rate of the coach's own training beside the team (docs/coaches.md)", ABOVE_0, unset="it stays as it is"
    )
    thinking: str | None = option(None, "model: how its chat opens", choices=("on", "off"), unset="as the checkpoint's template does")
    max_prompt: int | None = option(None, "model: tokens of a prompt", ABOVE_0, unset="8192, or what its positions leave")
    members: str | None = option(
        None, 'ensemble: coaches with a semicolon between, each a kind and its options, e.g. "rubric; model path=DIR max_tokens=256"',
        unset="none",
    )
    agreement: str = option("median", 'ensemble: "median", "mean", or "trimmed": the mean without the highest and the lowest')
    quorum: int | None = option(None, "ensemble: how many members have to answer", unset="all")
    cache: str | None = option(
        None, "endpoint, served, model: a file that keeps replies, so that no request is paid twice", unset="none is kept"
    )
    prices: str | None = option(
        None, "endpoint: USD per million prompt tokens, and of reply tokens, with a comma between", unset="none"
    )
    cap_usd: float | None = option(None, "endpoint: what a run may cost; needs prices", ABOVE_0, unset="no cap")
    requests_per_minute: float | None = option(None, "endpoint, served: most requests in a minute", ABOVE_0, unset="no limit")
    deadline_s: float | None = option(
        None, "endpoint, served, model, small: seconds for one reply, retries included", ABOVE_0, unset="120, and 300 for a score in all"
    )
    concurrency: int | None = option(
        None, "endpoint, served, model, small: requests at a time", ABOVE_0, unset="8; small: 64; model: its slots"
    )
    format_attempts: int = option(2, "endpoint, served, model: how often a reply that cannot be read is asked for in all", ABOVE_0)
    max_tokens: int = option(1024, "endpoint, served, model: tokens of a reply", ABOVE_0)
    when: str | None = option(
        None, 'an action is scored as soon as it is done ("action") or when the play is over ("end")',
        unset="as the environment's guide says",
    )
    truth: str = option("none", 'who is scored with the hidden answers at hand: "none", "last", "last_role" or "all"')
    missing: str = option(
        "abort", 'an action without a score aborts its play ("abort") or is left out alone ("mask")', choices=("abort", "mask")
    )
    weight: float | None = option(None, "of a score in the pay", unset="0.1")
    history: int | None = option(
        None, "steps whose success, quality and failures the coach is told, for a coach with a strategy", ABOVE_0, unset="it is told none"
    )
    backward: str | None = option(
        None, "reward backpropagation: weights of an action's own score and, in points, of its part in the outcome, e.g. \"0.5,5\"",
        unset="none",
    )
    corrections: float | None = option(
        None, "part of the learning rate, for steps towards what the coach would have said in the actions' place",
        ABOVE_0, unset="it is not asked",
    )
    study: str | None = option(None, 'changes what the coach says, e.g. "constant:5"; see `marl_llm.coaching.studies`', unset="none")


SECTIONS = (
    RunSection, ModelSection, RolloutSection, OptimizerSection, SftSection, EvaluationSection, CheckpointSection, CoachSection,
    ToolsSection, LeagueSection, ControlSection, MeshSection,
)  # fmt: skip


def section_of(config: Values, section: type[Section]) -> Any:
    """The values of a section in a config, where the class `RunSection` is the config itself; None if it has none."""
    return config.get(section.key) if section.key else config


def fill_defaults(config: Values) -> None:
    """Puts the default in place of None where an option has one, and, of a dict that a config.json holds, where a key is newer than it."""
    for section in SECTIONS:
        if section.key and isinstance(config, dict):
            config.setdefault(section.key, {})
        values = section_of(config, section)
        for field in dataclasses.fields(section) if isinstance(values, dict | config_dict.ConfigDict) else ():
            known = field.name in values or (isinstance(values, dict) and section is not ModelSection)
            if known and not optional(field) and field.default is not dataclasses.MISSING and values.get(field.name) is None:
                values[field.name] = field.default


def fill_open_options(config: config_dict.ConfigDict, trained: Sequence[dict[str, Any]]) -> None:
    """Sets what follows from the models that train, where it is None; `trained` are the options of these models."""
    checkpoints = [options for options in trained if options.get("path")]
    case = 0 if not checkpoints else 2 if all(options.get("lora_rank") for options in checkpoints) else 1
    for section in SECTIONS:
        values = section_of(config, section)
        for field in dataclasses.fields(section):
            by_models = field.metadata["unset"]
            if isinstance(by_models, ByModels) and values[field.name] is None:
                values[field.name] = by_models[case]

"""What contradicts between the sections of a config, and which options would have no effect. Each is refused in one line.

A section checks itself (`marl_llm.runs.sections`); here is what needs the game, the recipe or the models too.
"""

from __future__ import annotations

import string
from typing import TYPE_CHECKING

from ml_collections import config_dict

from marl_llm import hints
from marl_llm.algorithms import Recipe
from marl_llm.games import Game
from marl_llm.models import LoraConfig
from marl_llm.runs.checks import elsewhere, given, parse_sources
from marl_llm.runs.command import ConfigError
from marl_llm.runs.own_options import optimizer_of, own_values
from marl_llm.runs.players import CHAT
from marl_llm.runs.sections import OptimizerSection, RolloutSection, ToolsSection
from marl_llm.tools.teacher_endpoint import MOST_TOP
from marl_llm.workflows import Environment, WorkflowError
from marl_llm.workflows.nodes import written

if TYPE_CHECKING:
    from marl_llm.runs.resolve import Plan

READERS = (  # an option of the optimizer, the option that says whether it is read, and with which values
    ("b2", "name", ("adamw", "muon")),
    ("cooldown", "schedule", ("wsd",)),
    ("decay_steps", "schedule", ("linear", "cosine", "wsd")),
)


def check_whole(config: config_dict.ConfigDict, plan: Plan) -> None:
    """Raises `ConfigError` for values that cannot stand together, and for options that would have no effect."""
    play = (_check_play, _check_program, _check_asynchrony, _check_refills, _check_replay, _check_league, _check_servers, _check_sampling)
    for check in (*play, _check_optimizers, _check_critic, _check_teachers, _check_sizes, _check_start, _check_models):
        check(config, plan)


def _refuse_first(*rules: tuple[object, str]) -> None:
    """Raises `ConfigError` with the text of the first rule that is broken."""
    for broken, why in rules:
        if broken:
            raise ConfigError(f"config.{why}")


def _served_models(plan: Plan) -> list[str]:
    """The models that a vLLM server draws for."""
    return [name for name, options in plan.options.items() if options.get("sampler") == "vllm"]


def _check_play(config: config_dict.ConfigDict, plan: Plan) -> None:
    """Options of hosted play in compiled play, and the reverse."""
    rollout, workflow = config.rollout, isinstance(plan.game, Environment)
    idle = {} if plan.hosted else RolloutSection.changed(rollout, ("tasks", "refills", "task_list"))
    name, value = next(iter(idle.items()), ("", ""))
    max_num_seqs = rollout.max_num_seqs
    _refuse_first(
        (config.hosted and workflow, "hosted=True would have no effect: a workflow is always played hosted"),
        (rollout.task_list and not workflow,
         "rollout.task_list would have no effect: only tasks of a workflow have numbers that a list can name"),
        (idle, f"rollout.{name}={value} would have no effect: the game is played compiled"),
        (not plan.hosted and ToolsSection.changed(config.tools), "tools would have no effect: the game is played compiled, without tools"),
        (rollout.draft_tokens and rollout.batch_invariant,
         f"rollout.draft_tokens={rollout.draft_tokens}: batch_invariant promises equal bytes, "
         "and log-probs of a step that verifies drafts are rounded otherwise; use draft_tokens=0"),
        (rollout.batch_invariant and max_num_seqs & (max_num_seqs - 1),
         f"rollout.max_num_seqs={max_num_seqs} must be a power of two with rollout.batch_invariant, so that a row's place changes no bit"),
    )  # fmt: skip


def _check_program(config: config_dict.ConfigDict, plan: Plan) -> None:
    """What cannot be had where a foreign program plays the episodes."""
    if not isinstance(plan.game, Environment) or plan.game.program is None:
        return
    from marl_llm.training.attached import check_recipe  # takes a second to import

    rollout, coach = config.rollout, config.coach.kind
    _refuse_first(
        (rollout.oversample, f"rollout.oversample={rollout.oversample}: a foreign program plays the tasks of a step and no others"),
        (rollout.refills, f"rollout.refills={rollout.refills}: a foreign program plays the tasks of a step and no others"),
        (coach, f"coach.kind={coach!r}: a coach scores workflows; a foreign program pays its roles itself"),
    )
    check_recipe(plan.recipe)


def _check_asynchrony(config: config_dict.ConfigDict, plan: Plan) -> None:
    """Play beside an update: `max_staleness`, `oversample` and `swap`."""
    rollout, over = config.rollout, config.rollout.oversample
    _refuse_first(
        (rollout.max_staleness and plan.recipe.rollout_correction == "none",
         "rollout.max_staleness=1 trains on samples of the parameters before the last update, "
         "which the loss must weigh: set config.recipe.rollout_correction=truncate (or mask)"),
        (over and over >= rollout.tasks, f"rollout.oversample={over} must be below config.rollout.tasks={rollout.tasks}"),
        (over and 1 in (config.checkpoint.every, config.steps), f"rollout.oversample={over} would have no effect: the step before a "
         "checkpoint leaves no play behind, and here a checkpoint follows each step; set config.checkpoint.every"),
    )  # fmt: skip
    if over or rollout.weight_update != "blocking":
        from marl_llm.training.play_options import PlayOptions, oversample_conflict, weight_update_conflict  # takes a second to import

        play, served = PlayOptions.of(rollout), _served_models(plan)
        why = oversample_conflict(play, plan.recipe, coached=bool(config.coach.kind), served=served)
        why = why or weight_update_conflict(play, plan.recipe, served=served)
        _refuse_first((why, f"rollout.{why}"))


def _check_refills(config: config_dict.ConfigDict, plan: Plan) -> None:
    """Tasks that are replaced, beside what does not know which tasks come next."""
    rollout = config.rollout
    if not rollout.refills:
        return
    from marl_llm.training.refills import refill_conflict  # takes a second to import

    beside = dict(max_staleness=rollout.max_staleness, oversample=rollout.oversample, coached=bool(config.coach.kind))
    why = refill_conflict(rollout.refills, plan.recipe, permuted=config.control.permute_rewards, **beside)
    _refuse_first((why, f"rollout.{why}"))


def _check_replay(config: config_dict.ConfigDict, plan: Plan) -> None:
    """Groups of earlier steps, beside what must not meet them."""
    rollout = config.rollout
    if not rollout.replay:
        return
    from marl_llm.training.replay import replay_conflict  # takes a second to import

    beside = dict(
        max_staleness=rollout.max_staleness, oversample=rollout.oversample, coached=bool(config.coach.kind),
        permuted=config.control.permute_rewards, program=isinstance(plan.game, Environment) and plan.game.program is not None,
    )  # fmt: skip
    why = replay_conflict(rollout.replay, plan.recipe, **beside)
    _refuse_first((why, f"rollout.{why}"))


def _check_league(config: config_dict.ConfigDict, plan: Plan) -> None:
    """Past selves, beside what does not know them."""
    if not config.league.keep:
        return
    from marl_llm.training.league import LeagueOptions, league_conflict  # takes a second to import

    rollout, league = config.rollout, LeagueOptions.of(config.league)
    beside = dict(roles=len(plan.assignment.roles), tasks=rollout.tasks, hosted=plan.hosted, refills=rollout.refills)
    why = league_conflict(league, **beside)
    _refuse_first((why, f"league.{why}"))


def _check_servers(config: config_dict.ConfigDict, plan: Plan) -> None:
    """Models that a vLLM server draws for."""
    urls = {name: plan.options[name]["url"].rstrip("/") for name in _served_models(plan)}
    if not urls:
        return
    from marl_llm.training.served import check_served  # takes a second to import

    first, twice = next(iter(urls)), [name for name in urls if list(urls.values()).count(urls[name]) > 1] or [""] * 2
    _refuse_first(
        (not plan.hosted, f"models.{first}.sampler='vllm': compiled play draws in its own program; set config.hosted"),
        (twice[0], f"models.{twice[0]}.url={urls.get(twice[0])!r} is also that of {twice[1]}: each model needs its own server"),
        (config.rollout.batch_invariant,
         f"rollout.batch_invariant=True promises nothing of what a server draws: config.models.{first}.sampler='vllm'"),
    )
    for name in urls:
        try:
            check_served(name, plan.recipe, name in plan.assignment.trained)
        except WorkflowError as error:
            raise ConfigError(str(error)) from error


def _check_sampling(config: config_dict.ConfigDict, plan: Plan) -> None:
    """A tree of samples, or joint actions, in a game that does not allow them."""
    recipe, game = plan.recipe, plan.played
    instead = "use a recipe with sampling='parallel', e.g. magrpo or grpo"
    if recipe.sampling == "tree" and isinstance(game, Game) and any(len(stage) > 1 for stage in game.stages):
        raise ConfigError(
            f"{game.name} has roles that act at once, and a tree would score one role's branches before the other has spoken: {instead}"
        )
    if recipe.joint == "cross" and isinstance(game, Game):
        raise ConfigError(f"recipe.joint='cross': compiled play pairs no responses; set config.hosted, or leave {game.name} aligned")
    if isinstance(game, Game):
        return
    if recipe.sampling == "tree":
        from marl_llm.training.hosted import branching_of  # takes a second to import
        from marl_llm.workflows.controller import checked_branching

        try:
            checked_branching(game.workflow, branching_of(recipe, plan.assignment), recipe.pick)
        except WorkflowError as error:
            raise ConfigError(f"recipe {recipe.name} samples a tree; {error}: {instead}") from error
    if recipe.joint == "cross":
        from marl_llm.workflows.cross import check_cross  # takes a second to import

        try:
            check_cross(game.workflow)
        except WorkflowError as error:
            raise ConfigError(f"recipe.{error}") from error


def _check_critic(config: config_dict.ConfigDict, plan: Plan) -> None:
    """A critic that the recipe does not have, that cannot lie on the policy, or that cannot read all roles."""
    o, none = config.optimizer, plan.recipe.advantage_estimator != "critic"
    adapted = [name for name, options in plan.options.items() if options.get("lora_rank")]
    why = f"would have no effect: recipe {plan.recipe.name} has no critic"
    _refuse_first(
        (none and o.critic_learning_rate is not None, f"optimizer.critic_learning_rate {why}"),
        (none and o.critic != "own", f"optimizer.critic={o.critic!r} {why}"),
        (o.critic == "head" and adapted, f"optimizer.critic='head' lies on a policy's own parameters, but {[*adapted, ''][0]} trains "
         "adapters: use 'own'"),
    )  # fmt: skip
    if o.critic == "centralised":
        _check_centralised(plan, o.row_tokens or plan.row_tokens)


def _check_centralised(plan: Plan, row: int) -> None:
    """A centralised critic of roles that it cannot read, or that has no room to read them."""
    from marl_llm.training.centralised import check_centralised  # takes a second to import

    try:
        check_centralised(plan.recipe, plan.assignment, plan.game if isinstance(plan.game, Environment) else None)
    except WorkflowError as error:
        raise ConfigError(f"config.optimizer.{error}") from error
    if row <= (longest := max(map(sum, plan.budgets.values()))):
        raise ConfigError(
            f"config.optimizer.critic='centralised' would have no effect: a row of {row} tokens holds the longest prompt and response, "
            f"{longest}, and nothing of other roles: set row_tokens, e.g. to {len(plan.budgets) * longest}"
        )


def _check_optimizers(config: config_dict.ConfigDict, plan: Plan) -> None:
    """Options that no optimizer and no schedule reads, of the team or of one model."""
    of_models = {name: optimizer_of(config, name) for name in plan.assignment.trained}
    changed = OptimizerSection.changed(config.optimizer)
    for key, owner, readers in READERS:
        idle = [name for name, values in of_models.items() if values[owner] not in readers]
        own = [name for name in idle if key in own_values(config, name, "optimizer")]
        why = f"would have no effect: {owner} is not {' or '.join(readers)}"
        _refuse_first(
            (own, f"models.{[*own, ''][0]}.optimizer.{key} {why}"),
            (key in changed and idle and len(idle) == len(of_models), f"optimizer.{key}={changed.get(key)} {why}"),
        )


def _check_teachers(config: config_dict.ConfigDict, plan: Plan) -> None:
    """A teacher that nobody learns from, and a loss that reads teachers where there is none."""
    for role, teacher in config.teachers.items():
        _check_teacher(f"teachers.{role}", role, given(teacher), plan)
        if teacher.context is not None:
            _check_context(f"teachers.{role}.context", role, teacher.context, plan)
        if teacher.url is not None:
            _check_outside(f"teachers.{role}.url", plan.recipes[plan.assignment.roles[role]])
    taught = {name: recipe.distill_coef for name, recipe in plan.recipes.items() if recipe.distill_coef}
    for model, weight in taught.items():
        roles = [role for role, player in plan.assignment.roles.items() if player == model]
        own = f"models.{model}.recipe" if "distill_coef" in own_values(config, model, "recipe") else "recipe"
        _refuse_first(
            (not set(roles) & set(config.teachers), f"{own}.distill_coef={weight:g} needs a teacher for a role of model {model!r}: set "
             f"config.teachers.{roles[0]}.run, .path, .url, .context or .preset"),
            (config.optimizer.critic == "head", "optimizer.critic='head' cannot stand beside a teacher (distill_coef): use 'own'"),
        )  # fmt: skip


def _check_teacher(key: str, role: str, teacher: dict, plan: Plan) -> None:
    """One role's section of `config.teachers`, as far as it shows without its files."""
    roles = plan.assignment.roles
    model, sources = roles.get(role, ""), [name for name in ("run", "path", "url", "preset", "context") if name in teacher]
    owners = {"step": ("run",), "model": ("run", "url"), "key_env": ("url",), "timeout_s": ("url",)}
    idle = [name for name, of in owners.items() if name in teacher and not set(of) & set(sources)] or [""]
    _refuse_first(
        (role not in roles, f"{key} teaches no role; {hints.suggestion(role, roles)}"),
        (not sources, f"{key} names no teacher: set its run, path, url, context or preset"),
        (len(sources) > 1, f"{key}.{sources[-1]} would have no effect: its {sources[0]} names the teacher" if sources else ""),
        (idle[0], f"{key}.{idle[0]} would have no effect: it names no {' or '.join(owners.get(idle[0], ()))}"),
        (model not in plan.recipes, f"{key} would have no effect: model {model!r}, which plays the role, does not train"),
        (role in roles and model in plan.recipes and not plan.recipes[model].distill_coef,
         f"{key} would have no effect: recipe.distill_coef is 0 for model {model!r}; set e.g. config.recipe.distill_coef=1"),
    )  # fmt: skip


def _check_context(key: str, role: str, context: str, plan: Plan) -> None:
    """A context that nobody could write or read, and what its teacher does not tell."""
    from marl_llm.training import processes

    model, workflow = plan.assignment.roles[role], getattr(plan.game, "workflow", None)
    recipe, size = plan.recipes[model], plan.shapes[model].vocab_size
    known = () if workflow is None else {*workflow.inputs, *workflow.hidden, *workflow.start, *written(workflow.body)}
    unknown = [field for field in context_fields(f"config.{key}", context) if field not in known]
    full_distribution = recipe.distill_divergence != "sampled" and not 0 < (recipe.distill_top_k or 0) < size
    _refuse_first(
        (workflow is None or workflow.roles[role].speaks_ids, f"{key}: {role} has no prompt of text, behind which a context could stand"),
        (workflow and plan.game.program, f"{key}: a foreign program plays the episodes, and their fields are not known here"),
        (unknown,
         f"{key} reads {{{[*unknown, ''][0]}}}, and no play has such a field; {hints.suggestion([*unknown, ''][0], sorted(known))}"),
        (full_distribution,
         f"{key}: set recipe.distill_divergence to 'sampled', or recipe.distill_top_k to 1 to {size - 1}, "
         "the likeliest tokens that are compared"),
        (recipe.temperature != 1, f"{key}: it tells log-probs at temperature 1, and recipe.temperature={recipe.temperature:g}"),
        (processes.number() > 1, f"{key} needs one process, and here are {processes.number()}"),
    )  # fmt: skip


def context_fields(key: str, context: str) -> list[str]:
    """The fields that a template names. Raises `ConfigError` for one that cannot be read."""
    try:
        names = [name for _, name, _, _ in string.Formatter().parse(context) if name is not None]
    except ValueError as error:
        raise ConfigError(f"{key}: {error}; double braces that are text") from error
    if strange := [name for name in names if not name.isidentifier()]:
        raise ConfigError(f"{key} holds {{{strange[0]}}}; name a field, and double braces that are text")
    return names


def _check_outside(key: str, recipe: Recipe) -> None:
    """What no endpoint tells of a teacher."""
    kind, top_k = recipe.distill_divergence, recipe.distill_top_k
    _refuse_first(
        (kind != "sampled" and top_k is None,
         f"{key}: an endpoint tells no whole distributions, which recipe.distill_divergence={kind!r} compares: set it to 'sampled', or "
         f"recipe.distill_top_k to 1 to {MOST_TOP}"),
        (kind != "sampled" and (top_k or 0) > MOST_TOP, f"{key}: an endpoint tells {MOST_TOP} likeliest tokens at most, and "
         f"recipe.distill_top_k={top_k}"),
        (recipe.temperature != 1, f"{key}: an endpoint tells log-probs at temperature 1, and recipe.temperature={recipe.temperature:g}"),
    )  # fmt: skip


def _check_models(config: config_dict.ConfigDict, plan: Plan) -> None:
    """Options of `config.model` that no model reads."""
    adapted = any("lora_alpha" in options for options in plan.options.values())
    if config.model.lora_alpha not in (None, LoraConfig.alpha) and not adapted:
        raise ConfigError(f"config.model.lora_alpha={config.model.lora_alpha} would have no effect: no model has a lora_rank")
    for key in CHAT:
        readers = [name for name, options in plan.options.items() if key in options]
        _refuse_first(
            (config.model[key] and not readers, f"model.{key}={config.model[key]!r} would have no effect: no model is a checkpoint"),
            (readers and not plan.hosted, f"models.{[*readers, ''][0]}.{key} would have no effect: compiled play has no chat; set "
             "config.hosted"),
        )  # fmt: skip


def _check_sizes(config: config_dict.ConfigDict, plan: Plan) -> None:
    o = config.optimizer
    longest, row, micro = max(map(sum, plan.budgets.values())), o.row_tokens or plan.row_tokens, o.microbatch_tokens
    if row < longest:
        raise ConfigError(f"optimizer.row_tokens={row} is less than a role's longest prompt and response, {longest}")
    if micro and micro < row:
        raise ConfigError(f"config.optimizer.microbatch_tokens={micro} cannot hold one row of {row} tokens, and a row is never cut")
    prompts, responses = zip(*plan.budgets.values())
    most = o.minibatch * (max(prompts) + plan.recipe.candidates * max(responses))
    if micro and micro >= max(most, row):
        raise ConfigError(
            f"config.optimizer.microbatch_tokens={micro} would have no effect: a minibatch has at most {most} tokens. Set it to 0, or lower"
        )


def _check_start(config: config_dict.ConfigDict, plan: Plan) -> None:
    w, trained, name = config.sft, list(plan.assignment.trained), config.game.name
    script = plan.script
    plays = any(options["kind"] == "scripted" for options in plan.options.values())
    known = list(plan.found.script_options)
    for option in script:
        if option not in known:
            reason = f"has no option {option!r}; {hints.suggestion(option, known)}" if known else "has no options"
            raise ConfigError(f"config.script.{option} would have no effect: {name}'s scripted player {reason}")
    if script and not w.steps and not plays:
        raise ConfigError(f"config.script.{next(iter(script))} would have no effect: sft.steps is 0")
    if w.steps and (plan.game.script is None):
        raise ConfigError(f"sft.steps={w.steps}: {name} has no scripted player to imitate")
    sources = parse_sources(w.models)
    runs = w.run or any(map(elsewhere, sources.values()))
    if idle := [key for key in ("step", "models") if w[key] and not (runs if key == "models" else w.run)]:
        raise ConfigError(f"config.sft.{idle[0]}={w[idle[0]]!r} would have no effect: sft.run names no run")
    for model in sources:
        if model not in trained:
            raise ConfigError(f"config.sft.models={w.models!r}: no model {model!r} trains; {hints.suggestion(model, trained)}")
    if lost := [model for model in trained if sources and not w.run and not elsewhere(sources.get(model, ""))]:
        raise ConfigError(f"config.sft.models={w.models!r} names no run for model {lost[0]!r}, nor does sft.run")

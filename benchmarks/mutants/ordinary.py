"""One-token faults in ordinary lines, drawn over all rooms by their size."""

M, T = "marl_llm/", "tests/"
W, S, G = M + "workflows/", M + "sampling/", M + "games/"
TOGETHER = T + "workflows/test_samples_together.py"
OPTIONS = T + "experiments/test_command_options.py"

FAULTS = {
    (W + "efficiency.py", TOGETHER): {
        "the shortest chain is critical": ("max((reached.get(parent, 0) for", "min((reached.get(parent, 0) for"),
        "tools have tokens": ("if isinstance(event, RoleCall) else 0", "if isinstance(event, RoleCall) else 1"),
    },
    (W + "metrics.py", T + "workflows/test_workflow_rewards.py " + T + "workflows/test_workflow_controller.py"): {
        "aborted rows are a role's": ('if s.call.role == role and s.excluded != "aborted"]', "if s.call.role == role]"),
        "a metric of one way is enough": ("value = None if None in values else", "value = None if values[0] is None else", TOGETHER),
        "attempts are seconds": ("[event.attempts for event in events]", "[event.seconds for event in events]", TOGETHER),
        "refusals are replacements": ("[event.refused is not None for event in events]", "[event.replaced > 0 for event in events]", TOGETHER),
        "a relative gain is of the end": ("(b - a) / a:+.0%", "(b - a) / b:+.0%"),
    },
    (W + "cross.py", T + "workflows/test_cross.py"): {
        "a joint action that broke pays nothing": ("for play in plays if not play.aborted]", "for play in plays]"),
        "everybody is paid as the first role": ("joints[:, place] == episode.play", "joints[:, 0] == episode.play"),
        "a group with an aborted play is judged": ("if not any(episode.aborted for episode in group)}", "if not all(episode.aborted for episode in group)}"),
        "a joint action follows nothing": ("dataclasses.replace(opening, parents=state.last)", "opening"),
        "the group of an aborted play leaves no rows": ("remains=episode.trajectories[0].events", "remains=()"),
        "a sub-agent has no part in a joint action": ('f"{event.node}.".startswith(f"{node}.")', "event.node == node"),
        "the draws of every step are the same": ("jax.random.fold_in(jax.random.key(DRAWN), rollout.step), task)", "jax.random.key(DRAWN), task)"),
    },
    (W + "rewards.py", T + "workflows/test_workflow_rewards.py"): {
        "a weight does not weigh a score": ("Award(call, weight * value, name or scorer)", "Award(call, value, name or scorer)", TOGETHER),
        "an absolute score has no weight": ("Award(call, weight * score(call, trajectory), name)", "Award(call, score(call, trajectory), name)", TOGETHER),
        "each field of a turn is the first": ("scores[f].get(call.turn, 0.0), name, team=True)", "scores[fields[0]].get(call.turn, 0.0), name, team=True)"),
    },
    (W + "scoring.py", T + "workflows/test_scoring.py"): {
        "true is a score": ("isinstance(score.value, bool) or", "False or"),
        "a result is told at the action too": ('and end is not None and scorer.when == "end"\n', "and end is not None\n"),
        "everybody is asked about": ("and (scorer.roles is None or event.role in scorer.roles)", ""),
    },
    (S + "pool.py", T + "sampling/test_pages.py"): {
        "a page of two owners is free": ("            if not node.owners:\n                if len(node.tokens)", "            if node.owners <= 1:\n                if len(node.tokens)"),
        "the newest page is given away": ("self.unowned.popitem(last=False)", "self.unowned.popitem(last=True)"),
        "the first common token is enough": ("if n > common:", "if n > 0:"),
        "models share what they computed": ("chain, node, at, most = [], self.root(model), 0, len(ids)", "chain, node, at, most = [], self.root(0), 0, len(ids)"),
    },
    (S + "stops.py", T + "sampling/test_stops.py"): {
        "a string inside another is not seen": ("        if fail[state] in final:\n            final.add(state)\n", ""),
        "surrogates stop nothing": ('s.encode("utf-8", "surrogatepass")', 's.encode("utf-8", "ignore")'),
        "the oldest rule is kept": ("self._rules.popitem(last=False)[1])", "self._rules.popitem(last=True)[1])"),
    },
    (S + "token_sampling.py", T + "sampling/test_token_sampling.py"): {
        "the entropy is the tempered one's": ("jnp.where(p_raw > 0, p_raw * raw, 0.0)", "jnp.where(p_raw > 0, p_raw * raw / temperature[..., None], 0.0)"),
        "a greedy draw is random": ("jnp.where(greedy, 0.0, uniform)", "uniform"),
        "min-p is of the whole mass": ("settings.min_p[..., None] * jnp.max(p, axis=-1, keepdims=True)", "settings.min_p[..., None]"),
        "raw log-probs are tempered": ("token, picked - jnp.log(total),", "token, picked / temperature - jnp.log(total),"),
    },
    (M + "training/rollouts.py", T + "training/test_rollouts_and_sft.py"): {
        "rows that do not count have prompts": ("prompts = prompts + jnp.sum(table.where)", "prompts = prompts + table.where.size"),
        "a step's draws are the first one's": ("play(game, player, instances, env, sample_key, step=step, **options)", "play(game, player, instances, env, sample_key, **options)"),
        "prompts that do not count have tokens": ("jnp.sum(table.prompt.where & table.where[..., None])", "jnp.sum(table.prompt.where)"),
        "plays have candidates": ('"branches": recipe.candidates', '"branches": recipe.group_size'),
        "a rollout picks the first": ('"pick": recipe.pick', '"pick": "first"'),
    },
    (M + "rollout/players.py", T + "rollout/test_play.py"): {
        "random players go on behind a stop": ("jnp.cumsum(stop, axis=-1) - stop == 0", "jnp.cumsum(stop, axis=-1) - stop >= 0"),
        "a response that stops is truncated": ("~jnp.any(where & (tokens == game.stop_id), axis=-1)", "jnp.any(where & (tokens == game.stop_id), axis=-1)"),
    },
    (M + "rollout/play.py", T + "rollout/test_play.py"): {
        "greedy forgets alpha": ("pick_branch(alpha * rewards.team", "pick_branch(rewards.team"),
        "plays share their draws": ("t * len(speakers) + agent, branches, trajectory, b, step)", "t * len(speakers) + agent, branches, 0 * trajectory, b, step)"),
        "roles at once see each other": ("rewards = jax.tree.map(lambda x: x[:, None], jax.vmap(_pay_of(game, role))(before, state))", "rewards = jax.tree.map(lambda x: x[:, None], jax.vmap(_pay_of(game, role))(state, state))"),
    },
    (M + "coaching/pairs.py", T + "coaching/test_pairs.py"): {
        "equal scores are right": ("sum(score < other for other in better)", "sum(score <= other for other in better)"),
        "tasks are compared": ("for i in groups[action.task, action.view.call.role] if actions[i].brief", "for group in groups.values() for i in group if actions[i].brief"),
        "an action on several paths has its last outcome": ("sum(per_path) / len(per_path) for key", "per_path[-1] for key"),
    },
    (M + "coaching/backward.py", T + "coaching/test_backward.py"): {
        "contributions against the outcome count": ("float(share) if share * total > 0 else 0.0", "float(share)"),
        "the error is signed": ("error = abs(math.fsum(contributions) - total)", "error = math.fsum(contributions) - total"),
    },
    (M + "coaching/agreement.py", T + "coaching/test_small.py " + T + "coaching/test_studies.py"): {
        "the bias has the other sign": ("error = scores - true", "error = true - scores"),
        "chance forgets the means": (" + (first.mean() - second.mean()) ** 2)", ")"),
        "the top score has no band": ("if value < high or high == BANDS[-1][1])", "if value <= high)"),
    },
    (M + "reporting/metrics.py", T + "reporting/test_metrics_writer.py"): {
        "a run that goes on from step 0 starts over": ("if resume_step < 0:", "if resume_step <= 0:"),
        "the step is drawn as a figure": ('if k != "step" and isinstance(v, int | float)}', "if isinstance(v, int | float)}"),
        "the step resumed from is dropped": ('record.get("step", 0) <= resume_step', 'record.get("step", 0) < resume_step'),
        "a supervised warm-up is dropped": ('record.get("phase") == "sft" or', "False or"),
        "true is a step": ("if isinstance(step, bool) or not", "if not"),
    },
    (M + "training/scoring.py", T + "training/test_packed_update.py"): {
        "places of other rows are responses": ("jnp.arange(rows.targets.shape[1]) < rows.length.reshape(-1, 1)", "jnp.arange(rows.targets.shape[1]) <= rows.length.reshape(-1, 1)"),
        "the charge has the other sign": ("kl(new, ref, kind=recipe.kl_kind, where=where)", "kl(ref, new, kind=recipe.kl_kind, where=where)", T + "training/test_packed_lora.py"),
    },
    (M + "training/packing.py", T + "training/test_packing.py"): {
        "first fit is next fit": ("place = next((b for b, room in enumerate(free) if", "place = next((b for b, room in list(enumerate(free))[-1:] if"),
        "the emptiest rows come first": ("key=lambda b: -used[b])", "key=lambda b: used[b])"),
        "positions start anew in a response": ("out.positions[b, at : at + r] = p + steps", "out.positions[b, at : at + r] = steps"),
    },
    (M + "training/sft.py", T + "training/test_rollouts_and_sft.py " + T + "training/test_learner.py"): {
        "all samples are counted": ("float(np.sum(tokens.size[np.asarray(chosen)]))", "float(np.sum(tokens.size))"),
    },
    (G + "search/m_ask.py", T + "games/test_search_workflows.py"): {
        "an end's format is punished": ('role_call.role == "search" and bool(role_call.writes["ended"])', "False"),
    },
    (G + "pipeline/rubric.py", T + "games/test_pipeline_rubric.py"): {
        "repetition is free": ("max(NOTHING, score - repeated)", "max(NOTHING, score)"),
        "half of the files are all": ("share = sum(bool(left.get(file)) for file in owed) / len(owed)\n    if share < 1:", "share = sum(bool(left.get(file)) for file in owed) / len(owed)\n    if share < 0.5:"),
        "who wrote first is to blame": ("writer |= {file: name for file", "writer = {file: name for file"),
        "an invalid submission is nobody's": ("if fault and end.sizes().get(SUBMISSION):", "if False:"),
    },
    (M + "checking/prolonging.py", T + "checking/test_prolonging.py"): {
        "longer plays may score more": ("and 0 < b.score <= a.score + 1e-6]", "and 0 < b.score]"),
        "a role holds back in every turn": ("and turn.turn == first.setdefault(play, turn.turn)", ""),
        "what a position returns is its last": ("first_returns[row.trajectory].setdefault(whose, float(value))", "first_returns[row.trajectory][whose] = float(value)"),
        "a return that grows too is proposed": ("other is not None and _growth(subject, kinds, pairs, other) is None", "other is not None"),
        "a player that cannot go on is the game's fault": ("continue\n    return kinds", "raise\n    return kinds"),
    },
    (M + "viewing/summary.py", T + "viewing/test_report.py"): {
        "aborted plays have a score": (' if row["status"] != "aborted")', ")"),
    },
    (M + "viewing/runs.py", T + "viewing/test_viewing.py"): {
        "what was not chosen is paid": ('            if response["chosen"]:\n                pay', "            if True:\n                pay"),
    },
    ("marl_llm/cli/check.py", T + "checking/test_prolonging.py"): {
        "a config's recipe is not read": ("{} if plan is None else {\"recipe\": plan.recipe}", "{}"),
    },
    (M + "reporting/formats.py", T + "viewing/test_report.py"): {
        "a minute is sixty seconds": ("if seconds < 60:", "if seconds <= 60:"),
    },
    (M + "viewing/seat.py", T + "viewing/test_seat.py"): {
        "a late answer is heard": ('parsed["number"] != self._number:', 'parsed["number"] > self._number:'),
    },
    (M + "evaluation/transcripts.py", T + "evaluation/test_transcripts.py"): {
        "the first candidate is shown as played": ('"chosen": bool(row.chosen == k)', '"chosen": bool(k == 0)'),
        "the picture stands behind the first role": ("if number == len(rows) - 1:", "if number == 0:"),
        "half a success is one": ('"success" if ended.outcome >= 1.0', '"success" if ended.outcome > 0.0'),
    },
    (M + "evaluation/outcomes.py", T + "evaluation/test_outcomes.py"): {
        "a comparison forgets the clusters": ("groups.setdefault(alike[task] or task, [])", "groups.setdefault(task, [])"),
    },
    (M + "evaluation/at_k.py", T + "evaluation/test_at_k.py"): {
        "one draw is enough": ("for _ in range(draws)]", "for _ in range(1)]"),
    },
    (M + "runs/evaluate_run.py", T + "evaluation/test_at_k.py"): {
        "a task with too few plays takes all figures along": (" if len(pool) >= size]", "]"),
        "tasks whose plays were all aborted are in nobody's count": ("for outcome in record.outcomes})\n    for", "for outcome in record.played})\n    for"),
    },
    (M + "runs/command.py", OPTIONS): {
        "a value behind a space is a word of its own": ("with_resumed(with_values(sys.argv))", "with_resumed(sys.argv)"),
        "an option without a value takes the next option": ('if named and (not arg.startswith("-") or', "if named and (True or"),
        "a name is a file": ("path if path.endswith('.py') else f'experiments/configs/{path}.py'", "path"),
        "a file may lie in no directory": ("    if not folder.is_dir():", "    if False:"),
    },
    (M + "cli/collect.py", T + "experiments/test_collect.py"): {
        "all runs of a group have the first one's pairs": (" if all(pair in part.get", " if any(pair in part.get"),
        "a step without tokens is looked for": (' if axis == "step" or step in tokens}', "}"),
        "seeds are averaged place by place": ("seed[step] for seed in seeds]", "list(seed.values())[list(seeds[0]).index(step)] for seed in seeds]"),
        "a picture is refused when it is drawn": ("        check_picture(_PICTURE.value)\n", "        pass\n"),
    },
    (M + "runs/figures.py", T + "experiments/test_collect.py"): {
        "all runs of a group have the first one's roles": (" if all(role in of_run for of_run in of_runs)", ""),
    },
    (M + "cli/serve.py", OPTIONS): {
        "a run may have a limit that it does not read": ('("name", "max_prompt", "max_tokens", "thinking")', '("name", "max_prompt", "thinking")'),
    },
    (M + "cli/chat.py", OPTIONS): {"a talk may have a port": ('("port", "key_env"', '("key_env"')},
    (M + "cli/plan.py", OPTIONS): {"this machine may have a mesh": ('idle = ("mesh", "prompt"', 'idle = ("prompt"')},
    (M + "viewing/command.py", OPTIONS): {"options of another way are taken": ("if of != way:", "if False:")},
    (M + "cli/profiling.py", OPTIONS): {
        "a step may have no run": ("        if not asked.run:\n", "        if False:\n"),
        "a file is opened after all plays": ('        check_writable("output", asked.output)\n', ""),
    },
    (M + "models/huggingface.py", T + "experiments/test_gguf_run.py"): {
        "a GGUF file's tokenizer is looked for beside it": ("directory if like is None else checkpoint_directory(like)", "pathlib.Path(like or directory)"),
    },
    (M + "checking/report.py", T + "checking/test_check.py"): {
        "a check is told as its own companion": ("{len(same) - 1} more", "{len(same)} more"),
        "laws that hold are among the broken": ("{finding.law for finding in failing}", "{finding.law for finding in verdicts}"),
    },
    (M + "checking/honesty.py", T + "checking/test_check.py"): {
        "nothing is planted in tuples": ("if type(value) in (list, tuple) else value", "if type(value) is list else value"),
        "one value of all tasks is compared": ("if len(distinct) < 2:", "if len(distinct) < 1:"),
        "an open value of a task is a secret": ("if value not in may_be_read[episode.task.number]:", "if True:"),
        "open values in lists are secrets": ("yield from _open_values(item)", "continue"),
        "an answer in one place is not told": ("if leak is None and copies:", "if False:"),
    },
    (M + "checking/verdicts.py", T + "checking/test_check.py"): {
        "a text without tokens has none": ("-(-len(call.text) // CHARACTERS_PER_TOKEN)", "0"),
    },
    (M + "checking/junk.py", T + "checking/test_check.py"): {
        "a copied prompt is longer than the budget": ("turn.role.prompt_ids(turn.fields)[: turn.role.max_tokens]", "turn.role.prompt_ids(turn.fields)"),
    },
    (M + "reporting/progress.py", T + "reporting/test_progress.py"): {
        "the first step is in the rate": ("            self._times.clear()\n", ""),
    },
    (M + "reporting/trackers.py", T + "reporting/test_metrics_writer.py"): {
        "every run is its own group": ('"group": workdir.parent.name', '"group": workdir.name'),
    },
    (M + "viewing/terminal.py", T + "viewing/test_viewing.py"): {
        "tools stand before their call": ("in tools.get(number + 1, ())", "in tools.get(number, ())"),
        "good form is called malformed": ('"" if response["well_formed"] else ", malformed"', '", malformed" if response["well_formed"] else ""'),
    },
    (M + "viewing/onefile.py", T + "viewing/test_viewing.py"): {
        "the first plays are kept": ("run.rows()[-most:]", "run.rows()[:most]"),
    },
    (M + "viewing/command.py", T + "viewing/test_viewing.py"): {
        "the search is ignored in the terminal": ("list_text(run, asked.search)", "list_text(run)"),
    },
    (M + "models/rotary.py", T + "models/test_decoder.py"): {
        "yarn rounds what is not to be rounded": ("    if s.truncate:\n", "    if not s.truncate:\n"),
    },
}  # fmt: skip

"""Faults in steps, policies, learners, figures of rollouts."""

R, T = "marl_llm/training/", "tests/training/"

FAULTS = {
    (R + "train_state.py", T + "test_learner.py " + T + "test_update.py"): {
        "the optimizer's memory is made anew at each step": (
            ".update(gradient, state.opt_state, state.params, finite=finite)",
            ".update(gradient, optimizer.init(state.params), state.params, finite=finite)",
        ),
        "a step climbs the loss": ("lambda u: learning_rate * u", "lambda u: -learning_rate * u"),
        "gradients are not clipped": ("scale = jnp.minimum(1.0, most / optax.tree.norm(gradient))", "scale = 1.0"),
        "small gradients are made long": ("scale = jnp.minimum(1.0, most / ", "scale = jnp.minimum(9.9, most / "),
        "the step is not that of corrected moments": ("square = optax.tree.bias_correction(state.nu, b2, state.count)", "square = state.nu"),
        "moments take what is not finite": ("lambda n, o: jnp.where(finite, n, o), new, old", "lambda n, o: n, new, old"),
        "a gradient that is not finite steps": ("lambda new, old: jnp.where(finite, new, old)", "lambda new, old: new"),
        "the rate does not warm up": ("up = jnp.minimum(1.0, (step + 1) / max(warmup, 1))", "up = 1.0"),
    },
    (R + "train_state.py", T + "test_optimizers.py"): {
        "Muon steps norms and embeddings": ('names[-1] == "output" or any(map(_undecayed, names))', 'names[-1] == "output"'),
        "each head is orthogonalised for itself": ("MuonDimensionNumbers(-3, (-2, -1))", "MuonDimensionNumbers(-3, -1)"),
        "Adafactor's steps have no bound": (", optax.clip_by_block_rms(1.0)))", "))"),
        "the rate never cools down": ("1 - (1 - done) / cooldown)", "0.0 * done)"),
    },
    (R + "replay.py", T + "test_replay.py"): {
        "common successes are kept": ("if 0 < share <= RARE]", "if 0 < share]"),
        "a task that is tied is kept": ("if 0 < share <= RARE]", "if share <= RARE]"),
        "a task with signal makes room": ("if not share]", "if share]"),
        "tied tasks stay beside what replaces them": ("tied[: len(chosen)], chosen) if chosen", "[], chosen) if chosen"),
        "a task is replayed beside its fresh play": ("usable = [task for task in before if task.number not in shares]", "usable = list(before)"),
        "an older play of a task with signal stays": ("for task in before if not shares.get(task.number)]", "for task in before]"),
        "replays are not counted": ("times=task.times + (task in chosen)", "times=task.times"),
        "the oldest come first": ("(task.times, -task.step, task.number))[: len(tied)]", "(task.times, task.step, task.number))[: len(tied)]"),
        "the newest come first however often replayed": ("(task.times, -task.step, task.number))[: len(tied)]", "(-task.step, task.number))[: len(tied)]"),
        "a task is replayed for ever": ("task.times < TIMES and ", ""),
        "a task never grows old": (" and step - task.step <= AGE", ""),
        "there is no bound on tasks": ("task.number))[:limit]", "task.number))"),
        "there is no bound on bytes": (" if total <= MOST_BYTES", ""),
        "replayed groups have numbers of fresh ones": (
            "parts.append(task.columns | {name: task.columns[name] + following[name] for name in RENUMBERED})", "parts.append(task.columns)"
        ),
        "a step that is played again sees its own tasks": ("self.kept.get(batch.step, self.kept[max(self.kept)] if self.kept else ())",
                                                           "self.kept[max(self.kept)] if self.kept else ()"),
        "samples pass as the present policy's": ("table=Samples(**columns), version=version,", "table=Samples(**columns), version=0 * version + batch.step,"),
        "a checkpoint's indices may lie outside": ("if not does_fit or", "if"),
        "a checkpoint's indices may be negative": ("or np.any(places < 0) ", ""),
        "a checkpoint's responses may end outside": (" or np.any(tokens.response_at + tokens.size > len(tokens.log_probs)):", ":"),
        "a checkpoint's arrays may be of any kind": ("if x.dtype != dtype or", "if"),
        "a checkpoint's arrays may have any shape": ('or x.ndim != (2 if name == "kept_ids" else 1):', "or False:"),
        "a checkpoint's pay may be infinite": ("if name in FLOATS and not", "if False and not"),
        "a checkpoint's log-probs may be positive": ('if name == "log_probs" and', "if False and"),
        "a checkpoint's budgets may be nothing": ('if name == "budget" and', "if False and"),
        "a checkpoint's samples may be another task's": ('if np.any(table.instance != number):', "if False:"),
        "a checkpoint's plays may have any numbers": ("does_fit &= all(", "does_fit &= True or all("),
        "a checkpoint may hold a task twice": ("if len({task.number for task in tasks}) < len(tasks) or any(", "if any("),
        "a checkpoint may hold a task of a later step": (" or any(task.step >= step for task in tasks):", ":"),
        "a checkpoint's tokens may be any number": ("check_ids(task.tokens, task.table, self._vocabularies)", "pass"),
        "a checkpoint's roles may be negative": ("(agents < 0) | ", ""),
        "a checkpoint's roles may be too many": (" | (agents >= len(self._vocabularies))", ""),
        "a checkpoint's columns may have any length": ("does_fit = alike == {len(tokens)} and np", "does_fit = np"),
        "advantages of replayed samples are written to fresh plays": ("else advantages[: len(samples)])", "else advantages)"),
        "a sampler needs no correction": ("(recipe.rollout_correction == \"none\", \"samples", "(False, \"samples"),
    },
    ("marl_llm/workflows/samples.py", T + "test_untrained_roles.py"): {
        "the pay of untrained roles is lost in hosted play": ("return trained + [", "return trained or ["),
    },
    (R + "batch.py", T + "test_untrained_roles.py"): {
        "the pay of untrained roles is lost in compiled play": ("        played=spread(rows.where),\n", ""),
        "a record may hold any token": ("if max(x.max() for x in arrays) < sizes.min():", "if True:"),
    },
    ("marl_llm/algorithms/paid.py", T + "test_untrained_roles.py"): {
        "returns are made of what trains alone": ("played = _played(samples, where)", "played = where"),
    },
    ("marl_llm/algorithms/apply.py", T + "test_untrained_roles.py"): {
        "advantages are made of what trains alone": ("    played = _played(samples, where)\n    if recipe.returns", "    played = where\n    if recipe.returns"),
    },
    (R + "team.py", T + "test_untrained_roles.py"): {
        "recorded roles train though they should not": ("where=table.where & trains, played", "played"),
    },
    (R + "league.py", T + "test_league.py::test_a_state_that_no_league_leaves_is_refused_by_name"): {
        "a checkpoint's league may be empty": ("if not played <= len(selves) <=", "if not 0 <= len(selves) <="),
        "a checkpoint's league may hold too many": ("<= len(selves) <= self.options.keep or", "<= len(selves) or"),
        "a checkpoint's selves come in any order": ("or steps != sorted(set(steps)):", "or False:"),
        "a checkpoint's score may be above its plays": ('f"{where}.score", 0, plays)', 'f"{where}.score", 0)'),
        "a checkpoint's game may lose its rating": ('if (state["rating"] is None) != (self.rating is None):', "if False:"),
    },
    (R + "team.py", T + "test_learner.py::test_betas_are_kept_in_a_checkpoint_and_an_older_one_had_one_for_all"): {
        "a checkpoint's KL coefficient may be negative": ('check_number(x, f"kl_coef.{name}", 0)', 'check_number(x, f"kl_coef.{name}")'),
        "a checkpoint's models need no KL coefficient": ('check_keys(beta, "kl_coef", self.kl_coef) if isinstance', "beta if isinstance"),
        "a checkpoint's versions may be of any models": ('check_keys(state["versions"], "versions", self.learners)', 'state["versions"]'),
        "a checkpoint's running means may be too few": ("if running.shape != self.running.shape:", "if False:"),
    },
    (R + "refills.py", T + "test_refills.py"): {
        "a checkpoint's refills may be negative": ('check_count(extra, f"refilled.{step}")', "int(extra)"),
    },
    (R + "oversample.py", T + "test_oversample.py::test_a_run_that_was_stopped_plays_what_was_late_from_its_start"): {
        "a checkpoint's late tasks may be any values": ('[check_count(place, f"behind.{step}") for place in places]', "list(places)"),
        "a checkpoint's late tasks may be there twice": ("if len(set(places)) < len(places)]", "if False]"),
    },
    ("marl_llm/runs/building.py", T + "test_checkpoints.py::test_counts_of_a_run_that_are_none_are_refused_in_one_line_that_names_the_file"): {
        "a checkpoint's counts of a run may be negative": ("check_number(state[key], key, 0)", "check_number(state[key], key)"),
        "a checkpoint's silent steps may be any values": ('check_count(steps, f"silent.{name}")', "pass"),
        "a checkpoint's decay may be any value": ('check_count(state.get("decay_steps", 0), "decay_steps")', "pass"),
    },
    (R + "batch.py", T + "test_replay.py"): {
        "a checkpoint's kept tokens may be any number": ("(sample.prompt, sample.response, sample.kept_ids)", "(sample.prompt, sample.response)"),
        "a kept token alone is not looked for": ("(tokens.ids, tokens.kept_ids) if", "(tokens.ids,) if"),
    },
    (R + "packing.py", T + "test_replay.py"): {
        "samples have the log-probs of their neighbours": (
            "TokenSample(prompt, responses[place], log_probs[place], name", "TokenSample(prompt, responses[place], log_probs[: self.size[i]], name"
        ),
    },
    (R + "hosted.py", T + "test_replay.py"): {
        "a resumed run has nothing to replay": ("(self._coaching, self._queue, self._replay)):\n            part.restore", "(self._coaching, self._queue)):\n            part.restore"),
    },
    (R + "privileged.py", T + "test_privileged.py"): {
        "a context stands behind its message": ("end = len(prompt) - tail", "end = len(prompt)"),
        "a context need not end as its template does": ("if tuple(prompt[end:]) != close or", "if"),
    },
    (R + "outside_teachers.py", T + "test_privileged.py"): {
        "a teacher reads what its student reads": ("prompt if privileged[number] is None else", "prompt if True else"),
    },
    (R + "centralised.py", T + "test_centralised.py"): {
        "a critic reads what is said at the same time": ("*((prompt_ids, b\"\") for prompt_ids in together)", "*((prompt_ids, prompt_ids) for prompt_ids in together)"),
        "a critic reads what is said later": ("for j in play if time[j] < time[i]]", "for j in play if time[j] <= time[i]]"),
        "a critic reads its own role alone": (
            "before = [spoken(j) for j in play if time[j] < time[i]]",
            "before = [spoken(j) for j in play if time[j] < time[i] and table.agent[j] == table.agent[i]]",
        ),
        "a conversation is read twice": ("[text for text in texts if not prompt_ids.startswith(text)] + [", "texts + ["),
        "the oldest of a history is kept": ("history[len(history) - kept[-1] :]", "history[: kept[-1]]"),
        "the drawn response decides what is cut": ("- int(table.budget[i])", "- int(tokens.size[i])"),
    },
    (R + "centralised.py", T + "test_centralised_play.py"): {
        "hosted play reads its last event alone": (".union(*(ancestors.get(parent, ()) for parent in event.parents))", ""),
        "hosted play reads no prompts of the same time": (" if e.parents == call.parents]", " if False]"),
    },
    (R + "critic.py", T + "test_centralised.py"): {
        "a critic is never centralised": ("return tokens.joint if options.centralised else tokens", "return tokens"),
    },
    ("marl_llm/runs/contradictions.py", "tests/runs/test_own_options.py"): {
        "options that no optimizer reads stand": ("(key in changed and idle and len(idle) == len(of_models),", "(False,"),
        "options that a model's optimizer does not read stand": ("(own, f\"models.{[*own, ''][0]}.optimizer", "(False, f\"models.{[*own, ''][0]}.optimizer"),
    },
    (R + "steps.py", T + "test_packed_update.py " + T + "test_update.py"): {
        "samples left out do not count": ("jnp.maximum(n * denominator_scale", "jnp.maximum(n + 0 * denominator_scale"),
        "the gap is the last micro-batch's": ("gap = jnp.maximum(kept.gap, sums.gap)", "gap = sums.gap"),
        "each device divides by its own count": (
            "total, n, parts, gradient = summed((sums.total, sums.count, sums.parts, gradient), axis)",
            "(total, parts, gradient), n = summed((sums.total, sums.parts, gradient), axis), sums.count",
        ),
    },
    (R + "digests.py", T + "test_checkpoints.py"): {
        "a damaged file is taken": ("if digest != known[name]:", "if False:"),
        "the digests' own damage is not seen": ("if head != (_HEAD + hashlib.sha256(lines).hexdigest()).encode():", "if False:"),
        "what was not written belongs to it": ("if extra := sorted(files - set(known)):", "if extra := []:"),
    },
    ("marl_llm/runs/trust.py", "tests/experiments/test_trust.py"): {
        "what others may write is one's own": ("not status.st_mode & others for status", "True for status"),
        "a claim that is named frees the others": ("if given.get(key) != value}", "if not given}"),
        "the game's files are not claimed": ('claims |= {f"game/{file}": digest', 'claims |= {} and {f"game/{file}": digest'),
        "names of variables are no claims": ('OUTSIDE = ("url", "key_env",', 'OUTSIDE = ("url",'),
    },
    (R + "train_state.py", T + "test_policy_precision.py"): {
        "norms are decayed": ('endswith(("norm", "bias", "embedding"))', 'endswith(("bias", "embedding"))'),
        "nothing is decayed": ("u + weight_decay * p if decays else u", "u"),
    },
    (R + "learner.py", T + "test_learner.py"): {
        "the KL's reference is the present policy": (
            "self.trained, self.reference, tokens", "self.trained, self.reference and jax.tree.map(jnp.copy, self.params), tokens"
        ),
        "the supervised warm-up's optimizer memory is carried over": (
            "        self.release()  # old moments go before the new ones come\n        policy = self._policy(trained) if own is None else self._placed(TrainState(own, self.options.optimizer.init(own)))",
            "        policy = self._policy(trained) if own is None else self.policy",
        ),
        "the KL that is charged is to the present policy": ("self._token_kl(self.reference, tokens", "self._token_kl(self.params, tokens"),
    },
    (R + "team.py", T + "test_team.py"): {
        "a silent model's zero steers its beta": ('if scored and "kl" in metrics:', 'if "kl" in metrics:', T + "test_learner.py"),
        "all samples are charged with one beta": ("kl=table.kl * (betas / np.float32(recipe.kl_coef))", "kl=table.kl", T + "test_learner.py"),
        "the models' rows are exchanged": ("self.assignment.roles[role] == name for role in self.roles", "self.assignment.roles[role] != name for role in self.roles"),
    },
    (R + "team.py", "tests/evaluation/test_seats.py"): {
        "the start is the trained model": ("self._in_play(name, learner.begun)", "self._in_play(name, learner.policy.params)"),
        "a seat's model is the role's own": ("if seat.kind != \"run\" and seat.model else self.assignment.roles[role]", "if False else self.assignment.roles[role]"),
    },
    (R + "served.py", T + "test_copies.py"): {
        "one adapted model of a CPU is merged": ('(len(names) > 1 or platform == "cpu")', "len(names) > 1"),
    },
    (R + "hosted.py", T + "test_copies.py"): {
        "other seats are merged": ("learner.attached(trained) if name in self._together else", "learner.attached(trained) if name in self._together and trained is learner.policy.params else"),
    },
    ("marl_llm/runs/building.py", "tests/experiments/test_config.py"): {
        "a team of checkpoints takes all devices": ("count = 1 if on_one else positions", "count = positions"),
        "only the common model's checkpoint counts": ("sections = (config.model, *config.models.values())", "sections = (config.model,)"),
    },
    ("marl_llm/training/outside_teachers.py", "tests/training/test_outside_teachers.py"): {
        "an outside teacher's words lie beside other tokens": ("first = int(tokens.response_at[rows.sample[b, n]])", "first = int(tokens.prompt_at[rows.sample[b, n]])"),
        "an outside teacher is asked about everybody": ("np.flatnonzero(counts & np.isin(table.agent, agents)", "np.flatnonzero(counts"),
        "an outside teacher is asked about samples that do not count": ("np.flatnonzero(counts & np.isin(", "np.flatnonzero(np.isin("),
    },
    (R + "outside_teachers.py", T + "test_span_teachers.py"): {
        "spans of neighbours in a row are one": ("spans[spans > 0] += start", "spans[spans > 0] += 0"),
        "what a teacher cannot read is a way out": ("columns.log_probs[unread] = log_probs[unread] - mean_gap", "columns.log_probs[unread] = log_probs[unread]"),
        "tokens level what is unread, not gradients": ("gaps_read.append(span_gaps[spans[spans > 0]])", "gaps_read.append(span_gaps[1:])"),
    },
    (R + "span_teachers.py", T + "test_span_teachers.py"): {
        "a span has its teacher's mean": ("sums / np.maximum(np.bincount(reading.spans", "sums / np.maximum(np.bincount(reading.id_spans"),
        "a teacher reads another's template": ("if is_chat and messages", "if False and messages"),
        "calls of tools are written as answers": (' and not any(message.role == "tool" for message in messages)', ""),
    },
    (R + "distillation.py", T + "test_span_teachers.py"): {
        "what a teacher cannot read is counted": ("agents = jnp.where(unread, 0, agents)", "agents = agents"),
    },
    ("marl_llm/tools/teacher_endpoint.py", "tests/tools/test_teacher_endpoint.py"): {
        "a refused teacher is asked again": ("error.kind in FINAL", "False"),
        "a teacher is asked once": ("ATTEMPTS = 4", "ATTEMPTS = 1"),
        "a teacher speaks of another token": (" or str(token) not in entry:", ":"),
        "a teacher may have another vocabulary": (" and int(token) < self.vocab_size)", ")"),
        "all others have nothing": ("rest = 1 - np.exp(", "rest = 0 * np.exp("),
        "a token may be among the likeliest twice": ("str(int(token)) == token and ", ""),
    },
    ("marl_llm/tools/_chat_backends.py", "tests/tools/test_teacher_endpoint.py"): {
        "a teacher's log-probs may be positive": ("not FLOOR < value <= ROUNDING", "not FLOOR < value"),
        "minus infinity is a log-prob": ("not FLOOR < value <= ROUNDING", "not value <= ROUNDING"),
        "a teacher's key is told": ("answer.body.replace(key.encode(), HIDDEN.encode())", "answer.body"),
    },
    ("marl_llm/runs/train_run.py", "tests/runs/test_outside_teacher_runs.py"): {
        "a teacher that dies takes a step with it": ("        run.keep()\n", ""),
    },
    ("marl_llm/runs/teachers.py", "tests/runs/test_configured_teachers.py"): {
        "each role reads its teacher again": ("sources.setdefault(source.identity, source)", "source"),
        "a run goes on with its teacher's newest checkpoint": (" if recorded is None else recorded", ""),
        "a teacher's adapters are left out": ("return merge(frozen_base(shape, spec.params, mesh), adapters, spec.lora)", "return spec.params"),
        "a teacher's tokens are not compared": ("(difference := vocabulary_difference(source.tokenizer, own))", '(difference := "")'),
        "a teacher's run is trusted": ("read_config(directory, trust.asked())", "read_config(directory, True)"),
    },
    ("marl_llm/runs/measuring.py", "tests/experiments/test_signal_watch.py"): {
        "equal rewards end a run that has a teacher": (" and not any(recipe.distill_coef for recipe in recipes)", ""),
        "a resumed run forgets its rewards": ("{key: state[key] for key in UNPAID if key in state}, False", "dict(UNPAID), False"),
    },
    ("marl_llm/runs/building.py", "tests/experiments/test_signal_watch.py"): {
        "rewards of a stranger's checkpoint are taken over": ('if "pays" in state:', "if False:"),
    },
    ("marl_llm/runs/continuing.py", "tests/experiments/test_train.py"): {
        "a run that goes on keeps its old evaluation": ("(workdir / name).unlink(missing_ok=True)", "pass"),
        "an evaluation of another step is the run's": ('return results if results.get("steps") == config.steps else None', "return results or None"),
    },
    ("marl_llm/runs/loop.py", "tests/experiments/test_train.py"): {
        "a checkpoint has no rewards": (' | watches.signal.seen\n', '\n'),
    },
    (R + "learner.py", T + "test_copies.py"): {
        "a base that lies right is copied all the same": ("        return placed\n", "        pass\n"),
    },
    (R + "scoring.py", T + "test_packed_update.py"): {
        "the head computes padding": ('"where": response_where(rows)', '"where": None'),
    },
    (R + "mesh.py", T + "test_packed_update.py"): {
        "an unknown option of the compiler stands": ("        return {}\n    return {option: value}", "        pass\n    return {option: value}"),
        "small models are compiled otherwise": ('== "cpu" and is_large(config, "cpu")', '== "cpu"'),
    },
    (R + "rollouts.py", T + "test_rollouts_and_sft.py"): {
        "aborted episodes count in success": ("share(rollout.episodes.outcome >= 1.0)", "jnp.mean(rollout.episodes.outcome >= 1.0)"),
        "tokens after the end have entropy": ("token_where = table.responses.where & where[..., None]", "token_where = jnp.ones_like(table.responses.where) & where[..., None]"),
    },
    (R + "hosted.py", T + "test_served.py"): {
        "the engine shares layers as the update does": ("serving_mesh(own_mesh(mesh), self._options.tensor)", "own_mesh(mesh)"),
    },
    (R + "mesh.py", T + "test_served.py"): {
        "devices that share a copy lie far apart": ("make_mesh(mesh.shape[\"data\"], mesh.shape[\"fsdp\"] // tensor, tensor, devices=mesh.devices)", "make_mesh(mesh.shape[\"data\"], mesh.shape[\"fsdp\"] // tensor, tensor, devices=mesh.devices.T)"),
        "a copy is split twice": ("    if mesh.shape[\"tensor\"] != 1:\n", "    if False:\n"),
        "a copy's devices stay along fsdp": ("make_mesh(mesh.shape[\"data\"], mesh.shape[\"fsdp\"] // tensor, tensor, devices=mesh.devices)", "mesh"),
    },
    ("marl_llm/models/serving.py", "tests/experiments/test_plan.py"): {
        "a copy with a split of its own is whole in between": ("with within(TRAIN):", "with within(SAMPLE):"),
    },
    ("marl_llm/planning/program_costs.py", "tests/experiments/test_program_costs.py"): {
        "every loop counts by ones": ("math.ceil(numbers[0] / self._step(loop, place[0]) if place else numbers[0])", "numbers[0]"),
        "a loop keeps what it changes": ("if self._origin(lines, name) == place}", "if True}"),
        "what a loop inside keeps is not followed": ('if source.opcode == "while" and place', 'if source.opcode == "call" and place'),
        "a loop inside keeps all that it carries": ('and place in self._kept(source.called["body"][0]):', "and place >= 0:"),
        "what is kept is moved out in the outermost loop alone": ("{place for place, name in enumerate(carried) if name in moved}", "set()"),
        "what is kept stays on the chip": ("results=tuple(dataclasses.replace(r, main=True)", "results=tuple(dataclasses.replace(r, main=r.main)"),
        "a known kernel's operands count whole": ("self.known and self.known in _source(op))", "False)"),
    },
    ("marl_llm/planning/engine_programs.py", "tests/experiments/test_plan.py"): {
        "a first block of pages is counted twice": ("(blocks[i % len(blocks)] - 1) * loop.read", "blocks[i % len(blocks)] * loop.read"),
        "kernels fetch in one layer": ("again + layers * programs.fetched", "again + programs.fetched", "tests/experiments/test_program_costs.py"),
        "a GPU's cache is not thought of": ('if platform() != "gpu":', "if True:"),
        "a GPU's pages are a TPU's": ("PAGE.get(platform(), 16)", 'PAGE["tpu"]'),
    },
    ("marl_llm/planning/plan_devices.py", "tests/experiments/test_plan.py"): {
        "a GPU has the memory that it reads in a second": ("device_memory_size: {int(memory)}", "device_memory_size: {int(bandwidth)}"),
        "one GPU is compiled for": ('topology=f"1x1x{count}"', 'topology="1x1x1"'),
        "GPUs are counted though their compiler is there": ("_gpus(name, int(shape)) if compile_ else None", "None"),
        "what a GPU's compiler says is lost": ("except NotImplementedError:", "except (NotImplementedError, RuntimeError):"),
    },
    ("marl_llm/training/roofline.py", "tests/experiments/test_plan.py"): {
        "a device needs adapters whole": ("return Work(flops / tensor, state", "return Work(once * (3 + again) / tensor + flops - once * (3 + again), state"),
        "a prompt's scores are a square": ("seen = prompt * prompt / 2 +", "seen = prompt * prompt +"),
    },
    (R + "sweep.py", T + "test_sweep.py::test_teams_that_differ_are_refused"): {
        "the first team's models begin as all teams' do": ("team._families() == first._families()", "True"),
        "the first team's options are all teams'": ("if why := _unsweepable(team):", "if why := _unsweepable(first):"),
    },
    (R + "train_state.py", T + "test_memory.py"): {
        "a step is made from moments that may not be kept": ("return step(state) if step", "return step(new) if step"),
    },
    ("marl_llm/planning/plans.py", "tests/experiments/test_plan.py"): {
        "a phase's gradient is not counted": ("step = resident + params", "step = resident"),
        "what models begin from is not counted": ('{"start": resident + sizes.sources * whole}', '{"start": resident}'),
        "phases are not asked whether they fit": ('"peak": max(*moments.values(), *out["phases"].values()),', '"peak": max(moments.values()),'),
        "copies are counted as the update splits them": ("shape.parameters * 2 / served", "shape.parameters * 2 / tensor"),
        "a config's mesh is not asked": ("mesh_axes(count, axes_text, (config.mesh.fsdp, config.mesh.tensor))", "mesh_axes(count, axes_text)"),
        "a kernel's scores are not computed again": ("+= roofline.scores(shape, *rows) / tensor if in_kernel else 0", "+= 0"),
        "scores are computed again where no kernel attends": ("roofline.scores(shape, *rows) / tensor if in_kernel else 0", "roofline.scores(shape, *rows) / tensor"),
        "TPUs' multiples are asked of GPUs": ("on_tpus = devices is not None and chip.name not in GPUS", "on_tpus = devices is not None"),
        "what a wider split saves is not counted": ("saved = out[\"beside\"].get(\"serving\", 0) * (1 - served / ways)", "saved = 0.0"),
    },
    ("marl_llm/planning/programs.py", "tests/experiments/test_plan.py"): {
        "an update's kernels are not found": ("any(name in text for name in kernels)", "False"),
    },
}

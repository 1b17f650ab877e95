"""Faults in draws, stops, the sampler and the engine's device programs."""

S, T = "marl_llm/sampling/", "tests/sampling/"

FAULTS = {
    (S + "weights.py", T + "test_adapters.py"): {
        "new adapters take the first model's place": (".at[..., index, :, :]", ".at[..., 0, :, :]"),
        "another base of a lone model is not taken": (" or not self._same_base(next(iter(pending.values()))):", ":"),
        "another layout takes a base's place": ("and served_stacked(self.config, params, self.mesh) != self._layers_stacked", "and False"),
    },
    (S + "engine.py", T + "test_adapters.py"): {
        "schedulers of both layouts share a pool": ("shape_of(c, size, served_stacked(c, next(iter(members.values())), mesh))", "shape_of(c, size)"),
    },
    (S + "engine.py", "tests/training/test_copies.py"): {
        "an engine that is closed keeps its memory": ("            scheduler.release()\n", "            pass\n"),
    },
    (S + "token_sampling.py", T + "test_token_sampling.py " + T + "test_sampler.py"): {
        "the log-prob is the sampler's": ("token, picked - jnp.log(total), ", "token, picked / temperature - jnp.log(mass), "),
        "the temperature multiplies": ("jnp.exp((x - by_row(top)) / by_row(temperature))", "jnp.exp((x - by_row(top)) * by_row(temperature))"),
        "what is left out counts as drawn from": ("jnp.where(keep, logits, -jnp.inf)", "logits"),
        "a greedy row draws among the likeliest": ("jnp.where(greedy, 0.0, uniform)", "uniform"),
        "a threshold is not taken on into the block": ("return at, threshold - jnp.where(at > 0, _pick(cumulative", "return at, threshold - 0 * jnp.where(at > 0, _pick(cumulative"),
        "a vocabulary of several levels is searched from the first up": ("for s in reversed(sums[:-1])", "for s in sums[:-1]"),
        "all blocks of a vocabulary are added up in one product": ("BLOCK, MOST_BLOCKS = 32, 256", "BLOCK, MOST_BLOCKS = 32, 8192"),
        "an accelerator adds up rounded weights": ("weights.dtype)), precision=\"highest\")", "weights.dtype)))"),
        "top-p sees what top-k dropped": ("jax.nn.softmax(jnp.where(keep, z, -jnp.inf), axis=-1)", "jax.nn.softmax(z, axis=-1)"),
        "min-p is absolute": ("settings.min_p[..., None] * jnp.max(p, axis=-1, keepdims=True)", "settings.min_p[..., None]"),
        "all tokens of a tie are kept": ("jnp.any(jnp.sum(tied, axis=-1) > wanted)", "jnp.any(jnp.sum(tied, axis=-1) < 0)"),
        "the entropy is the tempered one": ("p_raw = jnp.exp(raw)", "p_raw = jnp.exp(raw / temperature[..., None])"),
        "a token of probability 0 can be drawn": (
            "jnp.argmax(cumulative > threshold[..., None], axis=-1)", "jnp.argmax(cumulative >= threshold[..., None], axis=-1)"
        ),
    },
    (S + "token_sampling.py", "tests/games/test_hosted.py"): {
        "hosted play picks at random by another key": ("random_pick(identity_key(root, identity, identity.shape[0]), count)", "random_pick(root, count)"),
    },
    (S + "sampler.py", T + "test_sampler.py"): {
        "positions begin one late": ("start[:, None] + step - 1, token.shape)", "start[:, None] + step, token.shape)"),
        "a response sees its next column": ("jnp.arange(max_tokens) < step, (e", "jnp.arange(max_tokens) <= step, (e"),
        "the stop token is left out": ("put(out.where, alive)", "put(out.where, alive & ~ended)"),
        "all steps draw with one key": ("sample_token(logits, fold(keys, step), settings)", "sample_token(logits, fold(keys, 0 * step), settings)"),
        "budgets are one too large": ("(step + 1 < budgets)", "(step < budgets)"),
        "a stopped response counts as cut": ("out.truncated & ~ended", "out.truncated"),
        "log-probs after the end": ("put(out.log_probs, drawn.log_prob * keep)", "put(out.log_probs, drawn.log_prob)"),
        "only the first stop token stops": ("    for i in stop:\n", "    for i in stop[:1]:\n"),
    },
    (S + "stops.py", T + "test_stops.py"): {
        "a string inside another is missed": ("if fail[state] in final:", "if False:"),
        "a stop does not last": ("np.full((1, 256), accept, np.int32)", "np.full((1, 256), 0, np.int32)"),
        "a failed match begins anew": ("fail[child] = go[fail[state], byte]", "fail[child] = 0"),
    },
    (S + "model_runner.py", T + "test_engine.py"): {
        "all requests share a key": (
            "jax.vmap(identity_key, (None, 0, 0))(root, sampling.seeds, sampling.seed_count)",
            "jax.vmap(identity_key, (None, 0, 0))(root, 0 * sampling.seeds, sampling.seed_count)"
        ),
        "a prompt behind pages begins at position 0": ("positions = kept[:, None] + ", "positions = 0 * kept[:, None] + "),
        "new tokens lie at the page's start": ("offset = a.kept % pages[0]", "offset = 0 * a.kept % pages[0]"),
        "a slot goes on after its budget": ("(rows.sampling.count + step + 1 < rows.sampling.budget)", "(rows.sampling.count + step < rows.sampling.budget)"),
        "a stopped slot goes on": ("alive = alive & ~rules.ends[state] & (rows.sampling", "alive = alive & (rows.sampling"),
        "a chunk draws with one key": ("(keys_of_rows, rows.sampling.count + step)", "(keys_of_rows, rows.sampling.count)"),
    },
    (S + "model_runner.py", T + "test_drafting.py"): {
        "a wrong draft is accepted": ("(step + 1 < a.new) & (draft == token)", "(step + 1 < a.new)"),
        "a draft is accepted one column late": ("drafts = jnp.roll(a.tokens.T, -1, axis=0)", "drafts = a.tokens.T"),
        "an accepted run goes on behind the response's end": ("follows = counts & alive & (step", "follows = counts & (step"),
        "the columns of a draft are drawn with one key": (
            "count = a.sampling.count[:, None] + jnp.arange(columns)", "count = a.sampling.count[:, None] + 0 * jnp.arange(columns)"
        ),
        "a run is accepted beyond the budget": ("(a.sampling.count + step + 1 < a.sampling.budget), alive)", "(a.sampling.count + 1 < a.sampling.budget), alive)"),
    },
    (S + "drafting.py", T + "test_drafting.py"): {
        "a draft goes on into the next response": ("tokens = tokens[: ends[0]] if len(ends) else tokens", "tokens = tokens + 0 * len(ends)"),
        "the first of equal matches is quoted": ("return (int(places[-1]), length)", "return (int(places[0]), length)"),
        "refused drafts are not counted": ("known.add(accepted, accepted < length)", "known.add(accepted, 0)"),
        "responses of other tasks are quoted": ("return seed[1] if len(seed) > 1 else NO_TOKEN", "return NO_TOKEN"),
        "rows without a draft are not counted": ("best, promise = 1, GAIN * rows / chunk", "best, promise = 1, GAIN / chunk"),
    },
    (S + "pool.py", T + "test_pages.py"): {
        "a page is given away that has an owner": ("self.unowned.pop(node, None)\n            node.owners", "pass\n            node.owners"),
        "one token of a page is enough": ("n = n if same.all() else int(np.argmin(same))\n                if", "if"),
        "a page given away is still found": ("del node.parent.full[name]", "pass"),
        "a page is free that somebody copies from": ("if twin is node or node.owners > 1:", "if twin is node:"),
        "the page of a twin is lost": ("        self.free.append(node.page)\n        return twin", "        return twin"),
    },
    (S + "sequences.py", T + "test_engine.py " + T + "test_pages.py"): {
        "what a page does not hold yet is read": (
            "_ReadPage(page, more, sequence.cached - more)", "_ReadPage(page, size, sequence.cached - more)"
        ),
        "the page to copy from is another": ("read[at] = sequence.source.page", "pass"),
        "the last tokens are left out": ("if more := sequence.cached % size:", "if (more := sequence.cached % size) < 0:"),
        "another row reads the shared page": ("readers[sequence.part].setdefault(page, []).append(row)", "readers[sequence.part].setdefault(page, []).append(max(row - 1, 0))"),
    },
    (S + "sequences.py", T + "test_windows.py"): {
        "all pages lie at the beginning": ("_ReadPage(node.page, size, number * size)", "_ReadPage(node.page, size, 0)"),
        "a row's last page begins where its tokens end": ("_ReadPage(page, more, sequence.cached - more)", "_ReadPage(page, more, sequence.cached)"),
    },
    (S + "scheduler.py", T + "test_engine.py " + T + "test_pages.py"): {
        "old keys and values outlive new parameters": ("                pool.clear(", "                len(pool.free); int("),
        "who has begun goes on with new parameters": (
            "deque(t for t in self.waiting if t.begun)", "deque(t for t in self.waiting)"
        ),
    },
    (S + "pool.py", T + "test_swap.py"): {
        "pages of two versions are found": ("if not len(tokens) or not node.findable:", "if not len(tokens):"),
        "pages of two versions are kept": ("if len(node.tokens) and node.findable:", "if len(node.tokens):"),
        "a page belongs to the parameters that ended it": ("node.root = node.root or parent.root", "node.root = parent.root"),
    },
    (S + "engine.py", T + "test_callers.py"): {
        "answers are told before the next program runs": ("            scheduler.on_idle = self._flush\n", "            pass\n"),
        "who is handed in when the engine stops is forgotten": ("self._fail(sequence.future for _, sequence in burst if stopped)", "pass"),
        "who stands in line stays there": ("        self._waiting -= n\n        self._fill()\n", "        self._waiting -= n\n"),
    },
    (S + "scheduler.py", T + "test_callers.py"): {
        "prompts of other lengths are programs of their own": ("if self.few and first.size - first.cached <= self.piece:", "if False:"),
        "answers are told once the program's result is there": (
            "        self.on_idle()\n        done = unpacked(np.array(out), gives)", "        done = unpacked(np.array(out), gives)\n        self.on_idle()"
        ),
    },
    (S + "bursts.py", T + "test_bursts.py"): {
        "a full burst waits": ("if len(burst) >= self._full:", "if False:"),
        "a burst ends with the first quiet turn": ("(len(burst) > before or not quiet)", "len(burst) > before"),
        "a burst without an end is not cut": ("if left and (", "if True and ("),
    },
    (S + "model_runner.py", T + "test_transfer.py"): {
        "what the host gave is split as XLA likes": ("    if mesh is None:\n        return given", "    if True:\n        return given"),
    },
    (S + "transfer.py", T + "test_transfer.py"): {
        "the host packs floats by their values": (
            "np.ascontiguousarray(x).view(WORD) if x.dtype == np.float32 else np.asarray(x, WORD)", "np.asarray(x, WORD)"
        ),
        "a program packs floats by their values": ("jax.lax.bitcast_convert_type(x, WORD) if x.dtype == jnp.float32 else x.astype(WORD)", "x.astype(WORD)"),
        "truth values stay numbers": ("else part != 0)", "else part)"),
    },
    (S + "scheduler.py", T + "test_swap.py"): {
        "who decodes keeps its version": ("        for sequence in self.running:\n            sequence.version", "        for sequence in self.prefilling:\n            sequence.version"),
        "a prompt goes on with other parameters": ("for sequence in [t for t in self.prefilling if", "for sequence in [t for t in () if"),
        "a swap forgets the pages of all models": ("        for name in changed:", "        for name in self.names:"),
    },
    (S + "store.py", T + "test_shared_pool.py"): {
        "the younger enters before an older one of another scheduler": (
            "return any(scheduler.starved is not None and scheduler.starved < sequence.number for scheduler in self.schedulers)", "return False"
        ),
        "two models find each other's pages": ("return self._models - models", "return 0"),
    },
    (S + "scheduler.py", T + "test_batch_invariant.py"): {
        "exact play takes over parts of pages": ("math.inf if self.sizes.batch_invariant else self.sizes.reuse)", "self.sizes.reuse)"),
        "exact play computes a last token without its page": ("if self.sizes.batch_invariant:  # whole pages alone", "if False:  # whole pages alone"),
        "an exact request enters without room for its answer": ("(sequence.longest if self.sizes.batch_invariant else len(ids))", "len(ids)"),
    },
}

"""Faults in the decoder, its masks and caches, scoring, adapters."""

M, T = "marl_llm/models/", "tests/models/"

FAULTS = {
    (M + "transformer.py", "tests/experiments/test_this_machine.py"): {
        "products are computed again": ("return checkpoint_name(y, PRODUCT).reshape", "return y.reshape"),
    },
    (M + "log_probs.py", T + "test_log_probs.py"): {
        "the first real token of a left-padded row gets a score": (
            "known = where & jnp.concatenate([jnp.zeros_like(where[:, :1]), where[:, :-1]], axis=1)",
            "known = where & jnp.concatenate([jnp.zeros_like(where[:, :1]), jnp.ones_like(where[:, :-1])], axis=1)",
        ),
        "the temperature is forgotten": ("logits = logits / temperature", "logits = logits * 1"),
        "a token is scored by its own position": (
            "targets = jnp.concatenate([tokens[:, 1:], tokens[:, :1]], axis=1)", "targets = tokens"
        ),
        "the entropy lacks the log of the total": (
            "log_total - jnp.sum(weights * shifted, axis=-1) / total", "-jnp.sum(weights * shifted, axis=-1) / total"
        ),
        "chunks of padding are computed": ("jax.lax.cond(jnp.any(counts), score,", "jax.lax.cond(jnp.any(counts) | True, score,"),
        "a chunk needs all of its targets": ("jax.lax.cond(jnp.any(counts), score,", "jax.lax.cond(jnp.all(counts), score,"),
        "the last chunk is filled up": ("    size = -(-length // along)\n", ""),
        "chunks are joined in the wrong order": (
            "x = jnp.moveaxis(x.reshape(across, along, group, size), 2, 0)", "x = jnp.moveaxis(x[::-1].reshape(across, along, group, size), 2, 0)"
        ),
    },
    (M + "masks.py", T + "test_packed_scoring.py " + T + "test_decoder.py " + T + "test_attention.py"): {
        "branches see each other": ("(key <= query) & ((key < self.prompt) | same)", "(key <= query)"),
        "a token sees the next": ("(key <= query) & (", "(key <= query + 1) & ("),
        "packed trees see each other's responses": ("seen &= (key == 0) | (key == cut(self.branches))", "seen &= key >= 0"),
        "segments see each other": (
            "& (cut(self.segments) == self.segments[:, None, :])", "& (self.segments[:, None, :] >= 0)"
        ),
        "padding counts as a position": (
            "jnp.maximum(jnp.cumsum(where, axis=-1) - 1, 0)", "jnp.broadcast_to(jnp.arange(where.shape[-1]), where.shape)",
            T + "test_packed_scoring.py " + T + "test_log_probs.py " + T + "test_decoder.py",
        ),
    },
    (M + "packed.py", T + "test_packed_scoring.py"): {
        "responses begin one position late": (
            "start = jnp.sum(prompt_where, axis=-1, dtype=jnp.int32)[:, None]",
            "start = jnp.sum(prompt_where, axis=-1, dtype=jnp.int32)[:, None] + 1",
        ),
        "depth runs on over branches": ("depth = jnp.arange(k * r) % r", "depth = jnp.arange(k * r)"),
    },
    (M + "rotary.py", T + "test_parity.py " + T + "test_decoder.py"): {
        "the rotation runs backwards": (
            "[first * cos - second * sin, second * cos + first * sin]", "[first * cos + second * sin, second * cos - first * sin]"
        ),
        "linear scaling is left out": ("(plain / np.float32(s.factor))", "(plain * 1)"),
        "YaRN's ends are exchanged": (
            "plain / s.factor * stretched + plain * (1 - stretched)", "plain / s.factor * (1 - stretched) + plain * stretched"
        ),
        "llama3's ramp is turned around": (
            "(1 - smooth) * plain / s.factor + smooth * plain", "smooth * plain / s.factor + (1 - smooth) * plain"
        ),
        "YaRN's factor on attention is left out": ("if scale == 1.0 else (sin * scale, cos * scale)", "if True else (sin, cos)"),
    },
    (M + "experts.py", T + "test_layouts.py"): {
        "the experts' weights are never renormalised": ("if normalize:", "if False:"),
        "the weights belong to other tokens": ("weights.reshape(-1)[order]", "weights.reshape(-1)"),
    },
    (M + "cache.py", "tests/models/test_decoder.py tests/sampling/test_sampler.py"): {
        "queries are not scaled": ("q = (queries * d**-0.5).reshape(e, k, j, g, d)", "q = queries.reshape(e, k, j, g, d)"),
        "the prompt's padding is seen": (
            "to_prompt = jnp.where(mask.prompt_seen()[:, :, None, None], to_prompt, MASKED)", "to_prompt = to_prompt * 1"
        ),
    },
    (M + "masks.py", T + "test_attention.py " + T + "test_paged_attention.py"): {
        "a window is one token wider": ("return key > query - size", "return key >= query - size"),
        "a window is one token narrower": ("return key > query - size", "return key > query - size + 1"),
        "a kernel's window is one token wider": ("jnp.maximum(own, at - windows + 1)", "jnp.maximum(own, at - windows)"),
        "a kernel's window counts indices": ("jnp.clip(end + at - own - windows + 1, begin, end)", "jnp.clip(at - windows + 1, begin, end)"),
        "a kernel's window reaches no prompt": ("jnp.clip(end + at - own - windows + 1, begin, end)", "end"),
        "a token is seen by one less through a window": ("jnp.where(at + windows <= until(new_run), at + windows, seen)", "jnp.where(at + windows <= until(new_run), at + windows - 1, seen)"),
        "padding leaves a mask without its window's positions": ("self.window._replace(positions=wide(self.window.positions))", "self.window._replace(positions=wide(0 * self.window.positions))"),
    },
    (M + "cache.py", T + "test_decoder.py"): {
        "a window leaves the prompt": ("self.prompt[:, None] & in_window(self.window.positions[..., None], positions, self.window.size)", "self.prompt[:, None] & (self.window.positions[..., None] >= positions)"),
        "a window counts columns from the ring's beginning": ("(self.column - jnp.arange(columns)) % columns", "self.column - jnp.arange(columns)"),
    },
    (M + "pages.py", T + "test_paged_attention.py " + T + "test_decoder.py " + T + "test_page_kernel.py"): {
        "a page's tokens all lie where it begins": ("(first[..., None] + jnp.arange(t))", "(first[..., None] + 0 * jnp.arange(t))"),
        "a window leaves a chunk's columns": ("seen &= in_window(mask.column, columns, window.size)", "pass"),
        "a window leaves a table": ("seen &= in_window(positions[..., None], at, window.size)", "pass"),
        "the stacked queries of a head have one position": ("jnp.tile(window.positions.reshape(parts, b, length), g)", "jnp.repeat(window.positions.reshape(parts, b, length), g, axis=-1)"),
        "the kernel takes layers with a window": ("elif window is None and by_kernel(", "elif by_kernel("),
    },
    (M + "masks.py", T + "test_tree_kernel.py"): {
        "a prompt's tokens are seen by their own run alone": ("jnp.where(response, until(new_run), until(new_segment))", "until(new_run)"),
        "a response is seen by the next one": ("jnp.where(response, until(new_run), until(new_segment))", "until(new_segment)"),
        "a response sees its prompt's first token alone": ("jnp.where(response, end, 0)", "own * response"),
    },
    (M + "tree_kernel_gpu.py", T + "test_tree_kernel.py"): {
        "a gpu's token sees the sequence before its own": ("(key <= query) & (key >= own)", "(key <= query)"),
        "a gpu's response sees one token of its prompt less": ("(key >= begin) & (key < end))", "(key >= begin) & (key < end - 1))"),
        "a block of keys is gone over twice": ("KEYS), mine)  # what", "KEYS), length)  # what"),
        "a block's last prompt is cut": ("jnp.minimum(-(-jnp.where(seen, end, 0).max(axis=-1) // KEYS), mine)", "jnp.minimum(jnp.where(seen, end, 0).max(axis=-1) // KEYS, mine)"),
        "a block's first prompt is left out": ("jnp.where(seen, begin, length).min(axis=-1)", "jnp.where(seen, begin, 0).max(axis=-1)"),
        "the last queries that see a block of keys are left out": (
            "behind = -(-ranges[:, 3].reshape(b, length // KEYS, KEYS).max(axis=-1) // QUERIES)",
            "behind = ranges[:, 3].reshape(b, length // KEYS, KEYS).max(axis=-1) // QUERIES",
        ),
        "own blocks are counted on from the prompt's": ("steps[2] + number - steps[1])", "steps[2] + number)"),
        "a sum keeps its scale when the maximum rises": ("most, old * total + weight.sum", "most, total + weight.sum"),
        "values keep their scale when the maximum rises": ("gathered = old[:, None] * gathered", "gathered = gathered"),
        "of the queries of a key head only the first counts": ("fori_loop(0, q.shape[0] * blocks, step", "fori_loop(0, blocks, step"),
        "the gradient of scores is not centred": ("_dot(up, v[part, :].T) - middle)", "_dot(up, v[part, :].T))"),
        "the gradient of keys is not centred": ("_dot(value, up.T) - mean[head, part][None])", "_dot(value, up.T))"),
        "a plan counts the keys' kernel for one query head": ("OF_KEYS: group * of_keys", "OF_KEYS: of_keys"),
    },
    (M + "attention.py", T + "test_attention.py"): {
        "a tree's responses see all of their prompt": ("see &= in_window(of_queries(own), positions[:, None, None, None, None, :p], size)", "pass"),
        "a tree's responses see all of themselves": ("see_own &= in_window(of_queries(own), own, size)", "pass"),
        "JAX's kernel takes windows": ("mask.branches is None and mask.window is None", "mask.branches is None"),
        "flash takes float32 on a gpu": ("queries.dtype.itemsize != 2:", "queries.dtype.itemsize > 4:"),
        "a gpu's rows have a dense mask": ('return "flash"', 'return "cudnn"'),
    },
    (M + "page_kernel.py", T + "test_page_kernel.py"): {
        "a page's last tokens are seen though they are not there": ("m * column.shape[1] < length for m", "m * column.shape[1] < length + 128 for m"),
        "an entry's pages are read as its first one": ("page[entry * run + m], here", "page[entry * run], here"),
        "of a part's heads the first's are read": ("here, slot = keys.shape[-1], pl.ds(part * heads, heads),", "here, slot = keys.shape[-1], pl.ds(0 * part, heads),"),
        "what is not fetched is what it is": ("near_values[...] = jnp.zeros_like(near_values)", "pass"),
        "the next entry's pages come where this one's lie": ("copies(step + 1, 1 - slot,", "copies(step + 1, slot,"),
        "a row's sum keeps its scale": ("old * before + new * total[mine]", "before + new * total[mine]"),
        "a row's values keep their scale": ("old * sums[head, row, :, LANES:]", "sums[head, row, :, LANES:]"),
        "an entry's weights keep their scale": ("new * gathered[mine]", "gathered[mine]"),
        "what is no row adds to the last": ("@pl.when(row < s)", "@pl.when(row <= s)"),
        "sums begin where the part before ended": ("@pl.when(step == 0)", "@pl.when((step == 0) & (part == 0))"),
        "behind the first list its room is gone through": ("begin + step - passed, entry)", "step, entry)"),
        "a list's rows are filled up with the first": ("constant_values=s)", "constant_values=0)"),
        "an entry's last page is not read": ("(-(-length // t)).sum()", "(length // t).sum()"),
        "queries are not read": ("d * t * itemsize + s * g * d * 4)", "d * t * itemsize)"),
        "rows have room without end": ("bytes_on_chip(s, heads, run * t, itemsize) <= ROOM and", ""),
        "lists have room without end": ("and 4 * entries * (run + group + 1) <= NUMBERS", ""),
        "rows take what they have": ("s * -(-g // 8) * 8 *", "s * g *"),
        "all heads lie on the chip": ("return j // 2 if j % 2 == 0 else j", "return j"),
        "one entry lies on the chip": ("+ 4 * tokens * wide * itemsize)", "+ 2 * tokens * wide * itemsize)"),
    },
    (M + "pages.py", "tests/sampling/test_adapters.py"): {
        "stacked layers read the first one's pages": ("entries._replace(page=entries.page + first)", "entries"),
        "stacked layers read the first one's pages, exactly": ("mask.lists._replace(page=mask.lists.page + first)", "mask.lists"),
        "stacked layers go on behind the first one's beginning": ("mask._replace(pages=mask.pages + first)", "mask"),
        "what is no page of a layer is one of the next": ("jnp.where(target[:, None] < count // layers, target[:, None] + first[..., None], count)", "(target[:, None] + first[..., None])"),
    },
    (M + "pages.py", T + "test_page_kernel.py tests/sampling/test_pages.py"): {
        "the kernel takes all pages": ("if page % LANES or platform()", "if platform()"),
        "the kernel is a GPU's too": ('"splash": ("tpu", "cpu")', '"splash": ("tpu", "cpu", "gpu")'),
        "the chip has room without end": ("return fits(s, heads, page, itemsize, lists)", "return True"),
    },
    (M + "transformer.py", T + "test_page_kernel.py"): {
        "a model's attention is not asked of pages": ("paged_attention(q, k, v, cache, mask, c.attention)", "paged_attention(q, k, v, cache, mask)"),
    },
    (M + "pages.py", T + "test_paged_attention.py tests/sampling/test_engine.py tests/sampling/test_pages.py"): {
        "behind a prefix the future is seen": ("jnp.where(mask.rows.dense()[:, None, None], _product", "jnp.where(True, _product"),
        "a row sees its chunk's next columns": ("seen = columns <= mask.column", "seen = columns >= 0"),
        "old weights keep their scale": ("scale = jnp.exp(sums.top - top)\n", "scale = jnp.exp(0 * (sums.top - top))\n"),
        "the last block of pages is left out": ("(entries.most + size - 1) // size", "jnp.maximum(entries.most // size, 1)"),
    },
    (M + "transformer.py", T + "test_parity.py"): {
        "Gemma's norms multiply with the weight alone": ("1.0 + weight.astype(jnp.float32) if c.unit_offset", "weight.astype(jnp.float32) if c.unit_offset"),
        "Gemma's attention has no norm behind it": ('(RMSNorm(c, name="attention_post_norm")(h) if c.post_norms else h)', '(h + 0 * RMSNorm(c, name="attention_post_norm")(h) if c.post_norms else h)'),
        "Gemma's embeddings are not scaled": ("c.width**0.5, x.dtype) if c.scale_embeddings", "1, x.dtype) if c.scale_embeddings"),
        "Gemma's queries are divided by head_dim's root": ("(c.head_dim / c.query_scalar) ** 0.5", "1.0"),
        "stacked layers all rotate as the first": ("jax.tree.map(lambda x: x[layer.rope], angles)", "jax.tree.map(lambda x: x[0], angles)"),
        "GELU is the exact one": ("approximate=True", "approximate=False"),
    },
    (M + "config_files.py", T + "test_files.py"): {
        "what a file lacks is missing": ("Fields(MISSING.get(kind, {}) | given", "Fields(given"),
        "a window of null is the usual one": (' or key == "sliding_window"}', "}"),
        "a rope that somebody added does not count": ("old if old.raw else new", "new if new.raw else old"),
    },
    (M + "checkpoint_names.py", T + "test_files.py"): {
        "eyes are part of a language model": ("(vision_tower|multi_modal_projector)", "(multi_modal_projector)"),
        "a head keeps the name that it has beside eyes": ('.removeprefix("language_model.")', ""),
    },
    (M + "transformer.py", T + "test_decoder.py"): {
        "bfloat16 scales queries by a rounded number": ("(q.astype(jnp.float32) * (c.head_dim", "(q * (c.head_dim"),
    },
    (M + "rotary.py", T + "test_parity.py"): {
        "Gemma's local layers are stretched": ("rope_theta=config.local_rope_theta, rope_scaling=None)", "rope_theta=config.local_rope_theta)"),
        "layers without positions have them": ('if rope == "none":', 'if rope == "nowhere":'),
        "Gemma's local layers have the global base": ("config, rope_theta=config.local_rope_theta, rope_scaling=None)", "config, rope_scaling=None)"),
    },
    (M + "transformer.py", T + "test_decoder.py " + T + "test_parity.py"): {
        "queries are not normed": ("if c.qk_norm:", "if False:"),
        "the norm forgets epsilon": ("keepdims=True) + c.norm_epsilon)", "keepdims=True))"),
        "the gate is applied to up": ("act(gate) * up, \"batch\"", "act(up) * gate, \"batch\""),
        "the bias is left out": ("y = y + bias.reshape(out).astype(dtype)", "y = y + 0 * bias.reshape(out).astype(dtype)"),
        "the attention's residual is left out": ("x = x + (RMSNorm", "x = (RMSNorm"),
        "the weight's gradient sees other rows": (
            "turned = jax.lax.optimization_barrier(x.reshape(-1, x.shape[-1]).T)", "turned = jax.lax.optimization_barrier(x.reshape(-1, x.shape[-1])[::-1].T)"
        ),
        "a fresh critic does not predict zero": (
            'self.param("bias", nn.initializers.zeros, ())', 'self.param("bias", nn.initializers.ones, ())', T + "test_value_head.py"
        ),
        "layers are stacked in the order of their names": (
            'key=lambda n: int(n.removeprefix("block_")))', "key=str)", T + "test_layouts.py " + T + "test_decoder.py"
        ),
    },
    (M + "gguf.py", T + "test_gguf.py"): {
        "a factor without a type stretches nothing": ("\"linear\" if factor not in (0.0, 1.0) else \"none\")", "\"none\")"),
        "a factor of one stretches": ("if factor not in (0.0, 1.0) else", "if factor != 0.0 else"),
        "the factor's old name is not read": (" or gguf.get(f\"{kind}.rope.scale_linear\", float, 0.0)", ""),
        "a way to scale that is not read passes": ("if name != field and name not in SCALING_READ and", "if False and"),
        "a value that says nothing is refused": (" and value != SCALING_NEUTRAL.get(name):", ":"),
        "a window passes": ("        if gguf.fields.get(field):\n", "        if False:\n"),
        "no window is refused": ("        if gguf.fields.get(field):\n", "        if field in gguf.fields:\n"),
    },
    (M + "lora.py", T + "test_lora.py"): {
        "stacked adapters are saved as they are": ("flat, entries = _flat(unstack_layers(adapters)), {}", "flat, entries = _flat(adapters), {}"),
        "the scale is alpha alone": ("return self.alpha / self.rank", "return self.alpha"),
        "merging forgets the scale": ("delta = lora.scale * (", "delta = ("),
        "a fresh adapter changes the model": (
            "jnp.zeros((lora.rank, features), dtype)", "jnp.ones((lora.rank, features), dtype)"
        ),
    },
}

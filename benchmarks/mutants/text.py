"""Faults in chat formats, tokenizers and streaming."""

X, T = "marl_llm/text/", "tests/text/"

FAULTS = {
    (X + "chat.py", T + "test_chat.py " + T + "test_jinja.py"): {
        "text may hold special tokens": ("return forged.sub(_mark, value)", "return value"),
        "others' tokens are scored": ("mask += [False] * (len(turn.head) + len(turn.opening))", "mask += [True] * (len(turn.head) + len(turn.opening))"),
        "a turn is ended twice": ("return text[mark.end() if wrote else mark.start() :]", "return text[mark.start() :]"),
        "a turn that was cut off is never ended": ("return text[mark.end() if wrote else mark.start() :]", "return text[mark.end() :]"),
        "rewritten replies are scored again": ("dataclasses.replace(turn, fresh=False) for turn", "dataclasses.replace(turn, fresh=True) for turn"),
        "a changed prompt is the same sample": ("sample=conversation.sample + 1)", "sample=conversation.sample)"),
        "the tokenizer's own stops do not stop": ("(*self._ends[:1], *self.tokenizer.stop_ids)", "self._ends[:1]"),
        "the template's end does not stop": ("(*self._ends[:1], *self.tokenizer.stop_ids)", "self.tokenizer.stop_ids"),
        "the stop token is read as text": ("*(turn.reply[:-1] if finished else turn.reply)", "*turn.reply"),
        "a text behind a special token is at the start of all": ("place, before = mark.end(), mark.group()", "place = mark.end()", T + "test_huggingface.py"),
        "thinking that left is no rewriting": ("words = {slot(f\"t{number}\"): reply.thinking or \"\", slot(number): reply.content}", "return True\n        words = {}"),
        "another end is no rewriting": (" and self._ends_alike(text[end:], last.reply)", ""),
        "dropped newlines stay": ("while self._drops_newlines and cut", "while False and cut"),
        "an option that nobody reads passes": ("if name not in self.template.source]:", "if False]:"),
        "private signs of contents are lost": ("match: chr(int(match.group(1), 16)) if match.group(1) else \"\"", "match: \"\""),
    },
    (X + "spans.py", T + "test_spans.py"): {
        "what is no text is in a span": ("spans[unread | np.isin(", "spans[np.isin("),
        "a span around what is no text counts": (" | np.isin(spans, spans[unread & within])", ""),
        "a teacher's first space is text": ("range(1 + joined.startswith(b\" \"))", "range(1)"),
        "texts that differ are compared": ("cuts[(cuts > 0) & (cuts <= agreed)]", "cuts[cuts > 0]"),
        "a response ends with its student's end": ("other = self.end if ends else", "other ="),
    },
    (X + "tool_calls.py", T + "test_tool_calls.py"): {
        "broken calls are lost": ("if call is None)", "if call is ...)"),
        "a call may hold no tag": ("        if text.startswith(_END_CALL, behind):\n            return behind\n", ""),
        "the second call of a line is lost": ("place < len(body) and body[place] == \";\"", "place < len(body) and body[place] == \",\""),
        "a null parameter is a text": (" and value.strip() != \"null\"", ""),
        "the longest call is too long": ("if len(body) > LONGEST:", "if len(body) >= LONGEST:"),
        "arguments without names are read": ("or tree.args:", "or False:"),
    },
    (X + "loading.py", T + "test_jinja.py"): {
        "blanks around a content alter it": ("if message.content.strip() not in text:", "if message.content not in text:"),
        "arguments are never given as text": ("chat = chat if other.call_reader is None else other", "pass"),
        "every trial is a rewriting": ("if not trial.equal and not trial.refused]", "if not trial.equal]"),
        "the history is not passed on": ("Chat(tokenizer, template, options, history, calls)", "Chat(tokenizer, template, options, calls=calls)"),
    },
    (X + "messages.py", T + "test_jinja.py"): {
        "ids of calls begin anew": ("count += len(unanswered)", "count += 0"),
        "an answer names the last call": ("call = unanswered.pop(0) if", "call = unanswered.pop() if"),
    },
    (X + "streaming.py", T + "test_tokenizers.py " + T + "test_huggingface.py"): {
        "half characters are shown": ("certain = text[: len(text) - min(tail, LONGEST_PART)]", "certain = text"),
        "the left neighbour is forgotten": ("return TextStream(context=_whole_end(tokenizer, stream.context + held)), new", "return TextStream(), new"),
        "what is held is never given out": ("    if not last:\n", "    if True:\n"),
        "a cut window shows what was shown": ("shown=len(certain) - len(head))", "shown=len(certain))"),
    },
    (X + "huggingface.py", T + "test_huggingface.py"): {
        "a special spelling becomes a special token": ("ids = self._avoiding(text, self.special_ids, library)", "ids = self._run(self._full, text)\n        return ids"),
        "padding is decoded": (" if i != self.pad_id]", "]"),
        "the generation's stops are left out": ('if name == "generation_config.json" or not stops:', "if not stops:"),
        "an id that contradicts the config passes": ("if stored != content:", "if False:"),
        "padding may be ordinary text": ("        if self._is_ordinary(self.pad_id):", "        if False:"),
    },
    (X + "rendering.py", T + "test_rendering.py"): {
        "a fork shares its parent's child": ("os.register_at_fork(after_in_child=_CHILD_OF_THIS_PROCESS.forget)", ""),
        "a child that somebody ended is not replaced": ("self._process is not None and self._process.poll() is not None", "False"),
    },
    (X + "tokenizer_files.py", T + "test_huggingface.py"): {
        "growth adds up instead of multiplying": ("growth *= _growth", "growth += _growth"),
        "growth is rounded down": ("max(1, -(-len(written[0]) // len(text)))", "max(1, len(written[0]) // len(text))"),
    },
    (X + "template_child.py", T + "test_rendering.py"): {
        "the clock of the wall is told": ("{\"strftime_now\": now.strftime}", "{\"strftime_now\": datetime.datetime.now().strftime}"),
    },
    (X + "huggingface.py", T + "test_huggingface.py " + T + "test_chat.py"): {
        "special tokens strip on the other side": ("text.lstrip() if before in self._strips[1]", "text.lstrip() if before in self._strips[0]"),
    },
    (X + "jinja.py", T + "test_jinja.py " + T + "test_rendering.py"): {
        "a template's own time is not told": ("**options}, self.now)", "**options}, NOW)"),
    },
    (X + "token_bytes.py", "tests/sampling/test_stops.py " + T + "test_huggingface.py " + T + "test_tokenizers.py"): {
        "one byte has no character": ("*range(0xA1, 0xAD), *range(0xAE, 0x100)]", "*range(0xA1, 0xAD), *range(0xAF, 0x100)]"),
    },
    (X + "tokenizer.py", T + "test_tokenizers.py"): {
        "bytes' stops are all specials": ("return tuple(self.special_ids[s] for s in self.stops)", "return tuple(self.special_ids.values())"),
        "a stop need be no special": ("if unknown := [s for s in self.stops if s not in self.specials]:", "if unknown := []:"),
        "the model's own end comes first": ("ends = [self.special_ids[s] for s in stops] + [i for i in [self._model.eos_id()] if i >= 0]", "ends = [i for i in [self._model.eos_id()] if i >= 0] + [self.special_ids[s] for s in stops]"),
        "the model's own end does not stop": (" + [i for i in [self._model.eos_id()] if i >= 0]", ""),
        "a padding piece that is not there is the unknown one": ("        if self._model.id_to_piece(piece_id) != piece:", "        if False:"),
        "an id behind the last is one": ("bad = [i for i in ids if not 0 <= i < vocab_size]", "bad = [i for i in ids if not 0 <= i <= vocab_size]"),
        "a surrogate is counted in bytes": ("near = text[max(0, error.start - 10)", "near = text[max(0, error.start - 9)"),
        "of marks side by side the first counts": ("yield from ((True, [mark]) for mark in run)", "yield True, [next(run)]"),
        "an empty special is one": (" or \"\" in self.specials:", ":"),
        "tokenizers with other stops are equal": ("return self.model_proto, self.pad, self.stops", "return self.model_proto, self.pad"),
    },
    (X + "word_files.py", T + "test_tokenizers.py"): {
        "the last stop ends a text": ("tokenizer.piece(stop_ids[0])", "tokenizer.piece(stop_ids[-1])"),
    },
    (X + "template_child.py", T + "test_rendering.py " + T + "test_jinja.py"): {
        "the filter random is another one each time": ("        random.seed(0)  #", "        #"),
    },
    (X + "tokenizer_files.py", T + "test_tokenizers.py"): {
        "a vocabulary of just the most tokens is refused": ("not 0 <= size <= MAX_VOCABULARY:", "not 0 <= size < MAX_VOCABULARY:"),
        "true is an id": ("if not all(type(i) is int for i in ids):", "if not all(isinstance(i, int) for i in ids):"),
        "an id of ten digits is read": ("len(i) < 10 and", "len(i) <= 10 and"),
        "digits of any script are an id": ("i.isascii() and i.isdigit()", "i.isdigit()"),
        "the id behind the last is read": ("not 0 <= i < MAX_VOCABULARY]", "not 0 <= i <= MAX_VOCABULARY]"),
        "as many steps as may be are too many": ("if len(steps) > MAX_STEPS:", "if len(steps) >= MAX_STEPS:"),
        "a text of just the most growth is refused": ("if growth > MAX_GROWTH:", "if growth >= MAX_GROWTH:"),
        "a decoder has any number of steps": ("for name in (\"normalizer\", \"pre_tokenizer\", \"decoder\"):\n        steps,", "for name in (\"normalizer\", \"pre_tokenizer\"):\n        steps,"),
        "a pattern of just the most characters is refused": ("or len(spelling) > MAX_PATTERN):", "or len(spelling) >= MAX_PATTERN):"),
        "a written text of just the most characters is refused": ("if any(len(insertion) > MAX_PATTERN for", "if any(len(insertion) >= MAX_PATTERN for"),
        "a regex grows as a text": ("return 1 + len(written[0])  #", "return len(written[0])  #"),
        "a longer pattern grows as a short one": ("max(1, -(-len(written[0]) // len(text)))", "max(1, len(written[0]))"),
        "added tokens have any id": ("[token.get(\"id\") for token in added if isinstance(token, dict)]", "[]"),
        "an empty spelling is read from no content": ("token.get(\"content\") if isinstance(token, Mapping) else token", "token[\"content\"] if isinstance(token, Mapping) else token"),
    },
}

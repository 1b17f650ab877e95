"""Faults in chat formats, tokenizers and streaming."""

X, T = "marl_llm/text/", "tests/text/"

FAULTS = {
    (X + "chat.py", T + "test_chat.py"): {
        "text may hold special tokens": ('if trusted or self.specials_in_content == "as_tokens" else ()', ""),
        "others' tokens are scored": ("mask += [False] * (len(turn.head) + len(turn.opening))", "mask += [True] * (len(turn.head) + len(turn.opening))"),
        "a turn is ended twice": ("tail=tail[1:] if last.reply[-1:] == (end,) else tail", "tail=tail"),
        "stripped replies are scored again": ("dataclasses.replace(t, fresh=False) for t", "dataclasses.replace(t, fresh=True) for t"),
        "a changed prompt is the same sample": ("return Conversation((*turns, grown.turns[-1]), talk.sample + 1)", "return Conversation((*turns, grown.turns[-1]), talk.sample)"),
        "broken calls are lost": ("[body for body, call in read if not call]", "[]"),
        "the tokenizer's own stops do not stop": ("(self._special(self.format.end), *self.tokenizer.stop_ids)", "(self._special(self.format.end),)"),
        "the stop token is read as text": ("*(turn.reply[:-1] if finished else turn.reply)", "*turn.reply"),
        "a text behind a special token is at the start of all": ("run, place, before = \"\", mark.end(), mark.group()", "run, place = \"\", mark.end()", T + "test_huggingface.py"),
    },
    (X + "streaming.py", T + "test_tokenizers.py " + T + "test_huggingface.py"): {
        "half characters are shown": ("certain = text[: len(text) - min(tail, LONGEST_PART)]", "certain = text"),
        "the left neighbour is forgotten": ("return TextStream(context=(stream.context + held)[-1:]), new", "return TextStream(), new"),
        "what is held is never given out": ("    if not last:\n", "    if True:\n"),
        "a cut window shows what was shown": ("held=held[cut:], shown=shown - len(head))", "held=held[cut:], shown=shown)"),
    },
    (X + "huggingface.py", T + "test_huggingface.py"): {
        "a special spelling becomes a special token": ("ids = self._avoiding(text, self.special_ids, library)", "ids = self._run(self._full, text)\n        return ids"),
        "padding is decoded": (" if i != self.pad_id]", "]"),
        "the generation's stops are left out": ('if name == "generation_config.json" or not stops:', "if not stops:"),
        "an id that contradicts the config passes": ("if found != content:", "if False:"),
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
    (X + "formats.py", T + "test_chat.py " + T + "test_jinja.py"): {
        "history has no empty think blocks": ("bool(thought or END_THINK in opening)", "bool(thought)"),
    },
    (X + "huggingface.py", T + "test_huggingface.py " + T + "test_chat.py"): {
        "special tokens strip on the other side": ("text.lstrip() if before in self._strips[1]", "text.lstrip() if before in self._strips[0]"),
    },
    (X + "jinja.py", T + "test_jinja.py"): {
        "without a template the history is kept": ("return Chat(tokenizer, forms[0], thinking, history)", "return Chat(tokenizer, forms[0], thinking)"),
    },
    (X + "jinja.py", T + "test_jinja.py " + T + "test_rendering.py"): {
        "a template's own time is not told": ("values | options, self.now, seconds)", "values | options, NOW, seconds)"),
    },
    (X + "token_bytes.py", "tests/sampling/test_stops.py " + T + "test_huggingface.py " + T + "test_tokenizers.py"): {
        "one byte has no character": ("*range(0xA1, 0xAD), *range(0xAE, 0x100)]", "*range(0xA1, 0xAD), *range(0xAF, 0x100)]"),
    },
    (X + "tokenizer.py", T + "test_tokenizers.py"): {
        "tokenizers with other stops are equal": ("return self.model_proto, self.pad, self.stops", "return self.model_proto, self.pad"),
    },
    (X + "word_files.py", T + "test_tokenizers.py"): {
        "the last stop ends a text": ("tokenizer.piece(stop_ids[0])", "tokenizer.piece(stop_ids[-1])"),
    },
    (X + "template_child.py", T + "test_rendering.py " + T + "test_jinja.py"): {
        "the filter random is another one each time": ("        random.seed(0)  #", "        #"),
    },
}

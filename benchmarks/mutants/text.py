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
    },
    (X + "streaming.py", T + "test_tokenizers.py " + T + "test_huggingface.py"): {
        "half characters are shown": ("certain = text[: len(text) - min(tail, LONGEST_PART)]", "certain = text"),
        "the left neighbour is forgotten": ("return TextStream(context=(stream.context + held)[-1:]), new", "return TextStream(), new"),
        "what is held is never given out": ("    if not last:\n", "    if True:\n"),
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
    },
    (X + "template_child.py", T + "test_rendering.py"): {
        "the clock of the wall is told": ("{\"strftime_now\": now.strftime}", "{\"strftime_now\": datetime.datetime.now().strftime}"),
    },
}

"""The commands `chat` and `serve` of a checkpoint: how many replies each has room for."""

import contextlib
import io

import pytest

from marl_llm.cli import chat, serve


@pytest.mark.parametrize(("given", "talked", "served"), [([], 1, 16), (["--max_num_seqs=3"], 3, 3)])
def test_a_talk_has_one_slot_and_a_server_sixteen_unless_the_flag_says_otherwise(monkeypatch, given, talked, served):
    asked = []

    @contextlib.contextmanager
    def answers(path, name, max_prompt, max_tokens, slots, thinking):
        asked.append((path, max_prompt, max_tokens, slots))
        yield {"model": lambda messages, options: None}

    monkeypatch.setattr(serve, "answers_of_checkpoint", answers)
    monkeypatch.setattr(serve, "_serve", lambda server, models: asked.append(list(models)))
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    try:
        for main, flags in ((chat.main, given), (serve.main, [*given, "--port=0"])):
            serve.FLAGS.unparse_flags()
            serve.FLAGS(["command", "--path=a", *flags])
            main([])
    finally:
        for name in ("path", "port", "max_num_seqs"):
            serve.FLAGS[name].unparse()
    assert asked == [("a", None, 1024, talked), ("a", None, 1024, served), ["model"]]

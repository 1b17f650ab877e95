"""Responses that end within a think block are counted, role by role, where the chat format has such blocks."""

import pathlib

import jax
import numpy as np
import pytest
from wordy import Says

from marl_llm.cli.tiny import make
from marl_llm.models import load_pretrained
from marl_llm.sampling import Engine, EngineConfig
from marl_llm.sampling.requests import Completion
from marl_llm.text import CHATML, ByteTokenizer, Chat, JinjaTemplate, load_chat
from marl_llm.workflows import Controller, Role, Task, Workflow, plain, shared
from marl_llm.workflows.metrics import rollout_metrics
from marl_llm.workflows.replay import replay
from marl_llm.workflows.samples import sample_table

TOKENIZER = ByteTokenizer(("<|im_start|>", "<|im_end|>", "<think>", "</think>"), ("<|im_end|>",))
QWEN3 = JinjaTemplate((pathlib.Path(__file__).parents[1] / "data/chat_templates/qwen3.jinja").read_text(encoding="utf-8"))
ON, OFF = {"enable_thinking": True}, {"enable_thinking": False}
OPENS = JinjaTemplate(QWEN3.source.replace("<|im_start|>assistant\\n' }}", "<|im_start|>assistant\\n<think>\\n' }}"))
TASKS = [Task(n, {"question": f"{n}?"}) for n in range(4)]


def team(max_tokens):
    role = Role("a", "{question}", parse=plain("a"), writes={"a": ""}, max_prompt=256, max_tokens=max_tokens)
    return Workflow("w", role, inputs=("question",))


def figures(generator, chat, max_tokens=64):
    workflow = team(max_tokens)
    with Controller(workflow, shared(workflow), generator, chat) as controller:
        rollout = controller.play(TASKS)
    again = replay(rollout.episodes[0], workflow, shared(workflow), chat)
    (before,), (after,) = rollout.episodes[0].trajectories[0].calls, again.trajectories[0].calls
    assert before.unfinished_think == after.unfinished_think
    return rollout_metrics(rollout, sample_table(rollout))


def test_a_checkpoint_whose_prompt_opens_a_think_block_ends_within_it_where_the_budget_is_small(tmp_path):
    path = make(tmp_path / "tiny", vocabulary=512, layers=1, width=32, head_dim=8, feed_forward=48)
    config, params = load_pretrained(path)
    chat = load_chat(path)
    sizes = EngineConfig(max_num_seqs=4, prompt_tokens=256, response_tokens=8, decode_steps=8, admit=4)
    with Engine({"policy": (config, params)}, jax.random.key(1), sizes=sizes) as engine:
        chats = {"on": Chat(chat.tokenizer, OPENS), "off": Chat(chat.tokenizer, QWEN3, OFF)}
        found = {mode: figures(engine, one, 8)["role/a/unfinished_think"] for mode, one in chats.items()}
    assert found == {"on": 1.0, "off": 0.0}


class Thinks(Says):
    """Task n says the n-th answer."""

    async def generate(self, request):
        ids = TOKENIZER.encode(self.answer[request.seed[1]])
        for text, token in TOKENIZER.special_ids.items():  # a policy draws them as one token
            marks = TOKENIZER.encode(text)
            while marks in (windows := [ids[i : i + len(marks)] for i in range(len(ids))]):
                at = windows.index(marks)
                ids[at : at + len(marks)] = [token]
        tokens, ones = np.asarray(ids, np.int32), np.ones(len(ids))
        return Completion(tokens, -ones, -ones, ones, "stop" if ids[-1] in TOKENIZER.stop_ids else "length", 0)


@pytest.mark.parametrize(
    ("template", "options", "answers", "share"),
    [
        (QWEN3, ON, ("<think>one", "<think>one<|im_end|>", "<think>one</think>two", "one"), 0.5),  # whatever ended it
        (QWEN3, ON, ("<think>a</think>b<think>c", "a</think>b", "<think></think>", "a<think>b</think>"), 0.25),
        (QWEN3, OFF, ("one", "two", "<think>three", "four</think>"), 0.25),
        (OPENS, ON, ("one", "two</think>2", "three</think>3<|im_end|>", "four<|im_end|>"), 0.5),
    ],
)
def test_what_opened_and_what_closed_the_last_block_decides(template, options, answers, share):
    found = figures(Thinks(answers), Chat(TOKENIZER, template, options))
    assert found["role/a/unfinished_think"] == share


def test_a_format_without_think_blocks_has_no_such_figure():
    found = figures(Thinks(("<think>one",) * 4), Chat(TOKENIZER, CHATML))
    assert "role/a/truncated" in found
    assert "role/a/unfinished_think" not in found

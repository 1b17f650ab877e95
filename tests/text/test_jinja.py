"""Our formats against the templates that checkpoints ship: the same text and the same ids; a difference is told at loading."""

import dataclasses
import hashlib
import itertools
import json
import warnings

import pytest
from checkpoint_text import template_source, tokenizer_json, tokenizer_of, write_checkpoint
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Library

from marl_llm.text import (
    DEEPSEEK_R1_DISTILL_QWEN,
    QWEN2_5,
    QWEN2_5_BASE,
    QWEN3,
    Chat,
    ChatTemplateWarning,
    JinjaTemplate,
    Message,
    ToolCall,
    differences,
    load_chat,
    load_template,
)  # fmt: skip
from marl_llm.text.formats import spell_text
from marl_llm.text.jinja import PROBES

BOS = {"bos_token": "<｜begin▁of▁sentence｜>"}
OFFICIAL = {
    "qwen2.5": (QWEN2_5, JinjaTemplate(template_source("qwen2.5")), "qwen2.5"),
    "qwen3": (QWEN3, JinjaTemplate(template_source("qwen3")), "qwen3"),
    "deepseek": (DEEPSEEK_R1_DISTILL_QWEN, JinjaTemplate(template_source("deepseek_r1_distill_qwen"), BOS), "deepseek"),
}
MODES = [("qwen2.5", "off"), ("qwen3", "on"), ("qwen3", "off"), ("deepseek", "on")]
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}


def test_the_qwen_templates_are_the_published_ones():
    digest = {name: hashlib.sha256(template_source(name).encode()).hexdigest() for name in ("qwen2.5", "qwen3")}
    assert digest["qwen2.5"] == "cd8e9439f0570856fd70470bf8889ebd8b5d1107207f67a5efb46e342330527f"
    published = hashlib.sha256(template_source("qwen3").removesuffix("\n").encode()).hexdigest()
    assert published == "a55ee1b1660128b7098723e0abcd92caa0788061051c62d51cbe87d9cf1974d8"


@pytest.mark.parametrize(("name", "mode"), MODES)
def test_no_probe_differs_from_the_official_template(name, mode):
    form, template, _ = OFFICIAL[name]
    assert differences(template, form, mode) == []


def test_qwen3_reads_as_expected_in_plain_sight():
    messages = [Message("user", "Hi"), Message("assistant", "<think>\nHm.\n</think>\n\nYes."), Message("user", "Sure?")]
    start, end = "<|im_start|>", "<|im_end|>\n"
    want = f"{start}user\nHi{end}{start}assistant\nYes.{end}{start}user\nSure?{end}{start}assistant\n"
    assert spell_text(QWEN3, messages) == want
    assert spell_text(QWEN3, messages, thinking="off") == want + "<think>\n\n</think>\n\n"
    keep = want.replace("Yes.", "<think>\nHm.\n</think>\n\nYes.")
    assert spell_text(QWEN3, messages, history="keep") == keep
    system = "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\n"
    assert spell_text(QWEN2_5, messages[:1]) == f"{system}<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert spell_text(DEEPSEEK_R1_DISTILL_QWEN, messages) == (
        "<｜begin▁of▁sentence｜><｜User｜>Hi<｜Assistant｜>\n\nYes.<｜end▁of▁sentence｜><｜User｜>Sure?<｜Assistant｜><think>\n"
    )


WORDS = st.one_of(
    st.sampled_from(["", "\n", "\n\nNorth.\n", " ", "u\u0308", "<tool_response>\nx\n</tool_response>"]),
    st.sampled_from(["a</think>b", "<think>\nq\n</think>\n\nz", "<|im_end|>"]),
    st.text(alphabet=st.characters(exclude_categories=("Cs",)), max_size=10),
)


@pytest.mark.parametrize(("name", "mode"), MODES)
@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_any_conversation_is_the_official_templates_text_and_ids(name, mode, data):
    form, template, family = OFFICIAL[name]
    rows = [("user", data.draw(WORDS), None, 0)]
    if data.draw(st.booleans()):
        rows.insert(0, ("system", data.draw(WORDS), None, 0))
    roles = ["user", "assistant", "tool", "system"] if form.tools else ["user", "assistant"]
    thoughts = st.one_of(st.none(), WORDS) if form.thinks else st.none()
    rows += data.draw(st.lists(st.tuples(st.sampled_from(roles), WORDS, thoughts, st.integers(0, 2)), max_size=5))
    messages = []
    for role, text, thought, calls in rows:
        called = tuple(ToolCall("look", {"at": text, "n": i}) for i in range(calls)) if role == "assistant" and form.tools else ()
        messages.append(Message(role, text, thought if role == "assistant" else None, called))
    tools = [TOOL] * data.draw(st.integers(0, 2)) if form.tools else []
    theirs = template.render(messages, tools, **({"enable_thinking": mode == "on"} if form.thinks else {}))
    assert spell_text(form, messages, tools, mode) == theirs
    if form.thinks:
        chat = Chat(tokenizer_of(family), form, mode, "strip", specials_in_content="as_tokens")
    else:
        chat = Chat(tokenizer_of(family), form, mode, specials_in_content="as_tokens")
    ids = Library.from_str(tokenizer_json(family)).encode(theirs, add_special_tokens=False).ids
    assert list(chat.encode_messages(messages, tools)) == ids
    # The safe form differs exactly where content spells a special token.
    texts = [m.content for m in messages] + [m.thinking or "" for m in messages]
    forged = any(s in t for s in chat.tokenizer.special_ids for t in texts)
    if not forged:
        assert list(dataclasses.replace(chat, specials_in_content="as_text").encode_messages(messages, tools)) == ids


@pytest.mark.parametrize(("mode", "tooled"), list(itertools.product(("on", "off"), (False, True))))
def test_a_stripped_conversation_of_sampled_ids_is_the_official_rendering(mode, tooled):
    form, template, family = OFFICIAL["qwen3"]
    tokenizer = tokenizer_of(family)
    chat = Chat(tokenizer, form, mode, history="strip")
    library = Library.from_str(tokenizer_json(family))
    messages = [Message("system", "Be brief."), Message("user", "Where?")]
    talk = chat.start(messages)
    for i, text in enumerate(["North.", "South.\n\nOr not.", "  East."]):
        thought = f"<think>\nStep {i}.\n</think>\n\n" if mode == "on" else ""
        talk = chat.reply(talk, library.encode(f"{thought}{text}<|im_end|>", add_special_tokens=False).ids)
        heard = Message("tool" if tooled and i != 1 else "user", f"Next {i}")
        talk = chat.extend(talk, [heard])
        messages += [Message("assistant", thought + text), heard]
        theirs = template.render(messages, enable_thinking=mode == "on")
        assert list(talk.ids) == library.encode(theirs, add_special_tokens=False).ids


@pytest.mark.parametrize(("family", "source"), [("qwen2.5", "qwen2.5"), ("qwen3", "qwen3"), ("deepseek", "deepseek_r1_distill_qwen")])
@pytest.mark.parametrize("place", ["config", "file"])
def test_a_checkpoint_with_its_official_template_loads_without_a_word(tmp_path, family, source, place):
    write_checkpoint(tmp_path, family, template_source(source) if place == "config" else "wrong, and overruled")
    if place == "file":
        (tmp_path / "chat_template.jinja").write_text(template_source(source), encoding="utf-8")
    with warnings.catch_warnings():
        warnings.simplefilter("error", ChatTemplateWarning)
        chat = load_chat(tmp_path)
    assert chat.format is OFFICIAL[family][0]
    assert chat.stop_ids == chat.tokenizer.stop_ids


def test_a_template_that_differs_is_reported_with_its_difference(tmp_path):
    write_checkpoint(tmp_path, "qwen3", template_source("qwen3").replace("# Tools", "# Instruments"))
    said = r"differs from the format qwen3 on 5 of 13 probes \(tools, (.|\n)*\n-# Instruments.*\n\+# Tools"
    with pytest.warns(ChatTemplateWarning, match=said) as seen:
        chat = load_chat(tmp_path)
    assert chat.format is QWEN3
    assert len(seen) == 1


def test_the_nearest_format_is_taken(tmp_path):
    base = template_source("qwen2.5").replace("You are Qwen, created by Alibaba Cloud. You are", "You are")
    write_checkpoint(tmp_path, "qwen2.5", base)
    assert load_chat(tmp_path).format is QWEN2_5_BASE
    with pytest.warns(ChatTemplateWarning, match="a question"):
        assert load_chat(tmp_path, form=QWEN2_5).format is QWEN2_5


def test_a_template_that_refuses_a_probe_is_reported(tmp_path):
    source = "{%- if messages[0].role == 'system' %}{{ raise_exception('no system prompts here') }}{% endif %}" + template_source("qwen2.5")
    write_checkpoint(tmp_path, "qwen2.5", source)
    with pytest.warns(ChatTemplateWarning, match="no system prompts here"):
        load_chat(tmp_path)


def test_without_a_template_the_special_tokens_decide_and_without_them_nothing_does(tmp_path):
    write_checkpoint(tmp_path, "qwen3")
    assert load_template(tmp_path) is None
    assert load_chat(tmp_path, thinking="off").format is QWEN3
    bare = Library.from_str(tokenizer_json("qwen3"))
    files = json.loads(bare.to_str()) | {"added_tokens": json.loads(bare.to_str())["added_tokens"][:1]}
    config = json.dumps({"eos_token": "<|endoftext|>"})
    write_checkpoint(tmp_path, "qwen3", tokenizer=json.dumps(files), tokenizer_config=config, generation_config=None, config=None)
    (tmp_path / "generation_config.json").unlink()
    (tmp_path / "config.json").unlink()
    with pytest.raises(ValueError, match="no chat format fits"):
        load_chat(tmp_path)


@pytest.mark.parametrize("template", [None, template_source("qwen3")], ids=["without", "with"])
@pytest.mark.parametrize("thinking", ["on", "off", None])
@pytest.mark.parametrize("history", ["keep", "strip"])
def test_a_chat_is_opened_as_it_is_asked_for_with_a_template_and_without(tmp_path, template, thinking, history):
    write_checkpoint(tmp_path, "qwen3", template)
    asked = Chat(tokenizer_of("qwen3"), QWEN3, thinking, history)
    for options in ({}, {"form": QWEN3}, {"form": QWEN3, "tokenizer": asked.tokenizer}):
        chat = load_chat(tmp_path, thinking, history, **options)
        assert (chat.format, chat.thinking, chat.history) == (QWEN3, asked.thinking, history)


def test_named_templates_use_the_default(tmp_path):
    named = [{"name": "tool_use", "template": "x"}, {"name": "default", "template": template_source("qwen3")}]
    write_checkpoint(tmp_path, "qwen3", named)
    assert load_template(tmp_path).source == template_source("qwen3")
    write_checkpoint(tmp_path, "qwen3", named[:1])
    with pytest.raises(ValueError, match="none of them named default"):
        load_template(tmp_path)


def test_the_sandbox_has_the_usual_helpers_and_no_way_out():
    render = lambda source: JinjaTemplate(source).render([Message("user", "hi")])  # noqa: E731
    assert render("{{ {'b': 'é<', 'a': [1]} | tojson }}") == '{"b": "é<", "a": [1]}'
    assert render("{{ strftime_now('%Y') | int > 2000 }}") == "True"
    assert render("{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% break %}{% endfor %}") == "hi"
    with pytest.raises(ValueError, match="SecurityError"):
        render("{{ messages.__class__.__mro__ }}")
    with pytest.raises(ValueError, match="SecurityError"):
        render("{{ messages.append(1) }}")
    with pytest.raises(ValueError, match="TemplateError: bad roles"):
        render("{{ raise_exception('bad roles') }}")
    with pytest.raises(ValueError, match="no Jinja: line 1"):
        JinjaTemplate("{% if %}")


def test_probes_cover_every_role_tools_calls_and_thinking():
    messages = [m for probe in PROBES for m in probe.messages]
    assert {m.role for m in messages} == {"system", "user", "assistant", "tool"}
    assert any(m.thinking for m in messages)
    assert max(len(m.tool_calls) for m in messages) == 2
    assert {probe.generate for probe in PROBES} == {True, False}

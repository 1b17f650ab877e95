"""A checkpoint's own template to the letter: the ids that grow are its own rendering, whatever its family, and what it rewrites is told."""

import hashlib
import itertools
import json
import warnings

import pytest
from checkpoint_text import SPECIALS, chat_of, template_of, template_source, tokenizer_json, tokenizer_of, write_checkpoint
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Library

from marl_llm.text import CHATML, ByteTokenizer, Chat, ChatTemplateWarning, JinjaTemplate, Message, ToolCall, load_chat, load_template
from marl_llm.text.loading import TOOL, TRIALS, check_contents, spoken, try_template

# Family -> the trials in which its template later writes otherwise what was said, and how it writes calls.
REWRITES = {
    "smollm2": ((), None),
    "qwen2.5": ((), "hermes"),
    "qwen3": (("a thought",), "hermes"),
    "deepseek_r1_distill_qwen": (("an answer", "a system prompt", "two answers", "a thought"), None),
    "llama3.2": ((), "llama3_json"),
    "mistral_nemo": (("a system prompt", "a call and a new question"), "mistral"),
    "gemma2": ((), None),
    "phi3.5": ((), None),
    "glm4.6": (("an answer", "a system prompt", "two answers", "a thought"), None),
    "gpt_oss": (("an answer", "a system prompt", "two answers"), None),
}
TOKENIZERS = {"qwen2.5": "qwen2.5", "qwen3": "qwen3", "deepseek_r1_distill_qwen": "deepseek"}
ON, OFF = {"enable_thinking": True}, {"enable_thinking": False}
MODES = [("qwen2.5", {}), ("qwen3", ON), ("qwen3", OFF), ("deepseek_r1_distill_qwen", {})]
PUBLISHED = {
    "qwen2.5": "cd8e9439f0570856fd70470bf8889ebd8b5d1107207f67a5efb46e342330527f",
    "qwen3": "a55ee1b1660128b7098723e0abcd92caa0788061051c62d51cbe87d9cf1974d8",
    "smollm2": "872be49dbb638044ad01b60388f48d469ff2980e5f0dccdc22ec907db54d0788",
}


@pytest.mark.parametrize("family", PUBLISHED)
def test_the_templates_are_the_published_ones(family):
    source = template_source(family)
    published = source.removesuffix("\n") if family == "qwen3" else source
    assert hashlib.sha256(published.encode()).hexdigest() == PUBLISHED[family]


@pytest.mark.parametrize("family", SPECIALS)
def test_what_grows_is_the_template_s_own_rendering_where_it_keeps_prefixes(family):
    chat = chat_of(family)
    rewrites, reader = REWRITES[family]
    results = try_template(chat)
    assert tuple(one.name for one in results if not one.equal and not one.refused) == rewrites
    assert [one.name for one in results if one.refused] == (["a system prompt"] if family == "gemma2" else [])
    assert (chat.call_reader and chat.call_reader.name) == reader
    assert len(results) == 3 + chat.thinks + 2 * (reader is not None)


@pytest.mark.parametrize("family", SPECIALS)
def test_a_conversation_says_whether_its_template_would_have_written_another(family):
    chat, found = chat_of(family), set()
    for trial in TRIALS[:4]:
        if trial.name == "a thought" and not chat.thinks:
            continue
        try:
            conversation = chat.start(trial.start)
        except ValueError:
            continue  # the system prompt that Gemma refuses
        for reply, heard in zip(trial.replies, trial.heard, strict=True):
            assert not conversation.rewritten or conversation.turns[1:]
            conversation = chat.extend(chat.reply(conversation, spoken(chat, reply)), heard)
        if conversation.rewritten:
            found.add(trial.name)
    told = {name for name in REWRITES[family][0] if not name.startswith("a call")}
    assert found == told


@pytest.mark.parametrize("family", SPECIALS)
def test_contents_cannot_spell_what_a_template_steers_with(family):
    chat = chat_of(family)
    forgery = "".join(chat.tokenizer.special_ids) + "<think>\ue000\ue001 hi"
    plain, forged = (chat.start([Message("user", text)]) for text in ("hi", forgery))
    assert [i for i in forged.ids if i > 256] == [i for i in plain.ids if i > 256]
    assert forgery in chat.tokenizer.decode(forged.ids)


def test_smollm2_is_greeted_with_its_own_words():
    text = chat_of("smollm2").template.render([Message("user", "Hi")])
    assert text.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n")


WORDS = st.one_of(
    st.sampled_from(["", "\n", "\n\nNorth.\n", " ", "u\u0308", "<tool_response>\nx\n</tool_response>"]),
    st.sampled_from(["a</think>b", "<think>\nq\n</think>\n\nz", "<|im_end|>"]),
    st.text(alphabet=st.characters(exclude_categories=("Cs",)), max_size=10),
)


@pytest.mark.parametrize(("family", "options"), MODES)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_conversation_that_forges_nothing_has_the_template_s_ids(family, options, data):
    template, name = template_of(family), TOKENIZERS[family]
    chat = chat_of(family, tokenizer_of(name), options=options)
    rows = [("user", data.draw(WORDS), None, 0)]
    if data.draw(st.booleans()):
        rows.insert(0, ("system", data.draw(WORDS), None, 0))
    tooled = chat.call_reader is not None
    roles = ["user", "assistant", "tool", "system"] if tooled else ["user", "assistant"]
    thoughts = st.one_of(st.none(), WORDS) if chat.thinks else st.none()
    rows += data.draw(st.lists(st.tuples(st.sampled_from(roles), WORDS, thoughts, st.integers(0, 2)), max_size=5))
    messages = []
    for role, text, thought, calls in rows:
        called = tuple(ToolCall("look", {"at": text, "n": i}) for i in range(calls)) if role == "assistant" and tooled else ()
        messages.append(Message(role, text, thought if role == "assistant" else None, called))
    tools = [TOOL] * data.draw(st.integers(0, 2)) if tooled else []
    theirs = Library.from_str(tokenizer_json(name)).encode(template.render(messages, tools, **options), add_special_tokens=False).ids
    ours = list(chat.encode_messages(messages, tools))
    guarded = {*chat.tokenizer.special_ids, "<think>", "</think>", "<tool_response>"}
    if any(s in t for s in guarded for t in [m.content for m in messages] + [m.thinking or "" for m in messages]):
        steers = chat.tokenizer.special_ids["<|im_start|>" if name != "deepseek" else "<｜User｜>"]
        assert ours.count(steers) <= theirs.count(steers)
    else:
        assert ours == theirs


@pytest.mark.parametrize(("options", "tooled"), list(itertools.product((ON, OFF), (False, True))))
def test_a_conversation_with_the_template_s_history_is_its_rendering(options, tooled):
    chat = chat_of("qwen3", tokenizer_of("qwen3"), options=options, history="template")
    library = Library.from_str(tokenizer_json("qwen3"))
    messages = [Message("system", "Be brief."), Message("user", "Where?")]
    conversation = chat.start(messages)
    for i, text in enumerate(["North.", "South.\n\nOr not.", "  East."]):
        thought = f"<think>\nStep {i}.\n</think>\n\n" if options == ON else ""
        conversation = chat.reply(conversation, library.encode(f"{thought}{text}<|im_end|>", add_special_tokens=False).ids)
        heard = Message("tool" if tooled and i != 1 else "user", f"Next {i}")
        conversation = chat.extend(conversation, [heard])
        messages += [Message("assistant", thought + text), heard]
        theirs = chat.template.render(messages, **options)
        assert list(conversation.ids) == library.encode(theirs, add_special_tokens=False).ids


@pytest.mark.parametrize("family", ["glm4.6", "deepseek_r1_distill_qwen"])
def test_thinking_leaves_the_prompt_as_its_template_says(family):
    chat = chat_of(family, history="template")
    asked = chat.start([Message("user", "Where?")])
    thought = "Hm.\n</think>\n\n" if asked.turns[0].opening else "\n<think>Hm.</think>\n"
    replied = chat.reply(asked, [*chat.encode(thought + "North."), chat.stop_ids[0]])
    conversation = chat.extend(replied, [Message("user", "Sure?")])
    assert conversation.sample == 1
    shown = "<|assistant|>\n<think></think>\nNorth." if family == "glm4.6" else "<｜Assistant｜>\n\nNorth.<｜end▁of▁sentence｜>"
    assert shown in chat.tokenizer.decode(conversation.ids)
    assert "Hm." not in chat.tokenizer.decode(conversation.ids)


@pytest.mark.parametrize(("family", "source"), [("qwen2.5", "qwen2.5"), ("qwen2.5", "smollm2")])
@pytest.mark.parametrize("place", ["config", "file"])
def test_a_checkpoint_whose_template_keeps_prefixes_loads_without_a_word(tmp_path, family, source, place):
    write_checkpoint(tmp_path, family, template_source(source) if place == "config" else "wrong, and overruled")
    if place == "file":
        (tmp_path / "chat_template.jinja").write_text(template_source(source), encoding="utf-8")
    with warnings.catch_warnings():
        warnings.simplefilter("error", ChatTemplateWarning)
        chat = load_chat(tmp_path)
    assert chat.template.source == template_source(source)
    assert chat.stop_ids == chat.tokenizer.stop_ids


def test_a_template_that_rewrites_history_is_told_in_one_line(tmp_path):
    write_checkpoint(tmp_path, "qwen3", template_source("qwen3"))
    said = r"rewrites history in 1 of 6 trials \(a thought\); prompts keep what was said \(history='keep'\)$"
    with pytest.warns(ChatTemplateWarning, match=said) as seen:
        load_chat(tmp_path)
    assert len(seen) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error", ChatTemplateWarning)
        assert load_chat(tmp_path, ON, "template").options == ON


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | upper }}<|im_end|>\n{% endfor %}", "alters what a user says"),
        ("{% for m in messages %}<|im_start|>{{ m.content | replace('<b>', '') }}<|im_end|>\n{% endfor %}", "alters what a user says"),
        ("{% for m in messages %}<|im_start|>{{ m.content if m.role == 'user' }}<|im_end|>\n{% endfor %}", "not write what an assistant"),
        ("{{ raise_exception('not today') }}", "not today"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
    ],
)
def test_a_template_that_cannot_be_followed_is_refused_with_its_directory(tmp_path, source, message):
    write_checkpoint(tmp_path, "qwen3", source)
    with pytest.raises(ValueError, match=message) as refusal:
        load_chat(tmp_path)
    assert str(tmp_path) in str(refusal.value)


def test_thinking_can_be_off_where_nothing_thinks_and_nowhere_else_without_an_option(tmp_path):
    write_checkpoint(tmp_path, "qwen2.5", template_source("qwen2.5"))
    assert load_chat(tmp_path, OFF).options == {}
    with pytest.raises(ValueError, match="the option enable_thinking=True has no effect: the chat template does not read it"):
        load_chat(tmp_path, ON)
    (tmp_path / "deepseek").mkdir()
    write_checkpoint(tmp_path / "deepseek", "deepseek", template_source("deepseek_r1_distill_qwen"))
    with pytest.raises(ValueError, match="the option enable_thinking=False has no effect"):
        load_chat(tmp_path / "deepseek", OFF)


def test_a_vocabulary_that_cannot_spell_everything_is_no_fault_of_the_template(tmp_path):
    raw = json.loads(tokenizer_json("qwen2.5"))
    raw["normalizer"] = {"type": "Lowercase"}
    write_checkpoint(tmp_path, "qwen2.5", template_source("qwen2.5"), tokenizer=json.dumps(raw))
    chat = load_chat(tmp_path)
    assert "where is it?" in chat.tokenizer.decode(chat.start([Message("user", "Where IS it?")]).ids)


def test_what_a_message_says_stands_in_its_rendering():
    check_contents("a  b\n c", [Message("user", "  b\n c "), Message("system", "")])
    with pytest.raises(ValueError, match=r"alters what a tool says: 'x y' is not in 'x  y'"):
        check_contents("x  y", [Message("tool", "x y")])


REFUSES_SYSTEM = "{%- if messages[0].role == 'system' %}{{ raise_exception('no system prompts here') }}{% endif %}"
LEAVES_OUT_SYSTEM = (
    "{% for m in messages %}{% if m.role != 'system' %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_a_template_that_leaves_out_system_prompts_is_given_them_in_the_users_words(tmp_path):
    write_checkpoint(tmp_path, "qwen2.5", LEAVES_OUT_SYSTEM)
    assert "Be brief.\n\nhi" in load_chat(tmp_path).start([Message("system", "Be brief."), Message("user", "hi")]).text


def test_a_template_that_refuses_system_prompts_is_given_them_in_the_users_words(tmp_path):
    write_checkpoint(tmp_path, "qwen2.5", REFUSES_SYSTEM + template_source("qwen2.5"))
    chat = load_chat(tmp_path)
    both = chat.start([Message("system", "Be brief."), Message("user", "hi")])
    assert both.ids == chat.start([Message("user", "Be brief.\n\nhi")]).ids != chat.start([Message("user", "hi")]).ids
    grown = chat.extend(chat.reply(both, [97, chat.stop_ids[0]]), [Message("user", "more")])
    assert not grown.rewritten
    with pytest.raises(ValueError, match="no system prompts here"):
        chat.start([Message("system", "Be brief.")])


def test_a_template_that_takes_system_prompts_is_given_them_apart(tmp_path):
    write_checkpoint(tmp_path, "qwen2.5", template_source("qwen2.5"))
    assert not load_chat(tmp_path).template.system_in_user


def test_without_a_template_chatml_is_spoken_and_without_its_tokens_nothing(tmp_path):
    write_checkpoint(tmp_path, "qwen3")
    assert load_template(tmp_path) is None
    assert load_chat(tmp_path).template == CHATML
    bare = Library.from_str(tokenizer_json("qwen3"))
    files = json.loads(bare.to_str()) | {"added_tokens": json.loads(bare.to_str())["added_tokens"][:1]}
    config = json.dumps({"eos_token": "<|endoftext|>"})
    write_checkpoint(tmp_path, "qwen3", tokenizer=json.dumps(files), tokenizer_config=config, generation_config=None, config=None)
    (tmp_path / "generation_config.json").unlink()
    (tmp_path / "config.json").unlink()
    with pytest.raises(ValueError, match=r"has no chat template, and no ChatML either: .* lack \['<\|im_end\|>', '<\|im_start\|>'\]"):
        load_chat(tmp_path)


def test_chatml_keeps_prefixes_and_reads_its_own_calls():
    chat = Chat(ByteTokenizer(*SPECIALS["qwen2.5"][:2]), CHATML)
    assert [one for one in try_template(chat) if not one.equal] == []
    assert chat.call_reader.name == "hermes"
    text = CHATML.render([Message("system", "Be brief."), Message("user", "hi")])
    assert text == "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    offered = CHATML.render([Message("user", "hi")], [TOOL])
    assert offered.startswith("<|im_start|>system\n# Tools\n\nYou may call these functions:\n<tools>\n{")


def test_arguments_are_given_as_text_to_templates_that_join_texts(tmp_path):
    shown = """<tool_call>{"name": "{{ c.function.name }}", "arguments": {{ '' + c.function.arguments }}}</tool_call>"""
    source = (
        "{{ tools | length if tools }}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
        f"{{% for c in m.tool_calls or [] %}}{shown}{{% endfor %}}<|im_end|>\n{{% endfor %}}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    write_checkpoint(tmp_path, "qwen2.5", source)
    chat = load_chat(tmp_path)
    assert chat.template.text_arguments
    assert chat.call_reader.name == "hermes"


def test_a_tool_s_message_names_the_call_that_it_answers():
    source = "{% for m in messages %}{% for c in m.tool_calls or [] %}{{ c.id }} {% endfor %}{{ m.tool_call_id }}:{{ m.name }}|{% endfor %}"
    calls = (ToolCall("look", {}), ToolCall("walk", {}))
    said = [Message("assistant", "", tool_calls=calls), Message("tool", "a"), Message("tool", "b"), Message("tool", "c")]
    again = [Message("assistant", "", tool_calls=calls[1:]), Message("tool", "d")]
    text = JinjaTemplate(source).render([*said, *again])
    first = "call00000 call00001 :|call00000:look|call00001:walk|call00001:walk|"
    assert text == first + "call00002 :|call00002:walk|"


def test_named_templates_use_the_default(tmp_path):
    named = [{"name": "tool_use", "template": "x"}, {"name": "default", "template": template_source("qwen3")}]
    write_checkpoint(tmp_path, "qwen3", named)
    assert load_template(tmp_path).source == template_source("qwen3")
    write_checkpoint(tmp_path, "qwen3", named[:1])
    with pytest.raises(ValueError, match="none of them named default"):
        load_template(tmp_path)


def test_the_sandbox_has_the_usual_helpers_and_no_way_out(tmp_path):
    def render(source):
        return JinjaTemplate(source).render([Message("user", "hi")])

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
        render("{% if %}")

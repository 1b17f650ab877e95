"""The session tree: a request keeps the ids of the replies that its episode got, and what is encoded again is counted."""

import json

import pytest
from checkpoint_text import chat_of, tokenizer_of
from serving_lab import LOOK, USER, ScriptedEngine, ask, ended, events, get, post, scripted

from marl_llm.serving import ChatServer, policy_answers
from marl_llm.serving import sessions as module
from marl_llm.serving.sessions import SessionTree, keys_of
from marl_llm.text import ByteTokenizer, Message
from marl_llm.workflows import PlainText

CALL = ended('Look. <tool_call>\n{"name":"look",  "arguments": {"x": 3}}\n</tool_call>')  # not as the template would write it
PATH = "/episodes/a/v1/chat/completions"
AGAIN = {"role": "user", "content": "And now?"}


def lines_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def dialogue(server, steps, **more):
    """The messages after so many answers, each heard as it was told."""
    messages = [{"role": "system", "content": "Be brief."}, USER]
    for step in range(steps):
        message = ask(server, PATH, messages=messages, **more)["choices"][0]["message"]
        heard = [{"role": "tool", "tool_call_id": call["id"], "content": "wall"} for call in message.get("tool_calls", ())]
        messages = [*messages, message, *(heard or [AGAIN | {"content": f"And now? {step}"}])]
    return messages


@pytest.mark.parametrize("family", ["qwen2.5", "qwen3", "llama3.2", "mistral_nemo"])
def test_a_program_that_keeps_its_history_never_has_a_token_encoded_again(family, tmp_path):
    policy = scripted(*(ended(text, family) for text in ("One.", "Two.  ", "Three")), family=family)
    with ChatServer({"m": policy}, record=tmp_path / "plays.jsonl") as server:
        dialogue(server, 3)
        status, about = get(server, "/episodes/a")
    lines = lines_of(tmp_path / "plays.jsonl")
    for before, after in zip(lines, lines[1:]):
        past = [*before["prompt"], *before["ids"]]
        assert after["prompt"][: len(past)] == past
    assert [line["relayed"] for line in lines] == [0, *(len(line["prompt"]) + len(line["ids"]) for line in lines[:2])]
    counts = {"lineages": 1, "relayed": sum(line["relayed"] for line in lines), "forked": 0, "reencoded": 0}
    assert (status, about) == (200, {"episode": "a", "replies": 3, "paid": False} | counts)


def test_ids_that_no_tokenizer_would_give_again_are_kept_with_the_calls_in_them(tmp_path):
    """The call is drawn with other blanks than the template writes, and a word in pieces that the tokenizer would join."""
    chat = chat_of("qwen2.5", tokenizer_of("qwen2.5"))
    policy = policy_answers(ScriptedEngine(chat, [CALL, ended("ok")]), "m", chat, max_prompt=2000, max_tokens=400)
    odd = [i for letter in "system" for i in chat.tokenizer.encode(letter)]
    assert list(chat.tokenizer.encode("system")) != odd
    policy.engine._drawn[0] = [*odd, *policy.engine._drawn[0]]
    with ChatServer({"m": policy}, record=tmp_path / "plays.jsonl") as server:
        dialogue(server, 2, tools=[LOOK])
    first, second = lines_of(tmp_path / "plays.jsonl")
    past = [*first["prompt"], *first["ids"]]
    assert second["prompt"][: len(past)] == past
    assert second["reencoded"] == 0
    behind = chat.tokenizer.decode(second["prompt"][len(past) :])
    assert behind == "\n<|im_start|>user\n<tool_response>\nwall\n</tool_response><|im_end|>\n<|im_start|>assistant\n"


def test_a_streamed_reply_is_known_by_what_was_streamed(tmp_path):
    policy = scripted("  " + CALL, ended("ok"), size=2)
    with ChatServer({"m": policy}, record=tmp_path / "plays.jsonl") as server:
        deltas = [event["choices"][0]["delta"] for event in events(server, PATH, tools=[LOOK])]
        text = "".join(delta.get("content") or "" for delta in deltas)
        [call] = [call for delta in deltas for call in delta.get("tool_calls", ())]
        heard = {"role": "tool", "tool_call_id": call["id"], "content": "wall"}
        ask(server, PATH, tools=[LOOK], messages=[USER, {"role": "assistant", "content": text, "tool_calls": [call]}, heard])
        assert get(server, "/episodes/a")[1]["reencoded"] == 0
    first, second = lines_of(tmp_path / "plays.jsonl")
    assert second["relayed"] == len(first["prompt"]) + len(first["ids"])


def test_a_rewritten_history_forks_and_is_counted(tmp_path):
    policy = scripted(*(ended(text) for text in ("One.", "Two.", "Three.", "Four.", "Five.")))
    with ChatServer({"m": policy}, record=tmp_path / "plays.jsonl") as server:
        messages = dialogue(server, 2)
        ask(server, PATH, messages=[*messages[:3], AGAIN | {"content": "Otherwise?"}])  # another question behind the first reply
        ask(server, PATH, messages=[*messages[:4], {"role": "assistant", "content": "Zwei."}, AGAIN])  # the second reply rewritten
        ask(server, PATH, messages=[USER, *messages[2:]])  # the system's message left out
        about = get(server, "/episodes/a")[1]
    lines = lines_of(tmp_path / "plays.jsonl")
    past = len(lines[0]["prompt"]) + len(lines[0]["ids"])
    assert [line["relayed"] for line in lines] == [0, past, past, past, 0]
    assert [line["forked"] for line in lines] == [0, 0, past, past, 0]
    assert [line["reencoded"] for line in lines] == [0, 0, 0, len(lines[3]["prompt"]) - past, len(lines[4]["prompt"])]
    assert about["lineages"] == 4
    assert lines[3]["prompt"][:past] == [*lines[0]["prompt"], *lines[0]["ids"]]
    assert "Zwei." in policy.renderer.tokenizer.decode(lines[3]["prompt"])


def test_a_reply_is_known_in_its_own_episode_and_of_its_own_model_and_tools_alone(tmp_path):
    policy = scripted(ended("One."))
    with ChatServer({"m": policy, "n": policy}, record=tmp_path / "plays.jsonl") as server:
        message = ask(server, PATH)["choices"][0]["message"]
        history = [USER, message, AGAIN]
        for path, more in (("/episodes/b/v1/chat/completions", {}), (PATH, {"model": "n"}), (PATH, {"tools": [LOOK]}), (PATH, {})):
            ask(server, path, messages=history, **more)
        ask(server, messages=history)  # of no episode
        assert post(server, {"reward": 1}, "/episodes/a/reward")[0] == 200
        assert get(server, "/episodes/a")[1]["paid"] is True
        assert get(server, "/episodes/unknown")[1]["replies"] == 0
    assert [line["relayed"] > 0 for line in lines_of(tmp_path / "plays.jsonl")[1:-1]] == [False, False, False, True]


def test_a_model_without_a_chat_format_keeps_its_ids_too(tmp_path):
    renderer = PlainText(ByteTokenizer(specials=("<eos>",), stops=("<eos>",)), (257,))
    policy = policy_answers(ScriptedEngine(renderer, ["yes<eos>"]), "m", renderer, max_prompt=400)
    with ChatServer({"m": policy}, record=tmp_path / "plays.jsonl") as server:
        dialogue(server, 2)
    first, second = lines_of(tmp_path / "plays.jsonl")
    assert second["prompt"] == [*first["prompt"], *first["ids"], *renderer.tokenizer.encode("\nAnd now? 0")]


def test_the_episodes_that_asked_longest_ago_are_forgotten_first(monkeypatch):
    monkeypatch.setattr(module, "MOST_REPLIES", 2)
    sessions, messages = module.SessionTrees(), [USER, {"role": "assistant", "content": "x"}, AGAIN]
    conversation = chat_of("qwen2.5").start([Message("user", "Where?")])
    for episode in "abc":
        found = sessions.match(episode, "m", (), messages[:1])
        sessions.keep(episode, found, conversation.ids, {keys_of("m", (), messages[:2])[-1]: conversation})
    assert [sessions.match(episode, "m", (), messages).conversation is not None for episode in "abc"] == [False, True, True]
    sessions.end("b")
    assert sessions.match("b", "m", (), messages).conversation is None
    assert sessions.counts("a")["lineages"] == 1


def test_a_retry_of_the_same_request_is_no_fork():
    tree, messages = SessionTree(), [USER, {"role": "assistant", "content": "x"}, AGAIN]
    conversation = chat_of("qwen2.5").start([Message("user", "Where?")])
    tree.keep({keys_of("m", (), messages[:2])[-1]: conversation})
    otherwise = [*messages[:2], AGAIN | {"content": "?"}]
    counts = [tree.count(tree.match("m", (), asked), conversation.ids) for asked in (messages, messages, otherwise, messages)]
    assert [count["forked"] > 0 for count in counts] == [False, False, True, False]


def test_a_request_that_was_refused_is_no_continuation(tmp_path):
    with ChatServer({"m": scripted(ended("one"), ended("two"), max_prompt=200)}, record=tmp_path / "plays.jsonl") as server:
        message = ask(server, PATH)["choices"][0]["message"]
        longer = {"model": "m", "messages": [USER, message, AGAIN | {"content": "x" * 300}]}
        assert post(server, longer, PATH)[0] == 400
        ask(server, PATH, messages=[USER, message, AGAIN])
        about = get(server, "/episodes/a")[1]
    assert (about["lineages"], about["forked"], about["relayed"] > 0) == (1, 0, True)


def test_a_developers_message_is_a_system_message_of_its_words():
    as_system, as_developer = ([{"role": role, "content": "Be brief."}] for role in ("system", "developer"))
    assert keys_of("m", [], as_developer) == keys_of("m", [], as_system)
    assert keys_of("m", [], as_developer) != keys_of("n", [], as_developer)

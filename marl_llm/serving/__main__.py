"""Serves a checkpoint's model on this machine: `python -m marl_llm.serving --path=Qwen2.5-1.5B-Instruct --port=8000`.

Clients send OpenAI's chat completions to http://127.0.0.1:PORT/v1 with the model's `--name`; `config.coach.kind=served` is one.
"""

from __future__ import annotations

import argparse
import threading


def main() -> None:
    """Flags to a server that runs until it is interrupted."""
    flags = argparse.ArgumentParser(prog="python -m marl_llm.serving", description=__doc__)
    flags.add_argument("--path", required=True, help="directory of a Hugging Face checkpoint")
    flags.add_argument("--port", type=int, default=8000)
    flags.add_argument("--name", default="model", help="what clients call the model")
    flags.add_argument("--max_prompt", type=int, default=8192, help="tokens")
    flags.add_argument("--max_tokens", type=int, default=1024, help="of a reply")
    flags.add_argument("--slots", type=int, default=16, help="replies that are sampled at once")
    flags.add_argument("--thinking", choices=("on", "off"), help="how the chat opens; by default as the checkpoint's template")
    given = flags.parse_args()

    import jax

    from marl_llm.models import load_pretrained
    from marl_llm.sampling import Engine, LaneConfig
    from marl_llm.serving import ChatServer, policy_answers
    from marl_llm.text import load_chat

    loaded, chat = load_pretrained(given.path), load_chat(given.path, given.thinking)
    sizes = LaneConfig(given.slots, prompt_tokens=given.max_prompt, response_tokens=given.max_tokens, admit=min(given.slots, 16))
    with Engine({given.name: loaded}, jax.random.key(0), sizes=sizes, tokenizers={given.name: chat.tokenizer}) as engine:
        answers = policy_answers(engine, given.name, chat, max_prompt=given.max_prompt, max_tokens=given.max_tokens)
        with ChatServer({given.name: answers}, given.port, concurrency=2 * given.slots) as server:
            print(f"serving {given.name} at {server.url}", flush=True)
            try:
                threading.Event().wait()
            except KeyboardInterrupt:
                print("stopped", flush=True)


if __name__ == "__main__":
    main()

"""A role of a run as an endpoint for any program that speaks OpenAI's chat completions.

First: python examples/own_team.py
"""

import httpx2 as httpx

from marl_llm.cli.serve import answers_of_run
from marl_llm.serving import ChatServer


def main(run: str = "runs/own_team", question: str = "a>") -> str:
    """Asks the run's first role once, over HTTP, and returns the reply."""
    with answers_of_run(run, []) as models, ChatServer(models) as server:
        role = next(iter(models))
        request = {"model": role, "messages": [{"role": "user", "content": question}], "max_tokens": 16}
        reply = httpx.post(f"{server.url}/chat/completions", json=request, timeout=60).json()
    print(role, "says", reply["choices"][0]["message"]["content"] if "choices" in reply else reply)
    return role


if __name__ == "__main__":
    main()

"""smolagents: a code agent, whose code runs in the sandbox of this library (docs/sandbox.md) and never in its own interpreter.

    pip install "smolagents[openai]" && marl model smollm2 --out=models/smollm2
    marl attach --roles=coder=models/smollm2 --tasks=tasks.jsonl --lora_rank=16 \
        --workdir=runs/coder --stays -- python examples/agents/smolagents_code.py

A line of tasks.jsonl is like {"question": "2 + 2?", "answer": "4"}.
"""

import json
import sys
import urllib.request

from smolagents import CodeAgent, OpenAIServerModel
from smolagents.local_python_executor import CodeOutput, PythonExecutor

from marl_llm.tools.sandbox import run

SYSTEM = "Solve the task with Python code between <code> and </code>. final_answer(x) in the code gives the answer, print shows a value."
MOST = 2000  # characters of output that the model is shown
MARK, ANSWER = "\x1e", "\x1d"  # written before what the last piece of code prints, and before the final answer
START = f"def final_answer(answer=None):\n    print({ANSWER!r} + str(answer))\n    raise SystemExit\n"


class InSandbox(PythonExecutor):
    """Runs pieces of code one after the other: each program repeats the earlier pieces, which give the same again."""

    def __init__(self):
        self.pieces: list[str] = []

    def send_tools(self, tools: dict) -> None:
        """`final_answer` alone is there."""

    def send_variables(self, variables: dict) -> None:
        """None are."""

    def __call__(self, code_action: str) -> CodeOutput:
        execution = run("\n".join([START, *self.pieces, f"print({MARK!r})", code_action]))
        if not execution.ok:
            sys.exit(f"the sandbox failed: {execution.failure.message}")  # the agent would show the model any other exception
        printed, answered, answer = execution.stdout.rpartition(MARK + "\n")[2].partition(ANSWER)
        if execution.exit_code != 0:
            raise ValueError(printed[-MOST:] + execution.stderr[-500:])  # the agent shows it to the model
        self.pieces.append(code_action)
        return CodeOutput(answer.strip() if answered else None, printed[-MOST:], bool(answered))


def main() -> None:
    """Plays an episode for each line of standard input, and says what it was worth."""
    for line in sys.stdin:
        episode = json.loads(line)
        model = OpenAIServerModel("coder", api_base=episode["base_url"], api_key=episode["api_key"])
        agent = CodeAgent([], model, executor=InSandbox(), max_steps=3, verbosity_level=0)
        agent.prompt_templates["system_prompt"] = SYSTEM  # the usual one has 10,000 characters
        result = agent.run(episode["task"]["question"], return_full_result=True)  # a failed server ends the program: not the model's fault
        correct = result.state == "success" and str(result.output) == episode["task"]["answer"]
        body = json.dumps({"reward": float(correct)}).encode()
        headers = {"Content-Type": "application/json"}
        urllib.request.urlopen(urllib.request.Request(episode["episode_url"] + "/reward", body, headers))


if __name__ == "__main__":
    main()

"""A workflow that can be coached, as a user writes it: one role that has to repeat a digit, and a rubric that says how near it came."""

from marl_llm.text import ByteTokenizer
from marl_llm.workflows import CoachGuide, Environment, PlainText, Role, Task, Workflow, plain
from marl_llm.workflows.rewards import broadcast

DIGITS = "0123456789"


def right(path):
    return float(path.fields["said"] == path.fields["digit"])


def rubric(view):
    said = view.call.text.strip()
    return (10 if said == view.task["digit"] else 4 if said in DIGITS else 0), None, f"said {said!r}"


def brief(view):
    said = view.call.text.strip()
    return f"speaker reads x says {'x' if said == view.task['digit'] else 'y' if said in DIGITS else 'z'}"


def echo(noise: float = 0.3) -> Environment:
    """The echo. `noise` is how often the scripted player is wrong."""
    role = Role("speaker", "{digit}>", parse=plain("said"), writes={"said": ""}, max_prompt=8, max_tokens=4)
    workflow = Workflow("echo", role, ("digit",), rewards=(broadcast(right),), metrics={"right": right})
    tokenizer = ByteTokenizer(specials=("<eos>",), stops=("<eos>",))
    low = {"train": 0, "validation": 8, "test": 9}

    def tasks(split, first, count):
        size = 8 if split == "train" else 1
        digits = [DIGITS[low[split] + n % size] for n in range(first, first + count)]
        return [Task(first + i, {"digit": d}, {}, split, "odd" if int(d) % 2 else "even") for i, d in enumerate(digits)]

    def script(turn):
        digit = turn.fields["digit"]
        return DIGITS[(int(digit) + 1) % 10] if turn.seed[1] % 10 < 10 * noise else digit

    texts = {"speaker": "says the digit that it reads"}
    guide = CoachGuide("One speaker repeats a digit.", texts, "the digit is right", rubric=rubric, brief=brief)
    return Environment(workflow, tasks, "right", PlainText(tokenizer, tokenizer.stop_ids), script, guide=guide)

"""A planner that calls another role as a tool: each call is a sub-episode, whose responses are samples of the adder and train it too."""

import json

import marl_llm as ml
from marl_llm.algorithms import make_recipe
from marl_llm.text import ByteTokenizer, Chat
from marl_llm.text.jinja import JinjaTemplate
from marl_llm.workflows import AgentTool

ROWS = [{"digits": f"{a}{b}", "target": str((a + b) % 10)} for a in range(10) for b in range(10)]
TEMPLATE = """{% for tool in tools or [] %}{{ tool.function.name }} {% endfor %}{% for message in messages %}<q>{{ message.content }}
{%- for call in message.tool_calls or [] %}
{%- set args = call.function.arguments | tojson %}<tool_call>{"name": "{{ call.function.name }}", "arguments": {{ args }}}</tool_call>
{%- endfor %}<end>{% endfor %}
{%- if add_generation_prompt %}<q>{% endif %}"""  # a tiny model's; a checkpoint brings its own
CHAT = Chat(ByteTokenizer(specials=("<q>", "<end>"), stops=("<end>",)), JinjaTemplate(TEMPLATE))


def player(turn) -> str:
    """Who is imitated first: the planner hands the digits on and repeats what comes back, the adder adds."""
    last = turn.messages[-1].content
    if turn.role.name == "adder":
        return str(sum(int(letter) for letter in last if letter.isdigit()) % 10)
    if len(turn.messages) > 1:
        return last  # what the tool answered
    return f"<tool_call>{json.dumps({'name': 'adder', 'arguments': {'prompt': last}})}</tool_call>"


ADDER = AgentTool("adder", "Adds digits.", at_most=2, max_tokens=8)
ROLES = {
    "planner": {"tools": (ADDER,), "max_tool_rounds": 1, "max_tokens": 80, "max_prompt": 120},
    "adder": {"max_tokens": 4, "max_prompt": 16},
}


@ml.workflows.team(hidden=("target",), tasks=ROWS, roles=ROLES, renderer=CHAT, script=player)
async def addition(t, task):
    """The planner decides itself whether it calls the adder; the reward goes to all calls, the adder's too."""
    answer = await t.planner(task.digits)
    return ml.Reward(team=float(answer == task.target))


def main(workdir: str = "runs/sub_agents", steps: int = 60, **options) -> None:
    """Trains one model in both roles; each play has one vote in a role's statistics, however often it called the role."""
    options = {"sft": {"steps": 100}, "rollout": {"tasks": 8}} | options
    recipe = make_recipe("grpo", statistics_weight="trajectory")
    print(ml.train(addition, "micro", recipe, steps=steps, workdir=workdir, **options))


if __name__ == "__main__":
    main()

"""A LangGraph application of two roles: a titler reads a text, a tagger the text and the title. What trains it are the rewards alone.

    pip install langgraph langchain-openai && marl model smollm2 --out=models/smollm2
    python examples/agents/langgraph_two_roles.py --write_tasks=tasks.jsonl
    marl attach --roles=titler=models/smollm2,tagger=models/smollm2 --tasks=tasks.jsonl --set=recipe.rewards=mixed --lora_rank=16 \
        --workdir=runs/titles --stays -- python examples/agents/langgraph_two_roles.py
"""

import argparse
import json
import re
import sys
import urllib.request


def words(text: str) -> list[str]:
    """The words of a text, in small letters."""
    return re.findall(r"[a-z]+", text.lower())


def title_reward(post: str, title: str) -> float:
    """Share of a title's words that are different and stand in the text; a quarter of it for a title that is not of 3 to 7 words."""
    said = words(title)
    return (1.0 if 3 <= len(said) <= 7 else 0.25) * len(set(said) & set(words(post))) / max(len(said), 1)


def tags_reward(post: str, title: str, tags: str) -> float:
    """Share of three tags that are different long words of the text, and not of its title."""
    said = [tag.strip().lower() for tag in tags.split(",")]
    good = {tag for tag in said if len(tag) > 3} & (set(words(post)) - set(words(title)))
    return min(len(good), 3) / max(len(said), 3)


def application(**models):
    """The graph: text -> title -> tags. `models`: where they are asked."""
    from langchain_openai import ChatOpenAI
    from langgraph.graph import END, START, StateGraph

    titler, tagger = ChatOpenAI(model="titler", **models), ChatOpenAI(model="tagger", **models)

    def write_title(state: dict) -> dict:
        asked = f"Text:\n{state['post']}\n\nWrite a title of 3 to 7 words for it. Reply with the title alone."
        return state | {"title": titler.invoke(asked).content}

    def write_tags(state: dict) -> dict:
        asked = f"Title: {state['title']}\nText:\n{state['post']}\n\nName three tags for it that the title lacks, with commas between them."
        return state | {"tags": tagger.invoke(asked).content}

    graph = StateGraph(dict)
    graph.add_node("titler", write_title)
    graph.add_node("tagger", write_tags)
    graph.add_edge(START, "titler")
    graph.add_edge("titler", "tagger")
    graph.add_edge("tagger", END)
    return graph.compile()


def write_tasks(path: str) -> None:
    """A task per line: descriptions of the standard library's functions and classes."""
    from marl_llm.games.descriptions import descriptions

    with open(path, "w") as file:
        file.writelines(json.dumps({"post": text}) + "\n" for _, text in descriptions(18, 45))


def main() -> None:
    """Plays an episode for each line of standard input, and says what it was worth."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--write_tasks")
    arguments = parser.parse_args()
    if arguments.write_tasks:
        sys.exit(write_tasks(arguments.write_tasks))
    for line in sys.stdin:
        episode = json.loads(line)
        post = episode["task"]["post"]
        said = application(base_url=episode["base_url"], api_key=episode["api_key"]).invoke({"post": post})
        paid = {"titler": title_reward(post, said["title"]), "tagger": tags_reward(post, said["title"], said["tags"])}
        reward = json.dumps({"reward": sum(paid.values()) / 2, "rewards": paid}).encode()
        headers = {"Content-Type": "application/json"}
        urllib.request.urlopen(urllib.request.Request(episode["episode_url"] + "/reward", reward, headers))


if __name__ == "__main__":
    main()

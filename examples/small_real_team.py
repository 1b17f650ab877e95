"""SmolLM2-135M in two roles, an adapter for each: a titler and a tagger of texts, on two CPU cores.

First: pip install -e '.[smol]' && marl model smollm2 --out=models/smollm2
"""

import re

import marl_llm as ml
from marl_llm.games.descriptions import description_tasks
from marl_llm.workflows import Environment, Role, Workflow, plain, together
from marl_llm.workflows.rewards import broadcast
from marl_llm.workflows.splits import listed_tasks

TEXT = "Text:\n{post}\n\n"
SIZES = {"max_prompt": 160, "max_tokens": 24, "trim": "post"}


def words_of(text: str) -> list[str]:
    """Its words, in small letters."""
    return re.findall(r"[a-z]+", text.lower())


def score(path) -> float:
    """Half for a title of the text's words, half for three tags that the title does not have."""
    post, title = set(words_of(path.fields["post"])), words_of(path.fields["title"])
    fits = 1.0 if 3 <= len(title) <= 7 else 0.25
    good_title = fits * len(set(title) & post) / max(len(title), 1)
    tags = [tag.strip().lower() for tag in path.fields["tags"].split(",")]
    good_tags = {tag for tag in tags if tag in post - set(title) and len(tag) > 3}
    return (good_title + min(len(good_tags), 3) / max(len(tags), 3)) / 2


def titles() -> Environment:
    """Neither role sees what the other writes."""
    titler = Role("titler", TEXT + "Write a title of 3 to 7 words. Reply with the title alone.", plain("title"), {"title": ""}, **SIZES)
    tagger = Role("tagger", TEXT + "Name three tags: three single words, with commas between.", plain("tags"), {"tags": ""}, **SIZES)
    team = Workflow("titles", together(titler, tagger), ("post",), rewards=(broadcast(score),), metrics={"score": score})
    return Environment(team, listed_tasks(description_tasks()), "score")


def main(workdir: str = "runs/titles", path: str = "models/smollm2", steps: int = 60, **options) -> None:
    """60 steps take about 20 minutes of one core."""
    models = {role: ml.load_model(path, lora_rank=16, remat="dots") for role in ("titler", "tagger")}
    recipe = {"name": "magrpo", "temperature": 0.8, "group_size": 4, "kl_coef": 0.0}
    options = {
        "rollout": {"tasks": 4, "max_num_seqs": 16},
        "optimizer": {"learning_rate": 1e-3, "row_tokens": 400, "minibatch": 64},
    } | options
    print(ml.train(titles(), models, recipe, steps=steps, workdir=workdir, **options))


if __name__ == "__main__":
    main()

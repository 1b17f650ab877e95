"""Two small models learn a game together, from Python; the run is one of the command `marl` too.

python examples/train_from_python.py, then: marl view runs/from_python
"""

import marl_llm as ml


def main(workdir: str = "runs/from_python", steps: int = 300, **options) -> None:
    """`options`: further keys of the config, e.g. `rollout={"tasks": 16}` (docs/options.md)."""
    game = ml.make_game("plan_path", height=6, width=6)  # a Tool sees the map, a Planner decides
    models = {"tool": ml.load_model("micro"), "planner": ml.load_model("micro")}  # a model per role
    options = {"sft": {"steps": 250}} | options  # imitate the scripted player first
    results = ml.train(game, models, "at_grpo", steps=steps, workdir=workdir, **options)
    print(results)

    # What did the Tool learn? The trained Planner with the Tool as it was before.
    print(ml.evaluate(workdir, seats=("tool=start",), tasks=results["after"]["tasks"]))


if __name__ == "__main__":
    main()

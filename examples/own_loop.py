"""A training loop of your own: what a step plays and what it changes is in your hands."""

import marl_llm as ml


def main(steps: int = 200, tasks: int = 32, **options) -> None:
    """A harder share of tasks is played twice as soon as the team is good: a curriculum in four lines."""
    with ml.open_team("plan_path", {"tool": "micro", "planner": "micro"}, "at_grpo", **options) as team:
        for step in range(steps):
            team.sft_step(step, tasks, 2e-3)  # the scripted player, before reinforcement
        team.start_rl()
        first = 0
        for step in range(steps):
            batch = team.play(step, first, tasks)  # one table of samples: batch.table, batch.tokens
            figures = team.learn(batch, learning_rate=1e-3)  # by model: loss, grad_norm, entropy, ...
            success = batch.figures["success"]
            if success > 0.5:
                first += tasks  # new tasks only once half of these are solved
            if step % 20 == 0:
                print(f"step {step}: success {success:.2f}, gradient {figures.get('planner', {}).get('grad_norm', 0):.2f}")
        print(team.evaluate({}, "test", tasks).summary()["success"])


if __name__ == "__main__":
    main()

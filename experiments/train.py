"""`python -m experiments.train` is `marl train`: its flags are those of `marl_llm.cli.train`, and its loop is `marl_llm.runs.loop`."""

from marl_llm.cli.train import FLAGS, INTERRUPTED, main
from marl_llm.runs import command

if __name__ == "__main__":
    command.run(main, FLAGS, interrupted=INTERRUPTED)

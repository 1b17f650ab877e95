"""`python -m experiments.evaluate` is `marl evaluate`: see `marl_llm.cli.evaluate`."""

from marl_llm.cli.evaluate import FLAGS, main
from marl_llm.runs import command

if __name__ == "__main__":
    command.run(main, FLAGS)

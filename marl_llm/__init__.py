"""Teams of language models, trained with reinforcement learning in JAX.

The package root imports nothing heavy: `import marl_llm` is instant, and each room is imported by name,
for example `from marl_llm.algorithms import group_relative`. See docs/architecture.md for the rooms.
"""

__version__ = "0.1.0"


def view(*runs, **options):
    """Runs inline in a notebook, e.g. `marl_llm.view("runs/first")`; see `marl_llm.viewing.view`."""
    from marl_llm.viewing import view as inline

    return inline(*runs, **options)

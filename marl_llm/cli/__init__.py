"""The commands of `python -m marl_llm`, one module each."""

"""Second floor: plays a workflow with policies and returns a table of samples."""

from marl_llm.rollout.credit import counterfactual_credit, last_team_reward, shapley_values
from marl_llm.rollout.play import PICKS, Player, pick_branch, play, row_keys
from marl_llm.rollout.players import model_player, random_player, scripted_player
from marl_llm.rollout.table import CompiledRollout, Credit, Episodes, Table, flatten_rows, pad_to

__all__ = [
    "PICKS",
    "Credit",
    "Episodes",
    "Player",
    "CompiledRollout",
    "Table",
    "counterfactual_credit",
    "flatten_rows",
    "last_team_reward",
    "model_player",
    "pad_to",
    "pick_branch",
    "play",
    "random_player",
    "row_keys",
    "scripted_player",
    "shapley_values",
]

"""The recipe of `kdcli finetune`."""

from kdcli.recipe.sections import Section
from kdcli.workloads.settings import FinetuneRecipe

RECIPES: dict[str, type[Section]] = {"finetune": FinetuneRecipe}
"""The recipe's settings model."""

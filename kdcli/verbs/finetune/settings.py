"""The recipes of `kdcli finetune`."""

from kdcli.recipe.sections import Section
from kdcli.workloads.settings import FinetuneRecipe, RerankRecipe

RECIPES: dict[str, type[Section]] = {"finetune": FinetuneRecipe, "rerank": RerankRecipe}
"""The settings model of each folder of `recipes/`."""

"""The recipes of `kdcli finetune`."""

from kdcli.recipe.sections import Section
from kdcli.workloads.settings import FinetuneRecipe, RerankRecipe

RECIPES: dict[str, type[Section]] = {"finetune": FinetuneRecipe, "rerank": RerankRecipe}
"""Folder of `recipes/` -> settings model."""

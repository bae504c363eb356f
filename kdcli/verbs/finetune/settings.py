"""What a recipe of `kdcli finetune` may hold."""

from kdcli.recipe.sections import Section
from kdcli.workloads.settings import FinetuneRecipe

RECIPES: dict[str, type[Section]] = {
    "finetune": FinetuneRecipe
}  # Folder of `recipes/` -> settings model

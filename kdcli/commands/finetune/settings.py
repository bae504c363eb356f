"""What a recipe of `kdcli finetune` may hold."""

from kdcli.downstream.settings import FinetuneRecipe
from kdcli.recipe.sections import Section

RECIPES: dict[str, type[Section]] = {
    "finetune": FinetuneRecipe
}  # Folder of `recipes/` -> settings model

"""A mixture ─▶ recipes for every tool that can make it."""

from __future__ import annotations

from scoremode.studies.attribution.recipes.exllamav3 import exllamav3_recipe
from scoremode.studies.attribution.recipes.llama_quantize import llama_quantize_recipe
from scoremode.studies.attribution.recipes.llm_compressor import llm_compressor_recipe
from scoremode.studies.attribution.recipes.mixture import Mixture, WrittenRecipe


def write_recipes(mixture: Mixture) -> list[WrittenRecipe]:
    """The recipes as texts; the caller stores each under a prefix and its suffix."""
    found = [llm_compressor_recipe(mixture), llama_quantize_recipe(mixture), exllamav3_recipe(mixture)]
    return [recipe for recipe in found if recipe is not None]

"""Recipes of T5."""

from ..config import Recipe

RECIPES: dict[str, Recipe] = {}

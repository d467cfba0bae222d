"""Recipes of BART and mBART."""

from ..config import Recipe

RECIPES: dict[str, Recipe] = {}

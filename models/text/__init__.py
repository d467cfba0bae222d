"""Runs models on texts: generation, translation, scoring, embedding, chat and few-shot prompts."""

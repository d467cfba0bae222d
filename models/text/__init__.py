"""Front ends for texts: generation, translation, scores, embeddings, chat and prompts."""

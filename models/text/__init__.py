"""From text to text: generation, translation, scores, embeddings, chat and prompts."""

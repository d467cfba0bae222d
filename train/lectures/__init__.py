"""Methods from the lectures: ensembles, word vectors, and prompts that grow by each answer."""

"""Methods that the lectures describe: ensembles, word vectors, and prompts that grow by answers."""

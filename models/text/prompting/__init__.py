"""Few-shot prompts: log-probabilities of answers, and the accuracy for each number of examples."""

"""Published data sets as records: the interface, the Hugging Face hub, and opening by name."""

"""The heads of models: their modules, outputs, and records."""

"""The heads of models: their modules, their outputs, and their properties."""

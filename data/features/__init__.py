"""From text to model inputs, and from model outputs back to text."""

"""DeBERTa: encoders whose attention treats the content and the position of tokens separately."""

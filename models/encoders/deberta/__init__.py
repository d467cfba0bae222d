"""DeBERTa: encoders whose attention separates contents and distances."""

"""What a trained model is used for; one file per command."""

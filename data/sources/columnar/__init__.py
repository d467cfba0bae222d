"""Rows with named columns, read in pieces: Parquet, Arrow and Hugging Face data sets."""

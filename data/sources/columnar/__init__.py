"""Reads rows with named columns, in pieces, from Parquet, Arrow and Hugging Face data sets."""

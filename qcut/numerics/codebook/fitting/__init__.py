"""Fits codebook weights to what their layer reads and to what the loss feels."""

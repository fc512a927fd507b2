"""Attention of one new token of each sequence to what a cache holds."""

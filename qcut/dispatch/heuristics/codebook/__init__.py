"""Tiles of products with codebook weights."""

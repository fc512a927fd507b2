"""Decoder-only models with memory for their context allocated once."""

"""Runs decoder-only models: prompts, steps and generation, with memory for the context allocated once."""

"""Text of the engine: tokenization of prompts, incremental detokenization, and stop strings."""

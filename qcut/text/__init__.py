"""Text in and out of the engine: prompts, pieces of text as tokens come, and strings that end a text."""

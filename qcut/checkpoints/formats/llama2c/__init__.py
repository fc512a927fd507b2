"""Files of llama2.c: checkpoints and tokenizers."""

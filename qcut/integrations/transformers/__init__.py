"""transformers' own doors: ``from_pretrained`` quantizes while loading, ``save_pretrained`` writes what it reads."""

"""``qcut bench``: schemes on this machine, one row each, and which to take."""

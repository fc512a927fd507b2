"""Writers killed at random moments: ``python -m tests.kills --help``."""

"""The ``qcut`` command."""

"""The one exception of emitters."""


class EmitError(ValueError):
    """A kernel description that no family can build; the message names the constraint."""

"""Files that a crash cannot half write."""

"""Files that are replaced whole (a crash leaves the old contents or the new ones) and read within bounds."""

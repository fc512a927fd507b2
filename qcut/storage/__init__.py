"""Files and tensor files that are replaced whole: a crash leaves the old contents or the new ones."""

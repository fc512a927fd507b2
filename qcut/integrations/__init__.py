"""qcut inside other libraries, through the doors that they hold open for it."""

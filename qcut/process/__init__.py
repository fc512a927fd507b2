"""What qcut asks of its process: locks that outlive a fork, bars of progress, versions of other packages."""

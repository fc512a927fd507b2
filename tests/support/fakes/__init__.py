"""Stand-ins for the driver, a GPU and launches."""

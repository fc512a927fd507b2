"""What serves the operators on CUDA: plans and launches."""

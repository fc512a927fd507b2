"""Statistics of real batches: ranges of activations, second moments, curvatures of the loss."""

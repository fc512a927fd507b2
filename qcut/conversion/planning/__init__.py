"""`qcut.plan`: a scheme for each layer, within a budget of loss, bits or time."""

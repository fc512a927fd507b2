"""What lies between a decoder's projections."""

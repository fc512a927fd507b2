"""Products of few tokens, bound by the weights' traffic."""

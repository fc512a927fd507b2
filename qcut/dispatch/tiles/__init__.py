"""Tiles that a shape is given by a model of their cost, where a family has too many for a menu."""

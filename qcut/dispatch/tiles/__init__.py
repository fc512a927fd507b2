"""Chooses tiles by a cost model, for families with too many tiles for a menu."""

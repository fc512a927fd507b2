"""Limits on connections, bodies, texts and the log, so that no request harms another."""

"""Attention backends whose pages are compressed in place."""

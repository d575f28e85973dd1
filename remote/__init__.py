"""Samplers on other machines; see README.md."""

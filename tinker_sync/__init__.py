"""Blocking client for the Tinker training and sampling API."""

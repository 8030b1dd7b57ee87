"""Bytes to types and back, and what servers speak. Pure: no threads, sockets or clock."""

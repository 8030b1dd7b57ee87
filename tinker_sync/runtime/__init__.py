"""The threads of a client and what they share: queues, budgets, pollers. See `core.py` for how it fits."""

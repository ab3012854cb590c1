"""Bytes: where plans are carried out against storage.

Empty so far. Stores, formats and execution arrive here; planning does not need them.
"""

"""Ranks: where the processes of a job exchange their plans.

Empty so far. Collectives arrive here; planning does not need them.

>>> import shardplan.dist
>>> shardplan.dist.__name__
'shardplan.dist'
"""

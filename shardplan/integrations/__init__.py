"""Training frameworks that save and load with shardplan; each module needs its framework.

`torchtitan` is a checkpoint manager for its trainer, `lightning` a plugin and a strategy for its
trainer, `accelerate` saves what ``Accelerator.prepare`` returned. None of them is imported here.
"""

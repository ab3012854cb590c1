"""Ranks that are processes of a torch.distributed job."""

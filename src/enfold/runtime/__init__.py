"""Who runs where: the same worker as one rank in this process, or as N ranks in N processes."""

"""Executes whole notebooks: here with nbclient, or in a pod of a cluster."""

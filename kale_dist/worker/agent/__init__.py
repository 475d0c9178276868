"""Supervises ranks: the agent, its fork server's pool, the ranks' pipes, the job's log and verdict."""

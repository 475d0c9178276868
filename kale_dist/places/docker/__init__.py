"""Runs jobs in containers of a Docker engine, or of what answers like one."""

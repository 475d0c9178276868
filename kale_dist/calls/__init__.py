"""A call, from its arguments to a job that was submitted: the verbs, the checks, and what is settled in between."""

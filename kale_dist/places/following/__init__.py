"""Following a job that runs elsewhere: its folder here is a copy of the head's, kept up to date by one process.

    backend       `FollowedBackend`: the `Backend` protocol over a `Place`, with a follower for each job
    follower      follows one job: looks at its pods, decides how a run ended, fetches its results, starts the next run
    copy          reads the log and the events of one run, and appends them to the files here
    client        sends signed requests to the head's byte server
    verdict       pure: a job's state from its head's events and its place; how a run ended without a verdict of its head

Only the process that holds the lock of a job's folder writes there; others read.
"""

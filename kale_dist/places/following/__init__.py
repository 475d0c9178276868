"""Following a job that runs elsewhere: its folder here is a copy of the head's, kept up to date by one process.

    backend       `FollowedBackend`: the `Backend` protocol over a `Place`, with a follower for each job
    follower      follows one job from life to life: ends it, or renews it after a loss
    life          one life: reaches its head, decides how it has ended, fetches its results
    sight         what the place reports, and for how long
    copy          reads the log and the events of one head, and appends them to the files here
    client        sends signed requests to the head's byte server
    verdict       pure: a job's state from its head's events and its place; how it ended without a verdict of its head

Only the process that holds the lock of a job's folder writes there; others read.
"""

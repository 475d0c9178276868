"""Following a job that runs elsewhere: its folder here is a copy of the head's, kept up to date by one process.

    reader    reads a job's folder: log, events, progress; for all backends, local too
    copy      the copy of one run: appends the head's blocks to the same files here, says which numbers are missing
    client    signed requests to the head's byte server
    follower  one job: looks at its containers, copies, decides how it ended, starts the next run
    backend   `FollowedBackend`: the `Backend` protocol over a `Place`

Only the process that holds the lock of a job's folder writes there; others read.
"""

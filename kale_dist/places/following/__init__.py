"""Following a job that runs elsewhere: its folder here is a copy of the head's, kept up to date by one process.

    reader        reads a job's folder: log, events, progress; for all backends, local too
    copy          the copy of one run (one life of a head): brings the head's blocks, by a connection, else from its output;
                  appends them to the same files here, says which numbers are missing
    client        signed requests to the head's byte server
    verdict       how a job stands, and how one ended whose head has not said so; pure
    results       brings outcomes, checkpoints and last words here
    follower      one job: looks at its pods, decides how a run ended, starts the next one
    backend       `FollowedBackend`: the `Backend` protocol over a `Place`

Only the process that holds the lock of a job's folder writes there; others read.
"""

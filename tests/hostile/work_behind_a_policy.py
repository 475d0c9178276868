"""What ranks run in pods without pytest."""

import time


def waits_and_says(seconds):
    time.sleep(seconds)
    return 7

"""What ranks run in pods and containers without pytest."""

import time


def waits_and_says(seconds):
    print("is there", flush=True)
    time.sleep(seconds)
    return 7

"""The notebook's side of a snapshot: `capture.capture` takes one."""

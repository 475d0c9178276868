"""The notebook's side of a snapshot: `capture.capture` takes one, `process.capture_process` what goes with it."""

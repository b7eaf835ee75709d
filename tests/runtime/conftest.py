"""Makes the helpers in this folder importable from the test folders below it."""

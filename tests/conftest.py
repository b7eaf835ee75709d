"""Makes the helpers in this folder importable from all tests."""

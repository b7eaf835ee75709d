"""The CPU engine in C++: see README.md."""

"""Fetches one URL and prints the body: `python -m e2e.fetch URL`, run where a service's address works."""

import sys
import urllib.request

if __name__ == "__main__":
    with urllib.request.urlopen(sys.argv[1], timeout=10) as response:
        sys.stdout.write(response.read().decode())

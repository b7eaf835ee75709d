"""`python -m busload_operator.cli`: the same command where its script is not on the path."""

from busload_operator.cli import main

if __name__ == "__main__":
    main()

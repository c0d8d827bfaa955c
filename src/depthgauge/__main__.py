"""`python -m depthgauge` is the command `depthgauge`."""

from depthgauge.cli.main import main

if __name__ == "__main__":
    main()

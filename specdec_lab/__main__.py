"""`python -m specdec_lab` is `specdec-lab`."""

from specdec_lab.cli import main

if __name__ == "__main__":
    raise SystemExit(main())

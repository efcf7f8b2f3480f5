"""`python -m tarn.cli`, the same as `tarn`."""

from tarn.cli.application import main

main()

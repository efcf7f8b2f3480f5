"""`python -m app.cli`, the same as `tarn`."""

from app.cli.commands import main

main()

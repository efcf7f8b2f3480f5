"""The SQL buffer that writes land in: write, rotate, drain, overlay."""

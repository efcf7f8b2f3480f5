"""The command line: processes of the server, and a client of its API."""

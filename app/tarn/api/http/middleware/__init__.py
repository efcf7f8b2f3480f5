"""Middleware and the HTTP protocol: what every request passes before its route."""

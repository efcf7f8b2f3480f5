"""HTTP: one thin router per resource, and what every request passes through."""

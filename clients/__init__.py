"""Clients of Tarn: the OpenAPI document, generated clients, and detection of breaking changes."""

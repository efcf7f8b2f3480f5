"""Clients of Tarn: the API's document, what is generated from it, and what a change of it would break."""

"""Commands of `tarn`: one package per subject, and `processes`, which run the server."""

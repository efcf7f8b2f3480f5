"""Request pipeline: middleware, authentication, problems, paging, streaming, concurrency limits."""

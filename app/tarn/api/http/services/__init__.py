"""The container of the services that routes use, and the state that it holds in memory."""

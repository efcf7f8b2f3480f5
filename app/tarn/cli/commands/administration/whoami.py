"""Who the server takes the caller for."""

from tarn.cli.session import CommandSession


def whoami(session: CommandSession) -> None:
    """Show the tenant, key, grants and limits that you have."""
    me = session.client.document("GET", "/v1/whoami")
    if session.output.as_json:
        session.output.json(me)
    else:
        session.output.record({**me, "grants": [f"{grant['level']} on {grant['dataset']}" for grant in me["grants"]]})

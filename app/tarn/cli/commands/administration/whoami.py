"""`tarn whoami`: the caller's tenant, key, grants and limits."""

from tarn.cli.session import CommandSession


def whoami(session: CommandSession) -> None:
    """Show the tenant, key, grants and limits that you have."""
    me = session.connection.read("/v1/whoami")
    if session.output.as_json:
        session.output.json(me)
    else:
        session.output.record({**me, "grants": [f"{grant['level']} on {grant['dataset']}" for grant in me["grants"]]})

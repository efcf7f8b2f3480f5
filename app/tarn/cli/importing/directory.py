"""The datasets of a directory: all are looked at before the first is written."""

from tarn.cli.failures import Failure, Incomplete, Misuse
from tarn.cli.importing.dataset import DatasetImport, ImportOptions
from tarn.cli.importing.layouts import DatasetDirectory, find_datasets
from tarn.cli.importing.report import ImportReport
from tarn.cli.session import CommandSession


def import_directory(
    session: CommandSession, path: str, names: list[str], name: str | None, choices: ImportOptions, dry_run: bool
) -> None:
    """Import the datasets of a directory, or those of these names. Raises Misuse, and Incomplete if a count differs."""
    places = _chosen(find_datasets(path), names, path)
    if name is not None and len(places) > 1:
        raise Misuse("--as is for one dataset: choose it with --dataset")
    imports = [DatasetImport(session, place, name, choices) for place in places]
    for one in imports:
        session.output.note(f"looking at {one.folder}")
        one.report  # noqa: B018 - reads all that will be sent, so that damage is found before anything is
    for done, one in enumerate(imports):
        try:
            if not dry_run:
                one.run()
        except Failure:
            if done:
                session.output.note(f"{done} of {len(imports)} datasets are imported, and the others are not:")
            raise
        if not session.output.as_json:
            _show(session, one.report)
    if session.output.as_json:
        session.output.json([one.report.document() for one in imports])
    differing = [line for one in imports for line in one.report.differing(only_missing=choices.into)]
    if differing:
        raise Incomplete("what is there is not what the source has: " + "; ".join(differing))


def renames(texts: list[str]) -> dict[str, str]:
    """What origins are to be called. Raises Misuse for what is not `OLD=NEW`."""
    renamed = {}
    for text in texts:
        old, _, new = text.rpartition("=")
        if not old or not new:
            raise Misuse(f"--rename-origin {text!r} must look like OLD=NEW")
        renamed[old] = new
    return renamed


def _chosen(places: list[DatasetDirectory], names: list[str], path: str) -> list[DatasetDirectory]:
    if not names:
        return places
    known = {place.name(): place for place in places}
    if missing := [name for name in names if name not in known]:
        raise Misuse(f"{path} has no dataset {missing[0]}, but {', '.join(known)}")
    return [known[name] for name in dict.fromkeys(names)]


def _show(session: CommandSession, report: ImportReport) -> None:
    for warning in report.warnings:
        session.output.note(f"warning: {warning}")
    if report.rejected:
        session.output.note(f"warning: {report.rejected} statements were refused, and are left out")
    session.output.note(f"{report.dataset}: {report.state}, from {report.folder} ({report.layout})")
    if report.state == "done before":
        session.output.note("nothing was sent: give --into to send it again")
    rows = report.rows()
    columns = ("what", "source", "target") if "target" in rows[0] else ("what", "source")
    session.output.table(rows, *columns)

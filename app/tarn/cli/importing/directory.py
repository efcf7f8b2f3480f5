"""Import of a directory's datasets: all are read and checked before the first is written."""

from tarn.cli.failures import FAILURES, Incomplete, Misuse
from tarn.cli.importing.dataset import DatasetImport, ImportOptions
from tarn.cli.importing.layouts import DatasetDirectory, find_datasets
from tarn.cli.importing.report import ImportReport
from tarn.cli.session import CommandSession


def import_directory(
    session: CommandSession, path: str, names: list[str], name: str | None, options: ImportOptions, dry_run: bool
) -> None:
    """Import the datasets of a directory, or those of these names. Raises Misuse, and Incomplete if a count differs."""
    directories = _chosen(find_datasets(path), names, path)
    if name is not None and len(directories) > 1:
        raise Misuse("--as is for one dataset: choose it with --dataset")
    imports = [DatasetImport(session, directory, name, options) for directory in directories]
    for dataset in imports:
        session.output.note(f"reading {dataset.folder}")
        dataset.report  # noqa: B018 - reads everything, so that damage is found before anything is sent
    for done, dataset in enumerate(imports):
        try:
            if not dry_run:
                dataset.run()
        except FAILURES:
            if done:
                session.output.note(f"{done} of {len(imports)} datasets were imported; the others were not:")
            raise
        if not session.output.as_json:
            _show(session, dataset.report)
    if session.output.as_json:
        session.output.json([dataset.report.document() for dataset in imports])
    differing = [line for dataset in imports for line in dataset.report.differing(only_missing=options.into)]
    if differing:
        raise Incomplete("the counts of source and target differ: " + "; ".join(differing))


def renames(texts: list[str]) -> dict[str, str]:
    """Return new names of origins by old ones. Raises Misuse for what is not `OLD=NEW`."""
    renamed = {}
    for text in texts:
        old, _, new = text.rpartition("=")
        if not old or not new:
            raise Misuse(f"--rename-origin {text!r} must look like OLD=NEW")
        renamed[old] = new
    return renamed


def _chosen(directories: list[DatasetDirectory], names: list[str], path: str) -> list[DatasetDirectory]:
    if not names:
        return directories
    known = {directory.name(): directory for directory in directories}
    if missing := [name for name in names if name not in known]:
        raise Misuse(f"{path} has no dataset {missing[0]}, but {', '.join(known)}")
    return [known[name] for name in dict.fromkeys(names)]


def _show(session: CommandSession, report: ImportReport) -> None:
    for warning in report.warnings:
        session.output.note(f"warning: {warning}")
    if report.rejected:
        session.output.note(f"warning: {report.rejected} statements were rejected and are left out")
    session.output.note(f"{report.dataset}: {report.state}, from {report.folder} ({report.layout})")
    if report.state == "done before":
        session.output.note("nothing was sent: give --into to send it again")
    rows = report.rows()
    columns = ("what", "source", "target") if "target" in rows[0] else ("what", "source")
    session.output.table(rows, *columns)

"""Import of one dataset of an ftm-lakehouse.

1. check    read the source and the target's state, and report every error; nothing is changed
2. target   create the dataset if it does not exist, and mark the import as begun, so that it can be resumed
3. stage    send all statements to a stage; the server validates them, and no reader sees them
4. files    upload each file; files that the target has already are not sent again
5. mappings store those that Tarn can use
6. commit   commit the stage: all statements become visible at once; mark the import as done
7. compare  compare the counts of source and target

After a crash before step 6 no statement is visible: the stage expires. After a crash between the commit and the mark,
running the command again imports the same statements once more, which changes nothing.
"""

import hashlib
from dataclasses import dataclass, field
from functools import cached_property

from tarn_client.errors import Problem

from tarn.cli.failures import Incomplete, Misuse
from tarn.cli.importing import archive, dataset_metadata
from tarn.cli.importing.archive_files import ArchiveUpload
from tarn.cli.importing.layouts import DatasetDirectory
from tarn.cli.importing.report import ImportReport
from tarn.cli.importing.stage import ImportStage, StageExpired, arrow_parts
from tarn.cli.importing.tables import ImportCounts, SourceStatements
from tarn.cli.importing.target_dataset import ImportTarget
from tarn.cli.importing.unflushed import pending
from tarn.cli.output.progress import progress
from tarn.cli.session import CommandSession

BEGUN, DONE = "begun", "done"
ATTEMPTS = 3
"""How often statements are sent to a stage, if uploading files takes longer than a stage lives."""

EXAMPLES = 5
"""Maximum number of errors of the source that are listed when the import is refused."""


@dataclass(frozen=True)
class ImportOptions:
    """The options of `tarn import` for directories."""

    into: bool = False
    hidden: bool = False
    skip: bool = False
    compare: bool = True
    quiet: bool = False
    renamed: dict[str, str] = field(default_factory=dict)


class DatasetImport:
    """The import of one dataset. Creating it reads and checks everything, and changes nothing."""

    def __init__(
        self, session: CommandSession, directory: DatasetDirectory, name: str | None, options: ImportOptions
    ) -> None:
        """Raises Misuse if the source is invalid or the target has data, and LakeError."""
        self._session = session
        self._directory = directory
        self._options = options
        self.target = ImportTarget(session.connection, dataset_metadata.checked_name(name or directory.name()))
        self.exists = self.target.exists()
        self._statements = SourceStatements(directory, options.hidden)
        self._survey = archive.survey(directory.archive)
        self._mappings = dict(dataset_metadata.mappings(directory))
        self._metadata, self._ignored_fields = dataset_metadata.metadata(directory)
        self._progress = self.target.mark(self._source) if self.exists else None
        self.done = self._progress is not None and self._progress.get("state") == DONE and not options.into
        if self.exists and self._progress is None and not options.into:
            self.target.require_empty()
        if self._survey.errors and not options.skip:
            first = "; ".join(self._survey.errors[:EXAMPLES])
            raise Misuse(
                f"{len(self._survey.errors)} files of {directory.archive} cannot be imported, "
                f"give --on-error skip to leave them out: {first}"
            )
        self._check_origins()

    @property
    def folder(self) -> str:
        """The directory of the source."""
        return self._directory.folder

    @cached_property
    def counts(self) -> ImportCounts:
        """The number of statements and entities to import."""
        return self._renamed(self._statements.count())

    @property
    def _source(self) -> str:
        """The id of the source in the progress mark: its table's id, or its directory if it has no table."""
        folder = hashlib.sha1(self._directory.folder.encode(), usedforsecurity=False).hexdigest()
        return self._statements.identity or f"folder-{folder}"

    @cached_property
    def report(self) -> ImportReport:
        """The report of what will be imported. Reads all of it; raises Misuse if data is damaged."""
        report = ImportReport(self._directory.folder, self.target.name, "done before" if self.done else "planned")
        layout = self._statements.layout
        report.layout = "no statements" if layout is None else layout.described
        report.version = self._statements.version
        report.source(self.counts, self._survey.files, len(self._mappings))
        report.size, report.texts = self._survey.size, self._survey.texts
        report.warnings += self._warnings()
        return report

    def run(self) -> None:
        """Import the dataset, unless it was imported. Raises LakeError, and Misuse if the source has changed."""
        if self.done:
            return
        report = self.report
        if not self.exists:
            self.target.create(self._metadata)
        about = {"folder": self._directory.folder[-1000:], "version": self._statements.version}
        self.target.set_mark(self._source, state=BEGUN, **about)
        self._write(report)
        self.target.set_mark(self._source, state=DONE, **about)
        report.state = "imported"
        if self._options.compare:
            report.target(self.target.count(), self.target.files(), self.target.mappings())

    def _write(self, report: ImportReport) -> None:
        stage = self._staged()
        for attempt in range(ATTEMPTS):
            try:
                if attempt == 0:
                    self._put_files(report)
                    self._put_mappings(report)
                stage.commit()
            except StageExpired:
                stage = self._staged()
                continue
            except BaseException:
                stage.abort()
                raise
            break
        else:
            raise Incomplete(
                f"the stage expired {ATTEMPTS} times before it was committed: raise TARN_STAGE_EXPIRY on the server"
            )
        report.rejected, report.errors = stage.rejected, stage.invalid

    def _staged(self) -> ImportStage:
        """Return a stage with all statements. Aborts it and raises Problem if the server refuses one."""
        session, options = self._session, self._options
        stage = ImportStage(
            session.connection, self.target.name, None, self._directory.folder, "skip" if options.skip else "abort"
        )
        try:
            with progress(session.output, "statements", options.quiet, rows=self.counts.statements) as advance:
                for part in arrow_parts(self._statements.batches(self._new_origins)):
                    stage.send(part)
                    advance(len(part.body), part.rows)
        except Problem as problem:
            if problem.slug == "schema-violation":
                problem.add_note("nothing is imported; give --on-error skip to leave such statements out")
            stage.abort()
            raise
        except BaseException:
            stage.abort()
            raise
        return stage

    def _put_files(self, report: ImportReport) -> None:
        if not self._survey.files:
            return
        options, resumed = self._options, self.exists
        with progress(self._session.output, "files", options.quiet, size=self._survey.size, unit="files") as advance:
            upload = ArchiveUpload(self.target, advance, resumed, options.skip)
            upload.upload_all(self._directory.archive)
        report.warnings += upload.warnings[:100]

    def _put_mappings(self, report: ImportReport) -> None:
        for checksum, mapping in self._mappings.items():
            try:
                self.target.put_mapping(self._new_hash(checksum), mapping)
            except Problem as problem:
                if problem.status != 422 and problem.slug != "invalid-format":
                    raise
                report.warnings.append(f"the mapping for {checksum} is invalid and left out: {problem.detail}")

    def _new_hash(self, checksum: str) -> str:
        """Return the SHA-256 of the file that a mapping is for, or the source's hash if the file is missing."""
        return self._hashes.get(checksum, checksum)

    @cached_property
    def _hashes(self) -> dict[str, str]:
        known: dict[str, str] = {}
        for checksum in self._mappings:
            content = archive.find(self._directory.archive, checksum)
            new = archive.sha256(content) if content is not None and content.blob is not None else None
            if new is not None and new != checksum:
                known[checksum] = new
        return known

    @cached_property
    def _new_origins(self) -> dict[str, str]:
        """New names of origins: those of --rename-origin, and those of mappings, which contain the file's hash."""
        mapped = {f"mapping:{old}": f"mapping:{new}" for old, new in self._hashes.items()}
        return mapped | self._options.renamed

    def _check_origins(self) -> None:
        from tarn.model.names import Origin

        for origin in self._statements.origins():
            try:
                Origin(self._new_origins.get(origin, origin))
            except ValueError as error:
                raise Misuse(f"{error}: rename it with --rename-origin '{origin}=NEW'") from None

    def _renamed(self, counts: ImportCounts) -> ImportCounts:
        """Return the counts by new origin. If two origins become one, an entity of both is counted twice."""
        renamed = ImportCounts(counts.statements, counts.entities)
        for origin, (statements, entities) in counts.origins.items():
            name = self._new_origins.get(origin, origin)
            before = renamed.origins.get(name, (0, 0))
            renamed.origins[name] = (before[0] + statements, before[1] + entities)
        return renamed

    def _warnings(self) -> list[str]:
        warnings = [*pending(self._directory)]
        before = (self._progress or {}).get("version")
        if self.done and before != self._statements.version:
            warnings.append(
                f"it was imported at version {before}, and the source is at {self._statements.version}: give --into to "
                "add what is new; what was deleted since then is kept"
            )
        hidden, survey = self._statements.hidden(), self._survey
        if not self._options.hidden:
            if hidden.unlisted:
                warnings.append(
                    f"{hidden.unlisted} statements have no row in the source's translog, which hides them, "
                    "and are left out: give --hidden to import them"
                )
            if hidden.rewritten:
                warnings.append(
                    f"{hidden.rewritten} statements were written again after their delete, the source hides them, "
                    "and they are left out: give --hidden to import them"
                )
        for count, sentence in (
            (self._statements.roles(), "rows have a role, which Tarn does not store: they are imported without it"),
            (survey.unrecorded, "files of the archive have no record, and are left out"),
            (survey.others, "other files in the archive are left out"),
            (len(survey.renamed), f"files get a new path, such as {', '.join(survey.renamed[:3])}"),
        ):
            if count:
                warnings.append(f"{count} {sentence}")
        warnings += survey.errors[:100]
        if self._ignored_fields and not self.exists:
            warnings.append(
                f"invalid fields of {self._directory.at('config.yml')} are left out: {', '.join(self._ignored_fields)}"
            )
        return warnings

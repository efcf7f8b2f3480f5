"""A lakehouse's dataset on its way into one of Tarn.

1. look     everything that can be wrong with the source or forbids the target is found; nothing is changed
2. target   made if it is not there, and marked as begun, so that running the command again goes on
3. stage    all statements are sent, and checked by the server; nobody sees them
4. files    each is put when it is whole; those that are there are not sent again
5. mappings those that Tarn can use
6. commit   the statements become visible, all of them at once; the mark says that it is done
7. compare  what is there now with what was to come

A crash before 6 leaves no statement behind: the stage expires. One after it leaves a mark that says `begun`: running
the command again says the same once more, which changes nothing.
"""

import hashlib
from dataclasses import dataclass, field
from functools import cached_property

from tarn.cli.failures import Incomplete, Misuse, ProblemAnswered
from tarn.cli.importing import archive
from tarn.cli.importing import dataset_metadata as described
from tarn.cli.importing.archive_files import ArchiveUpload
from tarn.cli.importing.layouts import DatasetDirectory
from tarn.cli.importing.report import ImportReport
from tarn.cli.importing.stage import Stage, StageExpired, arrow_parts
from tarn.cli.importing.tables import ImportCounts, SourceStatements
from tarn.cli.importing.target_dataset import ImportTarget
from tarn.cli.importing.unflushed import pending
from tarn.cli.output.progress import progress
from tarn.cli.session import CommandSession

BEGUN, DONE = "begun", "done"
ATTEMPTS = 3
"""How often statements are staged, if files take longer than a stage lives."""


@dataclass(frozen=True)
class ImportOptions:
    """What the person at the terminal wants."""

    into: bool = False
    hidden: bool = False
    skip: bool = False
    compare: bool = True
    quiet: bool = False
    renamed: dict[str, str] = field(default_factory=dict)


class DatasetImport:
    """One dataset's import. Building it looks at everything and changes nothing."""

    def __init__(
        self, session: CommandSession, place: DatasetDirectory, name: str | None, choices: ImportOptions
    ) -> None:
        """Raises Misuse for what is wrong with the source or forbids the target, ProblemAnswered, Unreachable."""
        self._session = session
        self._place = place
        self._choices = choices
        self.target = ImportTarget(session.client, described.checked_name(name or place.name()))
        self.exists = self.target.exists()
        self._statements = SourceStatements(place, choices.hidden)
        self._survey = archive.survey(place.archive)
        self._mappings = dict(described.mappings(place))
        self._metadata, self._unkept = described.metadata(place)
        self._mark = self.target.mark(self._source) if self.exists else None
        self.done = self._mark is not None and self._mark.get("state") == DONE and not choices.into
        if self.exists and self._mark is None and not choices.into:
            self.target.require_empty()
        if self._survey.faults and not choices.skip:
            first = "; ".join(self._survey.faults[: archive.EXAMPLES])
            raise Misuse(
                f"{len(self._survey.faults)} files of {place.archive} cannot be imported, "
                f"give --on-error skip to leave them out: {first}"
            )
        self._check_origins()

    @property
    def folder(self) -> str:
        """Where the source is."""
        return self._place.folder

    @cached_property
    def counts(self) -> ImportCounts:
        """How many statements and entities are to come."""
        return self._renamed(self._statements.count())

    @property
    def _source(self) -> str:
        """What tells this source from others: the table's own id, or its folder where there is none."""
        folder = hashlib.sha1(self._place.folder.encode(), usedforsecurity=False).hexdigest()
        return self._statements.identity or f"folder-{folder}"

    @cached_property
    def report(self) -> ImportReport:
        """What there is to be imported, all of it read once. Raises Misuse if data is damaged."""
        report = ImportReport(self._place.folder, self.target.name, "done before" if self.done else "planned")
        layout = self._statements.layout
        report.layout = "no statements" if layout is None else layout.described
        report.version = self._statements.version
        report.source(self.counts, self._survey.files, len(self._mappings))
        report.size, report.texts = self._survey.size, self._survey.texts
        report.warnings += self._warnings()
        return report

    def run(self) -> None:
        """Do it, unless it was done. Raises ProblemAnswered, Unreachable, and Misuse if the source was changed."""
        if self.done:
            return
        report = self.report
        if not self.exists:
            self.target.create(self._metadata)
        about = {"folder": self._place.folder[-1000:], "version": self._statements.version}
        self.target.set_mark(self._source, state=BEGUN, **about)
        self._write(report)
        self.target.set_mark(self._source, state=DONE, **about)
        report.state = "imported"
        if self._choices.compare:
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
            raise Incomplete("the stage expired again and again: its lifetime, TARN_STAGE_EXPIRY, is too short")
        report.rejected, report.faults = stage.rejected, stage.faults

    def _staged(self) -> Stage:
        """A stage with all statements. Raises ProblemAnswered for one that the server refuses, and nothing is kept."""
        session, choices = self._session, self._choices
        stage = Stage(session.client, self.target.name, None, self._place.folder, "skip" if choices.skip else "abort")
        try:
            with progress(session.output, "statements", choices.quiet, rows=self.counts.statements) as passed:
                for part in arrow_parts(self._statements.batches(self._new_origins)):
                    stage.send(part)
                    passed(len(part.body), part.rows)
        except ProblemAnswered as problem:
            if problem.slug == "schema-violation":
                problem.hint = "nothing is imported; give --on-error skip to leave such statements out"
            stage.abort()
            raise
        except BaseException:
            stage.abort()
            raise
        return stage

    def _put_files(self, report: ImportReport) -> None:
        if not self._survey.files:
            return
        choices, resumed = self._choices, self.exists
        with progress(self._session.output, "files", choices.quiet, size=self._survey.size, unit="files") as passed:
            files = ArchiveUpload(self.target, passed, resumed, choices.skip)
            files.put_all(self._place.archive)
        report.warnings += files.faults[:100]

    def _put_mappings(self, report: ImportReport) -> None:
        for checksum, mapping in self._mappings.items():
            try:
                self.target.put_mapping(self._new_hash(checksum), mapping)
            except ProblemAnswered as problem:
                if problem.problem.get("status") != 422 and problem.slug != "invalid-format":
                    raise
                report.warnings.append(f"the mapping for {checksum} is left out, as it does not fit: {problem}")

    def _new_hash(self, checksum: str) -> str:
        """The SHA-256 of the content that a mapping is for; what the source calls it if that is not to be found."""
        return self._hashes.get(checksum, checksum)

    @cached_property
    def _hashes(self) -> dict[str, str]:
        known: dict[str, str] = {}
        for checksum in self._mappings:
            content = archive.find(self._place.archive, checksum)
            new = archive.sha256(content) if content is not None and content.blob is not None else None
            if new is not None and new != checksum:
                known[checksum] = new
        return known

    @cached_property
    def _new_origins(self) -> dict[str, str]:
        """Origins that are called otherwise here: what a mapping said is its own under its new hash, too."""
        mapped = {f"mapping:{old}": f"mapping:{new}" for old, new in self._hashes.items()}
        return mapped | self._choices.renamed

    def _check_origins(self) -> None:
        from tarn.model.names import Origin

        for origin in self._statements.origins():
            try:
                Origin(self._new_origins.get(origin, origin))
            except ValueError as error:
                raise Misuse(f"{error}: rename it with --rename-origin '{origin}=NEW'") from None

    def _renamed(self, counts: ImportCounts) -> ImportCounts:
        """The counts under the names that origins get. Of two that become one, entities of both count once or twice."""
        renamed = ImportCounts(counts.statements, counts.entities)
        for origin, (statements, entities) in counts.origins.items():
            name = self._new_origins.get(origin, origin)
            before = renamed.origins.get(name, (0, 0))
            renamed.origins[name] = (before[0] + statements, before[1] + entities)
        return renamed

    def _warnings(self) -> list[str]:
        warnings = [*pending(self._place)]
        before = (self._mark or {}).get("version")
        if self.done and before != self._statements.version:
            warnings.append(
                f"it was imported at version {before}, and the source is at {self._statements.version}: give --into to "
                "add what is new; what was deleted since then is not taken away"
            )
        hidden, survey = self._statements.hidden(), self._survey
        if not self._choices.hidden:
            if hidden.unlisted:
                warnings.append(
                    f"{hidden.unlisted} statements have no line in the source's translog, so that it does not show "
                    "them, and are left out: give --hidden to take them"
                )
            if hidden.said_again:
                warnings.append(
                    f"{hidden.said_again} statements were said again after their delete, the source does not show "
                    "them, and they are left out: give --hidden to take them"
                )
        for count, sentence in (
            (self._statements.roles(), "rows name a role, which Tarn has no place for: what they say is imported"),
            (survey.unrecorded, "contents of the archive have no record, and are left out"),
            (survey.others, "other files lie in the archive beside contents, and are left out"),
            (len(survey.renamed), f"files get another path, such as {', '.join(survey.renamed[:3])}"),
        ):
            if count:
                warnings.append(f"{count} {sentence}")
        warnings += survey.faults[:100]
        if self._unkept and not self.exists:
            warnings.append(
                f"fields of {self._place.at('config.yml')} that do not fit are left out: {', '.join(self._unkept)}"
            )
        return warnings

"""Storage layout: every path of the lake is built here. Paths are relative to the lake's root, separated by `/`.

Names arrive as the types of `tarn.model.names`, so no path can leave its folder. Ids (`str`) come from
`new_id` or are hexadecimal digests, never text of a caller.
"""

from dataclasses import dataclass
from datetime import UTC, datetime
from urllib.parse import quote

from tarn.model.datasets.export import DELTA_INDEX, ExportKind
from tarn.model.datasets.snapshot import TableName
from tarn.model.ids import stamp
from tarn.model.names import Checksum, DatasetName, FileName, LockName, Origin, RefName, TagKey


def data_file(column: str, value: str, file_id: str) -> str:
    """Return the path of a data file below its table's folder, in a partition named as Hive and Spark name it."""
    return f"{column}={quote(value, safe='')}/{file_id}.parquet"


@dataclass(frozen=True)
class Versions:
    """The folder of former contents of replaced documents: `versions/YYYY/MM/{timestamp}/{filename}`."""

    folder: str

    def at(self, moment: datetime, filename: FileName) -> str:
        """Return the path of one former content. Sorting these paths sorts them by time."""
        utc = moment.astimezone(UTC)
        return f"{self.folder}/{utc:%Y}/{utc:%m}/{stamp(utc)}/{filename}"


@dataclass(frozen=True)
class Layout:
    """The lake's root."""

    lake = "lake.json"
    index = "index.json"
    config = "config.yml"
    versions = Versions("versions")
    probes = ".probe"
    restoring = ".restoring"
    """Names the backup that is being restored; deleted at the end of the restore."""

    def probe(self, probe_id: str) -> str:
        """Return the path of an object that is written and deleted to test the store."""
        return f"{self.probes}/{probe_id}"

    def dataset(self, name: DatasetName) -> "DatasetLayout":
        return DatasetLayout(name)


@dataclass(frozen=True)
class DatasetLayout:
    """One dataset's folder."""

    name: DatasetName

    @property
    def root(self) -> str:
        return str(self.name)

    @property
    def config(self) -> str:
        return f"{self.name}/config.yml"

    @property
    def index(self) -> str:
        return f"{self.name}/index.json"

    @property
    def lock(self) -> str:
        """The mirror of the dataset's lease."""
        return f"{self.name}/.LOCK"

    @property
    def versions(self) -> Versions:
        return Versions(f"{self.name}/versions")

    # The archive

    @property
    def archive(self) -> str:
        return f"{self.name}/archive"

    def blob(self, checksum: Checksum) -> str:
        """Return the folder of one content with its records and texts."""
        return f"{self.archive}/{checksum[0:2]}/{checksum[2:4]}/{checksum[4:6]}/{checksum}"

    def blob_data(self, checksum: Checksum) -> str:
        return f"{self.blob(checksum)}/data"

    def file_record(self, checksum: Checksum, file_id: str) -> str:
        return f"{self.blob(checksum)}/{file_id}.json"

    def text(self, checksum: Checksum, origin: Origin) -> str:
        return f"{self.blob(checksum)}/{origin}.txt"

    @property
    def uploads(self) -> str:
        return f"{self.name}/uploads"

    def upload(self, upload_id: str) -> str:
        """Return the folder of one upload in progress, deleted when it ends."""
        return f"{self.uploads}/{upload_id}"

    def upload_part(self, upload_id: str, part: str) -> str:
        return f"{self.upload(upload_id)}/{part}"

    # Tables and snapshots

    @property
    def statements(self) -> str:
        """The Delta table of statements."""
        return f"{self.name}/entities/statements"

    @property
    def translog(self) -> str:
        """The Delta table of events of statements."""
        return f"{self.name}/entities/translog"

    def table(self, name: TableName) -> str:
        """Return the folder of one of the two Delta tables."""
        return self.statements if name == "statements" else self.translog

    def delta_log(self, table: str, version: int) -> str:
        """Return the path of an entry of a Delta log; `table` is `statements` or `translog` of this layout."""
        return f"{table}/_delta_log/{version:020d}.json"

    def delta_checkpoint(self, table: str, version: int) -> tuple[str, str]:
        """Return the paths of a checkpoint of a log and of the file that names the last checkpoint."""
        return f"{table}/_delta_log/{version:020d}.checkpoint.parquet", f"{table}/_delta_log/_last_checkpoint"

    @property
    def snapshots(self) -> str:
        return f"{self.name}/snapshots"

    def snapshot(self, seq: int) -> str:
        return f"{self.snapshots}/{seq:012d}.json"

    @property
    def snapshot_head(self) -> str:
        """The mirror that names the newest manifest, for readers without SQL."""
        return f"{self.snapshots}/HEAD"

    @property
    def snapshot_note(self) -> str:
        """The planned changes of a reconciliation; deleted when it is complete."""
        return f"{self.snapshots}/RECONCILING"

    @property
    def refs(self) -> str:
        return f"{self.name}/refs"

    def ref(self, name: RefName) -> str:
        return f"{self.refs}/{name}.json"

    # Exports

    @property
    def exports(self) -> str:
        return f"{self.name}/exports"

    def export(self, kind: ExportKind, name: str) -> str:
        """Return the path of an export by its name, which may have a suffix for its compression."""
        return f"{self.name}/{name}" if kind in (ExportKind.ENTITIES, ExportKind.INDEX) else f"{self.exports}/{name}"

    @property
    def export_parts(self) -> str:
        """The folder of unfinished parts of exports, deleted by the next run."""
        return f"{self.exports}/.parts"

    def export_run(self, run_id: str) -> str:
        return f"{self.export_parts}/{run_id}"

    @property
    def delta_index(self) -> str:
        return f"{self.exports}/{DELTA_INDEX}"

    @property
    def export_deltas(self) -> str:
        return f"{self.exports}/delta"

    def export_delta(self, name: str) -> str:
        """Return the path of a kept delta: its version, `.json` and the suffix of its compression."""
        return f"{self.export_deltas}/{name}"

    # Mappings

    @property
    def mappings(self) -> str:
        return f"{self.name}/mappings"

    def mapping(self, content_hash: str) -> str:
        return f"{self.mappings}/{content_hash}/mapping.yml"

    def mapping_versions(self, content_hash: str) -> Versions:
        return Versions(f"{self.mappings}/{content_hash}/versions")

    # Mirrors of SQL rows. The tenant is a TenantName or LAKEHOUSE.

    @property
    def tags(self) -> str:
        return f"{self.name}/tags"

    def tag(self, tenant: str, key: TagKey) -> str:
        return f"{self.tags}/{tenant}/{key}"

    @property
    def locks(self) -> str:
        return f"{self.name}/locks"

    def named_lock(self, tenant: str, name: LockName) -> str:
        return f"{self.locks}/{tenant}/{name}"

    @property
    def queue(self) -> str:
        return f"{self.name}/queue"

    def queue_item(self, tenant: str, item_id: str) -> str:
        return f"{self.queue}/{tenant}/{item_id}.json"

    @property
    def runs(self) -> str:
        return f"{self.name}/jobs/runs"

    def run(self, job_type: str, moment: datetime) -> str:
        return f"{self.runs}/{job_type}/{stamp(moment)}.json"

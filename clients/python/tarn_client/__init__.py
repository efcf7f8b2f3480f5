"""Read and write FollowTheMoney data in a Tarn lakehouse."""

from tarn_client.dataset import Dataset
from tarn_client.errors import (
    IncompleteResponse,
    InvalidEntitiesWarning,
    InvalidRequest,
    JobCancelled,
    LakeError,
    Problem,
    Unreachable,
)
from tarn_client.lake import Lake
from tarn_client.records import Entities, Statements
from tarn_client.writer import Writer, Written

__all__ = [
    "Dataset",
    "Entities",
    "IncompleteResponse",
    "InvalidEntitiesWarning",
    "InvalidRequest",
    "JobCancelled",
    "Lake",
    "LakeError",
    "Problem",
    "Statements",
    "Unreachable",
    "Writer",
    "Written",
]

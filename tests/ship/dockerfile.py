"""The Dockerfile as a list of instructions. The parser supports only the syntax that the file uses."""

import json
import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Instruction:
    stage: int
    word: str
    text: str

    @property
    def parts(self) -> list[str]:
        """Return the arguments of the shell or JSON form, without flags such as `--from=build`."""
        text = re.sub(r"^(--\S+\s+)*", "", self.text)
        return json.loads(text) if text.startswith("[") else shlex.split(text)

    @property
    def flags(self) -> list[str]:
        return [part for part in self.text.split() if part.startswith("--")]


def instructions() -> list[Instruction]:
    lines = (line for line in (ROOT / "Dockerfile").read_text().splitlines() if not line.lstrip().startswith("#"))
    logical = re.sub(r"\\\n\s*", "", "\n".join(lines)).splitlines()
    result: list[Instruction] = []
    stage = -1
    for word, text in (line.split(maxsplit=1) for line in logical if line.strip()):
        stage += word == "FROM"
        result.append(Instruction(stage, word, text))
    return result


def final_stage(word: str) -> list[Instruction]:
    """Return the instructions of this kind in the final stage."""
    everything = instructions()
    return [each for each in everything if each.stage == everything[-1].stage and each.word == word]


def image_environment() -> dict[str, str]:
    return dict(part.split("=", 1) for each in final_stage("ENV") for part in each.parts)


def copied_from_the_tree() -> list[Instruction]:
    return [each for each in instructions() if each.word == "COPY" and not each.flags]

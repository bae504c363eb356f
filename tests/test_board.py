"""The board of compressed models, without its commands."""

import json
from pathlib import Path

import pytest

from benchmarks.board import Board, Line, Options, score, scores_on


class Stopped(Board):
    """A board that is stopped after a number of commands, each of which scores 0.5."""

    def __init__(self, output: Path, commands: int) -> None:
        super().__init__(output)
        self.commands = commands

    def run(self, words, folder, **facts):
        if self.commands == 0:
            raise KeyboardInterrupt
        self.commands -= 1
        folder.mkdir(parents=True)
        evaluations = [{"metrics": {"spearman": 0.5}} for _ in facts["models"]]
        (folder / "report.json").write_text(json.dumps({"evaluations": evaluations}))
        row = {"command": f"evaluate {words[1]}", "folder": str(folder), **facts}
        with self.file.open("a") as file:
            file.write(f"{json.dumps(row)}\n")
        self.done[row["command"]] = row


def test_a_board_that_is_stopped_keeps_every_score_that_is_known(tmp_path):
    (tmp_path / "data" / "sts").mkdir(parents=True)
    options = Options([], tmp_path / "data", "", [], ["sts"], Path(), 0, 0, 0, 0, tmp_path)
    lines = [Line("t", name, tmp_path / name) for name in ("teacher", "int8", "family, 2x8")]
    board = Stopped(tmp_path, 2)
    with pytest.raises(KeyboardInterrupt):
        score(lines, "sts", board, options)
    folders = [str(line.folder) for line in lines]
    assert scores_on("sts", Board(tmp_path)) == dict.fromkeys(folders[:2], 50.0)
    board = Stopped(tmp_path, 1)
    score(lines, "sts", board, options)
    assert scores_on("sts", board) == dict.fromkeys(folders, 50.0)
